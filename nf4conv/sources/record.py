"""nf4conv.json: by what a checkpoint was made. No path and no time is in it, so that equal runs
write equal bytes.

    schema_version    1
    command           "quantize" or "dequantize"
    version           of nf4conv
    options           of the command, those that decide the result
    source            id: "org/name@commit", or the name of a folder; headers_sha256; samples_sha256 of one on this
                      disk; adapters that were merged into it
    verified          with --verify: what was measured

A rerun of a finished job knows by it that there is nothing left to do.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from nf4conv.errors import SourceError, named
from nf4conv.format.codebook import SCALES
from nf4conv.sources.reader import each, read_json
from nf4conv.sources.source import AdapterFiles, Source

MAKING: Final = "nf4conv.json"

_LARGEST: Final = 2**20
_SAMPLES: Final = 4096  # of all files, roughly
_MOST_SAMPLES: Final = 256  # of a file
_FEWEST_SAMPLES: Final = 8
_SAMPLE: Final = 4096  # bytes


def record_of(
    source: Source, command: str, version: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of nf4conv.json, but for what verification measured; a SourceError if the source
    cannot be read.
    """
    known_as = name_of(source.folder) if source.fetched is None else str(source.fetched.origin)
    described: dict[str, Any] = {"id": known_as, "headers_sha256": headers_digest(source)}
    if source.fetched is None:  # what has a commit cannot change
        described["samples_sha256"] = _samples_digest(source.files)
    if source.adapters:
        described["adapters"] = [_adapter(adapter) for adapter in source.adapters]
    record = {
        "schema_version": 1,
        "command": command,
        "version": version,
        "options": {
            key: value for key, value in options.items() if key != "lora"
        },  # which may be paths
        "source": described,
    }
    read_back: dict[str, Any] = json.loads(json.dumps(record))  # tuples are lists then
    return read_back


def _adapter(adapter: AdapterFiles) -> dict[str, Any]:
    if adapter.origin is not None:
        return {"id": str(adapter), "config": adapter.config}
    name = name_of(adapter.file.parent)
    return {"id": name, "config": adapter.config, "samples_sha256": _samples_digest([adapter.file])}


def as_bytes(record: Mapping[str, Any]) -> bytes:
    """nf4conv.json as bytes."""
    text = json.dumps(record, indent=2, ensure_ascii=False)
    return f"{text}\n".encode(errors="backslashreplace")  # an escape, in JSON


def read_record(folder: Path) -> dict[str, Any] | None:
    """What a checkpoint says about its making; None if it says nothing that can be read."""
    path = folder / MAKING
    try:
        record = read_json(path, _LARGEST) if path.is_file() else {}
    except (OSError, SourceError):
        return None
    return record if {*map(type, map(record.get, ("options", "source")))} == {dict} else None


def recorded_scales(folder: Path) -> str:
    """Which of SCALES a checkpoint was made with: absmax, unless it says otherwise."""
    record = read_record(folder)
    scales = None if record is None else record["options"].get("scales")
    return scales if isinstance(scales, str) and scales in SCALES else "absmax"


def name_of(folder: Path) -> str:
    """A folder's own name; of one in the Hub's cache, "org/name"."""
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return "/".join(repository.split("--", 2)[1:])
    return folder.name


def headers_digest(source: Source) -> str:
    """Of names, dtypes, shapes and places of all tensors."""
    spelled = "".join(  # as tuples are, but faster
        f"({name!r}, {dtype!r}, {shape!r}, {file.name!r}, {start})"
        for name, dtype, shape, file, start, _, _ in source.tensors
    )
    return hashlib.sha256(spelled.encode()).hexdigest()


def _samples_digest(files: Sequence[Path]) -> str:
    """Of some bytes of each file, all over it: the same headers may describe other values after
    more training.
    """
    most = min(max(_SAMPLES // len(files), _FEWEST_SAMPLES), _MOST_SAMPLES)
    digest = hashlib.sha256()
    for samples in each(partial(_samples, most=most), files):
        digest.update(samples)
    return digest.hexdigest()


def _samples(path: Path, most: int) -> bytes:
    with named(path, SourceError), path.open("rb", buffering=0) as file:
        size = file.seek(0, 2)
        places = range(0, size, max(size // most, _SAMPLE))
        return b"".join(os.pread(file.fileno(), _SAMPLE, place) for place in places)
