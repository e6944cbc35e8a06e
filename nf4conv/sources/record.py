"""Reads and makes nf4conv.json, which says by what a checkpoint was made.

It holds no path and no time, so that equal runs write equal bytes.

    schema_version    2
    command           "quantize" or "dequantize"
    version           of nf4conv
    options           of the command, as they were given; null for what was left open
    weights           groups of the weights in 4 bits as they are, whatever was asked for:
                      "origin" is PACKED or KEPT, "from" what the source has in their place, such
                      as "bfloat16" or "bitsandbytes nf4+/64" (see `recorded_weights`)
    not_packed        how many other tensors there are of each dtype
    source            id                "org/name@commit", or the name of a folder
                      headers_sha256    of names, dtypes, shapes and places of all tensors
                      samples_sha256    of some bytes of a source on this disk
                      adapters          that were merged into it
    calibration       with --calibrate: what the model read, texts with their SHA-256, and tokens
    calibrated        made_by           device and versions
                      blocks            sha256; gains: the error of each weight's outputs on judging
                                        windows, relative to the error with searched scales, 1 for
                                        a weight that keeps these; few_tokens: the number of tokens
                                        that reached a weight, if these were too few
    verified          with --verify: what was measured

By it, a rerun of a finished job knows that there is nothing left to do. Release 0.1.0 wrote schema
1, which has neither weights nor not_packed: its options hold what was decided for all weights.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from nf4conv.errors import SourceError, named
from nf4conv.format.codebook import RECORDED_SCALES
from nf4conv.sources.reader import each, read_json
from nf4conv.sources.source import Source

MAKING: Final = "nf4conv.json"

SCHEMA_VERSION: Final = 2
"""Grows when a reader must know that a field has another meaning."""

PACKED: Final = "packed"
"""Origin of a weight that the command packed."""

KEPT: Final = "kept as found"
"""Origin of a weight that was in 4 bits already, and whose codes and scales stay bit for bit."""

_LARGEST: Final = 2**24  # bytes of a record
_NUMBER: Final = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a part of a name that is a number

_SAMPLES: Final = 4096  # that are read of all files together, roughly
_MOST_SAMPLES: Final = 256  # that are read of a file
_FEWEST_SAMPLES: Final = 8  # that are read of a file
_SAMPLE: Final = 4096  # bytes of a sample


def record_of(
    source: Source,
    command: str,
    version: str,
    options: Mapping[str, Any],
    weights: Sequence[Mapping[str, Any]],
    not_packed: Mapping[str, int],
) -> dict[str, Any]:
    """Returns the content of nf4conv.json, but for what verification measured.

    `weights` are groups of the weights in 4 bits, `not_packed` counts other tensors by dtype.
    """
    deciding = dict(options)
    deciding.pop("lora", None)  # may be paths; the adapters are described with the source
    deciding.pop("calibrate", None)  # is a path; the text is described with the calibration
    record = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "version": version,
        "options": deciding,
        "weights": weights,
        "not_packed": not_packed,
        "source": _describe(source),
    }
    read_back: dict[str, Any] = json.loads(json.dumps(record))  # tuples are lists then
    return read_back


def _describe(source: Source) -> dict[str, Any]:
    """Returns what tells a source from others."""
    origin = None if source.fetched is None else source.fetched.origin
    described: dict[str, Any] = {
        "id": name_of(source.folder) if origin is None else str(origin),
        "headers_sha256": headers_digest(source),
    }
    if origin is None:  # else a commit, which cannot change
        described["samples_sha256"] = _samples_digest(source.files)
    if source.adapters:
        described["adapters"] = []
    for adapter in source.adapters:
        if adapter.origin is not None:
            told = {"id": str(adapter), "config": adapter.config}
        else:
            samples = _samples_digest([adapter.file])
            place = name_of(adapter.file.parent)
            told = {"id": place, "config": adapter.config, "samples_sha256": samples}
        described["adapters"].append(told)
    return described


def as_bytes(record: Mapping[str, Any]) -> bytes:
    """Returns the bytes of nf4conv.json for a record."""
    text = json.dumps(record, indent=2, ensure_ascii=False)
    return f"{text}\n".encode(errors="backslashreplace")  # an escape, in JSON


def read_record(folder: Path) -> dict[str, Any] | None:
    """Returns what a checkpoint says about its making; None if there is no record to be read."""
    try:
        record = read_json(folder / MAKING, _LARGEST)
    except (OSError, SourceError):
        return None
    # every reader needs these
    is_record = isinstance(record.get("options"), dict) and isinstance(record.get("source"), dict)
    return record if is_record else None


def recorded_weights(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the groups of weights that a record describes, whoever wrote it.

    Whatever else a group says, it has "scales", of codebook.RECORDED_SCALES, and "names", in which
    "*" stands for any number between two dots; None for the group of all weights that no other
    group names.
    """
    described = record.get("weights", [record["options"]])  # schema 1: one choice for all weights
    groups = []
    for group in described if isinstance(described, list) else ():
        if not isinstance(group, dict):
            continue
        scales, names = group.get("scales"), group.get("names")
        scales = scales if scales in RECORDED_SCALES else "absmax"
        if isinstance(names, list):
            names = [name for name in names if isinstance(name, str)]
        else:
            names = None
        groups.append({**group, "scales": scales, "names": names})
    return groups


def recorded_blocks(record: Mapping[str, Any] | None) -> list[tuple[str, list[str]]]:
    """Returns the SHA-256 of each block of calibrated weights, of all components that decode them
    (check/record_check.py), and the names of these weights; nothing if the record is damaged.
    """
    try:
        blocks = (record or {})["calibrated"]["blocks"]
        return [(block["sha256"], list(block["gains"].keys())) for block in blocks]
    except (KeyError, TypeError, AttributeError):
        return []


def recorded_scales(record: Mapping[str, Any] | None) -> Callable[[str], str]:
    """Returns a function that tells how a weight was scaled, given its name: "absmax" unless the
    record says otherwise.
    """
    groups = [] if record is None else recorded_weights(record)
    group_of = group_finder(groups)

    def scales_of(name: str) -> str:
        number = group_of(name)
        return "absmax" if number is None else str(groups[number]["scales"])

    return scales_of


def group_finder(groups: Sequence[Mapping[str, Any]]) -> Callable[[str], int | None]:
    """Returns a function that tells to which of a record's groups a weight belongs, given its name:
    the number of the group, from 0; None for a weight of no group.
    """
    others: int | None = None
    number_of: dict[str, int] = {}
    for number, group in enumerate(groups):
        if group["names"] is None:
            others = number
        else:
            number_of.update(dict.fromkeys(group["names"], number))

    def find(name: str) -> int | None:
        if name in number_of or not number_of:
            return number_of.get(name, others)
        return number_of.get(any_number(name), others)

    return find


def any_number(name: str) -> str:
    """Returns a name with "*" in the place of each number between two dots."""
    return _NUMBER.sub("*", name)


def name_of(folder: Path) -> str:
    """Returns a folder's own name; of a folder in the Hub's cache, "org/name"."""
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return "/".join(repository.split("--", 2)[1:])
    return folder.name


def headers_digest(source: Source) -> str:
    """Returns the SHA-256 of names, dtypes, shapes and places of all tensors."""
    # spelled as tuples are, but faster
    spelled = []
    for name, dtype, shape, file, start, _, _ in source.tensors:
        spelled.append(f"({name!r}, {dtype!r}, {shape!r}, {file.name!r}, {start})")
    return hashlib.sha256("".join(spelled).encode()).hexdigest()


def _samples_digest(files: Sequence[Path]) -> str:
    """Returns the SHA-256 of some bytes of each file, all over it.

    After more training, the same headers may describe other values.
    """
    most = min(max(_SAMPLES // len(files), _FEWEST_SAMPLES), _MOST_SAMPLES)
    digest = hashlib.sha256()
    for samples in each(partial(_samples, most=most), files):
        digest.update(samples)
    return digest.hexdigest()


def _samples(path: Path, most: int) -> bytes:
    """Reads about so many samples of a file, at equal distances."""
    with named(path, SourceError), path.open("rb", buffering=0) as file:
        size = file.seek(0, 2)
        samples = []
        for place in range(0, size, max(size // most, _SAMPLE)):
            file.seek(place)
            samples.append(file.read(_SAMPLE))
        return b"".join(samples)
