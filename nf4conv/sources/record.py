"""Reads and makes nf4conv.json, which says by what a checkpoint was made.

It holds no path and no time, so that equal runs write equal bytes.

    schema_version    1
    command           "quantize" or "dequantize"
    version           of nf4conv
    options           of the command, those that decide the result
    source            id                "org/name@commit", or the name of a folder
                      headers_sha256    of names, dtypes, shapes and places of all tensors
                      samples_sha256    of some bytes of a source on this disk
                      adapters          that were merged into it
    verified          with --verify: what was measured

By it, a rerun of a finished job knows that there is nothing left to do.
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

_LARGEST: Final = 2**20  # bytes of a record

_SAMPLES: Final = 4096  # of all files, roughly
_MOST_SAMPLES: Final = 256  # of a file
_FEWEST_SAMPLES: Final = 8  # of a file
_SAMPLE: Final = 4096  # bytes


def record_of(
    source: Source, command: str, version: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the content of nf4conv.json, but for what verification measured.

    Args:
        source: what the checkpoint is made from.
        command: "quantize" or "dequantize".
        version: of nf4conv.
        options: of the command, those that decide the result.

    Raises:
        SourceError: the source cannot be read.
    """
    deciding = dict(options)
    deciding.pop("lora", None)  # may be paths; the adapters are described with the source
    record = {
        "schema_version": 1,
        "command": command,
        "version": version,
        "options": deciding,
        "source": _describe(source),
    }
    read_back: dict[str, Any] = json.loads(json.dumps(record))  # tuples are lists then
    return read_back


def _describe(source: Source) -> dict[str, Any]:
    """Returns what tells a source from others."""
    described: dict[str, Any] = {}
    if source.fetched is None:
        described["id"] = name_of(source.folder)
        described["headers_sha256"] = headers_digest(source)
        described["samples_sha256"] = _samples_digest(source.files)
    else:  # a commit cannot change
        described["id"] = str(source.fetched.origin)
        described["headers_sha256"] = headers_digest(source)
    if source.adapters:
        described["adapters"] = [_describe_adapter(adapter) for adapter in source.adapters]
    return described


def _describe_adapter(adapter: AdapterFiles) -> dict[str, Any]:
    if adapter.origin is not None:
        return {"id": str(adapter), "config": adapter.config}
    return {
        "id": name_of(adapter.file.parent),
        "config": adapter.config,
        "samples_sha256": _samples_digest([adapter.file]),
    }


def as_bytes(record: Mapping[str, Any]) -> bytes:
    """Returns the bytes of nf4conv.json for a record."""
    text = json.dumps(record, indent=2, ensure_ascii=False)
    return f"{text}\n".encode(errors="backslashreplace")  # an escape, in JSON


def read_record(folder: Path) -> dict[str, Any] | None:
    """Returns what a checkpoint says about its making; None if there is no record to be read."""
    path = folder / MAKING
    try:
        if not path.is_file():
            return None
        record = read_json(path, _LARGEST)
    except (OSError, SourceError):
        return None
    is_record = isinstance(record.get("options"), dict) and isinstance(record.get("source"), dict)
    return record if is_record else None


def recorded_scales(folder: Path) -> str:
    """Returns which of SCALES a checkpoint was made with: absmax, unless it says otherwise."""
    record = read_record(folder)
    if record is None:
        return "absmax"
    scales = record["options"].get("scales")
    return scales if isinstance(scales, str) and scales in SCALES else "absmax"


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
    spelled = "".join(
        f"({name!r}, {dtype!r}, {shape!r}, {file.name!r}, {start})"
        for name, dtype, shape, file, start, _, _ in source.tensors
    )
    return hashlib.sha256(spelled.encode()).hexdigest()


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
        places = range(0, size, max(size // most, _SAMPLE))
        return b"".join(os.pread(file.fileno(), _SAMPLE, place) for place in places)
