"""Reads and makes nf4conv.json, which says by what a checkpoint was made.

It holds no path and no time, so that equal runs write equal bytes.

    schema_version    2
    command           "quantize" or "dequantize"
    version           of nf4conv
    options           of the command, as they were given; null for what was left open
    weights           groups of the weights in 4 bits as they are, whatever was asked for (see
                      `GroupOfWeights`)
    not_packed        how many other tensors there are of each dtype
    source            id                "org/name@commit", or the name of a folder
                      headers_sha256    of names, dtypes, shapes and places of all tensors
                      samples_sha256    of some bytes of a source on this disk
                      adapters          that were merged into it
    verified          with --verify: what was measured

By it, a rerun of a finished job knows that there is nothing left to do. Release 0.1.0 wrote schema
1, which has neither weights nor not_packed: its options hold what was decided for all weights.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from nf4conv.errors import SourceError, named
from nf4conv.format.codebook import RECORDED_SCALES
from nf4conv.sources.reader import each, read_json
from nf4conv.sources.source import AdapterFiles, Source

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


@dataclass(frozen=True)
class GroupOfWeights:
    """Describes weights of a checkpoint that were made alike, as nf4conv.json does.

    Attributes:
        scales: how the blocks were scaled, one of codebook.RECORDED_SCALES.
        names: their names, in which "*" stands for any number between two dots. None for the group
            of all weights that no other group names.
        said: everything that the record says of them, as it stands there: "origin" is PACKED or
            KEPT, "from" what the source has in their place, such as "bfloat16" or "bitsandbytes
            nf4+/64".
    """

    scales: str
    names: tuple[str, ...] | None
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Returns the number of weights; 0 if the record does not say it."""
        count = self.said.get("count")
        return count if type(count) is int else 0


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
        described["adapters"] = [_describe_adapter(adapter) for adapter in source.adapters]
    return described


def _describe_adapter(adapter: AdapterFiles) -> dict[str, Any]:
    """Returns what tells an adapter from others."""
    if adapter.origin is not None:
        return {"id": str(adapter), "config": adapter.config}
    samples = _samples_digest([adapter.file])
    place = name_of(adapter.file.parent)
    return {"id": place, "config": adapter.config, "samples_sha256": samples}


def as_bytes(record: Mapping[str, Any]) -> bytes:
    """Returns the bytes of nf4conv.json for a record."""
    text = json.dumps(record, indent=2, ensure_ascii=False)
    return f"{text}\n".encode(errors="backslashreplace")  # an escape, in JSON


def read_record(place: Path) -> dict[str, Any] | None:
    """Returns what a checkpoint, a folder or its only file, says about its making; None if there is
    no record to be read.
    """
    try:
        folder = place.parent if place.is_file() else place
        record = read_json(folder / MAKING, _LARGEST)
    except (OSError, SourceError):
        return None
    # every reader needs these
    is_record = isinstance(record.get("options"), dict) and isinstance(record.get("source"), dict)
    return record if is_record else None


def recorded_weights(record: Mapping[str, Any]) -> list[GroupOfWeights]:
    """Returns the groups of weights that a record describes, whoever wrote it."""
    described = record.get("weights")
    if not isinstance(described, list):
        # schema 1: one choice for all weights
        scales = _scales_or_absmax(record["options"].get("scales"))
        return [GroupOfWeights(scales, None)]
    groups = []
    for group in described:
        if isinstance(group, dict):
            names = group.get("names")
            if isinstance(names, list):
                names = tuple(name for name in names if isinstance(name, str))
            else:
                names = None
            groups.append(GroupOfWeights(_scales_or_absmax(group.get("scales")), names, group))
    return groups


@dataclass(frozen=True)
class CalibratedBlock:
    """Says what came of the calibrated weights of a block of layers.

    Attributes:
        sha256: the SHA-256 of all components that decode them, see check/record_check.py.
        gains: the error of each weight's outputs on judging windows, relative to the error with
            searched scales; 1 for a weight that keeps the searched scales.
        few_tokens: the number of tokens that reached a weight, for each weight that too few
            reached.
    """

    sha256: str
    gains: Mapping[str, float]
    few_tokens: Mapping[str, int]


@dataclass(frozen=True)
class CalibrationResult:
    """Says what came of a calibration: by which device and versions, and of each block.

    A finished calibration also names what the model read: texts with their SHA-256, and tokens.
    """

    made_by: Mapping[str, str]
    blocks: tuple[CalibratedBlock, ...]
    texts: tuple[tuple[str, str], ...] = ()
    tokens: int = 0
    knows: str = ""

    def described(self) -> dict[str, Any]:
        """Returns the fields of nf4conv.json."""
        blocks = []
        for block in self.blocks:
            gains = {name: round(gain, 4) for name, gain in block.gains.items()}
            described: dict[str, Any] = {"sha256": block.sha256, "gains": gains}
            if block.few_tokens:
                described["few_tokens"] = dict(block.few_tokens)
            blocks.append(described)
        return {"made_by": dict(self.made_by), "blocks": blocks}


def recorded_calibration(record: Mapping[str, Any] | None) -> CalibrationResult:
    """Returns what a record says of calibrated weights; nothing if it is damaged."""
    try:
        asked, found = (record or {})["calibration"], (record or {})["calibrated"]
        blocks = []
        for block in found["blocks"]:
            gains = dict(block["gains"])
            for gain in gains.values():
                if type(gain) not in (int, float) or not 0 <= gain < math.inf:
                    raise ValueError(f"a gain of {gain!r}")
            few_tokens = dict(block.get("few_tokens", {}))
            blocks.append(CalibratedBlock(str(block["sha256"]), gains, few_tokens))
        return CalibrationResult(
            made_by={what: str(which) for what, which in found["made_by"].items()},
            blocks=tuple(blocks),
            texts=tuple((str(text["name"]), str(text["sha256"])) for text in asked["texts"]),
            tokens=int(asked["tokens"]),
            knows=str(asked["knows"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return CalibrationResult({}, ())


def _scales_or_absmax(scales: object) -> str:
    return scales if isinstance(scales, str) and scales in RECORDED_SCALES else "absmax"


def recorded_scales(place: Path) -> Callable[[str], str]:
    """Returns a function that tells how a weight was scaled, given its name: "absmax" unless the
    record of the checkpoint, a folder or its only file, says otherwise.
    """
    return scales_in(read_record(place))


def scales_in(record: Mapping[str, Any] | None) -> Callable[[str], str]:
    """Returns a function that tells how a weight was scaled, given its name, by a record."""
    groups = [] if record is None else recorded_weights(record)
    group_of = group_finder([group.names for group in groups])

    def scales_of(name: str) -> str:
        number = group_of(name)
        return "absmax" if number is None else groups[number].scales

    return scales_of


def group_finder(names: Sequence[Sequence[str] | None]) -> Callable[[str], int | None]:
    """Returns a function that tells to which group of a record a weight belongs, given its name.

    `names` are those of the weights of each group; None for the group that has all others. The
    function returns the number of the group, from 0; None for a weight of no group.
    """
    others: int | None = None
    number_of: dict[str, int] = {}
    for number, own in enumerate(names):
        if own is None:
            others = number
        else:
            number_of.update(dict.fromkeys(own, number))

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
