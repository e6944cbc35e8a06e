"""Compares what two runs make: a run may only go on with what the same run has begun."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nf4conv.errors import OutputError


def require_same_run(
    out: Path, before: Mapping[str, Any], now: Mapping[str, Any], advice: str
) -> None:
    """Checks that a run makes what the one makes that has begun in the same folder."""
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if changed:
        place, was, found = _first_difference(changed[0], before, now)
        names = ", ".join(changed)
        raise OutputError(
            f"{out}: holds an unfinished run that differs in {names} "
            f"({place} was {shortened(was)}, is {shortened(found)}); {advice}",
            path=out,
        )


def _first_difference(
    key: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[str, object, object]:
    """Finds the first value that differs within one of a fingerprint, such as a file's stamp."""
    places = [key]
    was = before.get(key)
    found = now.get(key)
    while isinstance(was, Mapping) and isinstance(found, Mapping):
        names = [name for name in {**was, **found} if was.get(name) != found.get(name)]
        if not names:  # one of them has a null that the other lacks
            break
        places.append(json.dumps(names[0], ensure_ascii=False)[1:-1])
        was = was.get(names[0])
        found = found.get(names[0])
    return f"{': '.join(places):.200}", was, found


def as_json(value: Any) -> Any:
    """Returns a value as it would be read back from JSON, to compare it with one that was."""
    return json.loads(json.dumps(value))


def shortened(value: object) -> str:
    """Returns a JSON value as a text of at most 60 characters."""
    if value is None:
        return "not given"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
