"""Checks the plan that all parts of a run are held to: what it names, and of which kind it is.

The plan comes from a file in OUT, which anybody may have changed who can write there.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final

from nf4conv.errors import OutputError
from nf4conv.sources.record import MAKING
from nf4conv.sources.unfinished import PARTS, RECORD, SHARDS

AUXILIARY: Final = "auxiliary"
"""The key of the files to copy; and the folder in OUT's work folder that holds them."""


def check_shared_plan(out: Path, plan: Mapping[str, Any]) -> None:
    """Checks a plan of parts, as it was read from JSON.

    Args:
        out: the folder that is filled in parts.
        plan: the plan; it has the number of parts.

    Raises:
        OutputError: a value is missing or of another kind, or a name leads out of the folder.
    """
    for key, is_sound in _EXPECTED.items():
        if key not in plan or not is_sound(plan[key]):
            raise OutputError(
                f"{out}: its {RECORD} is damaged at {key!r}; remove OUT and run the parts again",
                path=out,
            )
    if _leads_outside([*plan[SHARDS], *plan[AUXILIARY], plan["stem"]]):
        raise OutputError(
            f"{out}: its {RECORD} names files outside it; that is none of ours", path=out
        )


def _leads_outside(names: Iterable[str]) -> bool:
    """Returns True if one of the names of files is not in the folder that they are relative to."""
    for name in names:
        for kind in (PurePosixPath, PureWindowsPath):
            path = kind(name)
            if path.is_absolute() or path.drive or ".." in path.parts:
                return True
    return False


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value not in ("", ".") and "\0" not in value


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _are_shards(value: object) -> bool:
    """Returns True for a dict from names of shards to the number of the part that makes each."""
    if not isinstance(value, dict) or not value:
        return False
    return all(_is_name(name) and _is_count(part) for name, part in value.items())


def _are_copies(value: object) -> bool:
    """Returns True for a dict from names of files to their SHA-256."""
    if not isinstance(value, dict):
        return False
    return all(_is_name(name) and _is_digest(digest) for name, digest in value.items())


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _is_record(value: object) -> bool:
    return isinstance(value, dict)


_EXPECTED: Final[Mapping[str, Callable[[object], bool]]] = {
    PARTS: _is_count,
    SHARDS: _are_shards,
    AUXILIARY: _are_copies,
    "stem": _is_name,
    "config.json": _is_text_or_none,
    "model card": _is_text_or_none,
    "bytes": _is_count,
    "parameters": _is_count,
    "--checksum": _is_flag,
    "--verify": _is_flag,
    MAKING: _is_record,
}
"""Tells for each value that `nf4conv finish` reads whether it is of the right kind."""
