"""Compares what two runs make: a run may only go on with what the same run has begun."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nf4conv.errors import OutputError


def require_same_run(
    out: Path, before: Mapping[str, Any], now: Mapping[str, Any], advice: str
) -> None:
    """Checks that a run makes what the one makes that has begun in the same folder.

    Args:
        out: the folder.
        before: the fingerprint of the run that has begun, as JSON values.
        now: the fingerprint of this run, as JSON values.
        advice: what the user can do if they differ.

    Raises:
        OutputError: they differ; it says in what.
    """
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if changed:
        key = changed[0]
        was = shortened(before.get(key))
        found = shortened(now.get(key))
        raise OutputError(
            f"{out}: holds an unfinished run that differs in {', '.join(changed)} "
            f"({key} was {was}, is {found}); {advice}",
            path=out,
        )


def as_json(value: Any) -> Any:
    """Returns a value as it would be read back from JSON, to compare it with one that was."""
    return json.loads(json.dumps(value))


def shortened(value: object) -> str:
    """Returns a JSON value as a text of at most 60 characters."""
    if value is None:
        return "not given"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
