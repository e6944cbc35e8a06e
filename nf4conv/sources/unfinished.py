"""Recognises a folder in which a run of nf4conv has begun and not ended.

A run keeps its state in OUT/.nf4conv until the result is complete: run.json says what is made, and
shards/ holds a record of each file that is finished.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from nf4conv.errors import SourceError
from nf4conv.sources.files import MARKS_OF_MODELS
from nf4conv.sources.reader import read_small

WORK_FOLDER: Final = ".nf4conv"
"""The folder in OUT with the state of a run."""

RECORD: Final = "run.json"
"""The file in it that says what is made: the fingerprint of the plan."""

LARGEST_RECORD: Final = 2**28  # bytes, with the shards of a million tensors

SHARDS: Final = "shards"
"""The folder in it with the records of finished files."""

CALIBRATED: Final = "calibrated"
"""The folder in it with the finished blocks of a calibration."""

_DIGEST: Final = "sha256 of this record"
"""The key in the record of a shard of a hash of the rest."""

LAST_FILES: Final = "last files"
"""The key in the fingerprint of a folder that is filled in parts, with what its last files hold."""


class FinishedFile(NamedTuple):
    """A shard that is complete."""

    size: int  # bytes
    digest: int  # of its content, see output/digest.py
    source_bytes: int = 0  # bytes of the source that it stands for
    # a VerificationSummary, see report/results.py; None without --verify
    verified: Mapping[str, Any] | None = None
    plan: str = ""  # SHA-256 of the run.json by which it was made


def finished_shards(out: Path, names: Iterable[str] | None = None) -> dict[str, FinishedFile]:
    """Returns the shards that have been finished so far, by name: all of them, or those that are
    named.
    """
    folder = out / WORK_FOLDER / SHARDS
    records: list[Path] = []
    if names is None:
        with suppress(FileNotFoundError):  # a run that ends has just removed the folder
            records = list(folder.glob("*.json"))
    else:
        records = [folder / record_name(name) for name in names]
    found = {}
    for path in records:
        # a shard whose record is missing or damaged is not finished
        with suppress(SourceError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            fields = dict(json.loads(read_small(path)))
            is_sound = fields.pop(_DIGEST) == _digest_of(fields)
            name = fields.pop("name")
            if is_sound and record_name(name) == path.name:
                found[name] = FinishedFile(**fields)
    return found


def describe_finished(name: str, file: FinishedFile) -> bytes:
    """Returns the content of the record of a finished shard."""
    fields = {"name": name, **file._asdict()}
    return json.dumps({**fields, _DIGEST: _digest_of(fields)}).encode()


def _digest_of(fields: Mapping[str, Any]) -> str:
    """Returns a hash by which a record is known to be what was written."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def record_name(shard: str) -> str:
    """Returns the name of the record of a finished shard."""
    return f"{shard}.json"


def is_unfinished(out: Path) -> bool:
    """Returns True if a run into a folder has begun and not ended."""
    return (out / WORK_FOLDER / RECORD).is_file()


def is_model(folder: Path) -> bool:
    """Returns True if loaders recognise a model in a folder."""
    return any((folder / name).is_file() for name in MARKS_OF_MODELS)


def check_finished(folder: Path) -> None:
    """Raises a SourceError for a folder in which a run has not ended, and says how to go on."""
    if not is_unfinished(folder) or is_model(folder):
        return
    finished = len(finished_shards(folder))
    raise SourceError(
        f"{folder}: an unfinished run of nf4conv, in which {finished:,} files are finished; the "
        f"same command as before goes on with it, and --overwrite starts anew",
        path=folder,
    )


def is_filled_in_parts(out: Path) -> bool:
    """Returns True if parts have begun to fill a folder, and nobody has made its last files."""
    with suppress(SourceError, OSError):
        run = read_small(out / WORK_FOLDER / RECORD, LARGEST_RECORD)
        return f'"{LAST_FILES}": '.encode() in run
    return False
