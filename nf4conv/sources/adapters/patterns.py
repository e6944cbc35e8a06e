"""Finds the patterns of an adapter's config that fit its modules.

rank_pattern and alpha_pattern have regular expressions as keys, and a hostile one may take for ever
to match. Those that could are matched in a process of their own, which has a limit of time.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from nf4conv.errors import SourceError

_LONGEST: Final = 2**20  # characters of all patterns
_SECONDS: Final = 20
_MOST_AT_ONCE: Final = 10**6  # pairs of a plain pattern and a path, which take a second

_PLAIN: Final = re.compile(r"\^?(\\\.|[\w.-])*\$?")
"""Patterns that match without backtracking: most adapters name modules."""

_PROGRAM: Final = """
import json, re, sys
patterns, paths = json.load(sys.stdin)
patterns = [re.compile(pattern) for pattern in patterns]
found = []
for path in paths:
    found.append(next((n for n, one in enumerate(patterns) if one.match(path)), None))
json.dump(found, sys.stdout)
"""


def values_by_path(patterns: object, paths: Sequence[str], place: str) -> dict[str, Any]:
    """Returns what the first pattern stands for that fits a path, for each path that one fits.

    A pattern fits the whole path, or the end of it behind a dot (PEFT: get_pattern_key). `place`
    names the patterns in errors.
    """
    if not isinstance(patterns, Mapping):
        raise SourceError(
            f"{place}: not a JSON object with regular expressions as keys: {patterns!r:.80}"
        )
    if sum(map(len, patterns)) > _LONGEST:
        raise SourceError(f"{place}: the patterns have more than {_LONGEST:,} characters")
    compiled = [_compiled(pattern, place) for pattern in patterns]
    values = list(patterns.values())
    is_quick = len(patterns) * len(paths) <= _MOST_AT_ONCE
    if is_quick and all(map(_PLAIN.fullmatch, patterns)):
        numbers = [_first(compiled, path) for path in paths]
    else:
        numbers = _first_in_time([one.pattern for one in compiled], paths, place)
    return {path: values[n] for path, n in zip(paths, numbers, strict=True) if n is not None}


def _compiled(pattern: str, place: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise SourceError(
            f"{place}: not a JSON object with regular expressions as keys: {pattern!r:.80}: {error}"
        ) from error


def _first(patterns: Sequence[re.Pattern[str]], path: str) -> int | None:
    """Returns the number of the first pattern that matches."""
    for number, pattern in enumerate(patterns):
        if pattern.match(path):
            return number
    return None


def _first_in_time(patterns: Sequence[str], paths: Sequence[str], place: str) -> list[int | None]:
    """Returns the number of the first pattern that matches each path; raises a SourceError if that
    takes too long. Nothing can stop an expression but the end of its process.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=json.dumps([patterns, paths]),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        raise SourceError(
            f"{place}: takes more than {_SECONDS} seconds to match; write the paths of modules "
            f"instead of patterns"
        ) from error
    numbers: list[int | None] = json.loads(done.stdout)
    return numbers
