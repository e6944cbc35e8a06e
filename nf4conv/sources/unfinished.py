"""Recognises a folder in which a run of nf4conv has begun and not ended, by what the run leaves in
OUT/.nf4conv.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from nf4conv.errors import SourceError

WORK_FOLDER: Final = ".nf4conv"

RECORD: Final = "run.json"

PARTS: Final = "number of parts"  # in the fingerprint of a folder that is filled in parts

SHARDS: Final = "shards"

HOW_TO_FINISH: Final = "run the parts that are missing, and then `nf4conv finish`"


class FinishedFile(NamedTuple):
    """A shard that is complete."""

    size: int  # bytes
    crc32: int  # of its content
    sha256: str | None  # hexadecimal; None when no checksums were asked for
    source_bytes: int = 0  # of the source that it stands for
    verified: Mapping[str, Any] | None = (
        None  # a VerificationSummary, see report/rows/weights.py; None without --verify
    )
    plan: str = ""  # SHA-256 of the run.json by which it was made


def finished_shards(out: Path, names: Iterable[str] | None = None) -> dict[str, FinishedFile]:
    """The shards that have been finished so far in a folder, of those with these names or of all,
    by name.
    """
    found, folder = {}, out / WORK_FOLDER / SHARDS
    for path in (
        folder.glob("*.json") if names is None else [folder / record_name(name) for name in names]
    ):
        with suppress(
            OSError, ValueError, TypeError, KeyError, RecursionError
        ):  # then it is not finished
            fields = dict(json.loads(path.read_bytes()))
            name = str(fields.pop("name"))
            found[name] = FinishedFile(**fields)
    return found


def record_name(shard: str) -> str:
    return f"{shard.replace('/', ' ')}.json"


def is_unfinished(out: Path) -> bool:
    """Whether a run into a folder has begun and not ended."""
    return (out / WORK_FOLDER / RECORD).is_file()


def check_finished(folder: Path) -> None:
    """Refuse by a SourceError to read a folder in which a run has not ended, and say how to go on."""
    if not is_unfinished(folder) or is_model(folder):
        return
    in_parts = f'"{PARTS}": '.encode() in (folder / WORK_FOLDER / RECORD).read_bytes()
    how = (
        HOW_TO_FINISH
        if in_parts
        else "the same command as before goes on with it, and --overwrite starts anew"
    )
    finished = len(finished_shards(folder))
    raise SourceError(
        f"{folder}: an unfinished run of nf4conv, in which {finished:,} files are finished; {how}"
    )


def is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "model_index.json"))
