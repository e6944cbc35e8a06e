"""Finds the pattern of an adapter's config that fits a module, in bounded time.

rank_pattern and alpha_pattern have regular expressions as keys, which PEFT matches by backtracking:
a hostile one takes for ever. Here, all places that a part of an expression can lead to are followed
at once. A set of places is an integer whose bit p stands for the place before character p. So a
module takes about as many steps as its expressions are long, and steps are counted.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from nf4conv.errors import SourceError

_MOST_STEPS: Final = 10_000_000  # for all modules of an adapter; about 10 s
_STEPS_OF_A_CHARACTER: Final = 10  # to compile it

# Python's own parser of regular expressions; it has no public name
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

_PLAIN: Final = re.compile(r"[\w.-]*")
"""Expressions that match without any backtracking."""

_CATEGORIES: Final = {
    "CATEGORY_DIGIT": re.compile(r"\d"),
    "CATEGORY_NOT_DIGIT": re.compile(r"\D"),
    "CATEGORY_SPACE": re.compile(r"\s"),
    "CATEGORY_NOT_SPACE": re.compile(r"\S"),
    "CATEGORY_WORD": re.compile(r"\w"),
    "CATEGORY_NOT_WORD": re.compile(r"\W"),
}


class Patterns:
    """Holds the patterns of a config, with what they stand for.

    Args:
        values: what each pattern stands for.
        place: names them in errors.

    Raises:
        SourceError: one of them is no regular expression.
    """

    def __init__(self, values: object, place: str) -> None:
        self._place = place
        self._steps = 0
        self._known: list[tuple[Callable[[str], bool], Any]] = []
        self._found: dict[str, Any] = {}  # by path
        if not isinstance(values, Mapping):
            raise SourceError(
                f"{place}: not a JSON object with regular expressions as keys: {values!r:.80}"
            )
        for pattern, value in values.items():
            self._known.append((self._compiled(pattern), value))

    def value_of(self, path: str, otherwise: object) -> Any:
        """Returns what the first pattern stands for that fits a path; `otherwise` if none fits.

        A pattern fits the whole path, or the end of it behind a dot (PEFT: get_pattern_key).

        Raises:
            SourceError: matching takes too many steps.
        """
        if path not in self._found:
            self._found[path] = self._first(path, otherwise)
        return self._found[path]

    def _first(self, path: str, otherwise: object) -> Any:
        for fits, value in self._known:
            self.count()
            if fits(path):
                return value
        return otherwise

    def count(self, steps: int = 1) -> None:
        """Counts steps.

        Raises:
            SourceError: they are too many.
        """
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise SourceError(
                f"{self._place}: takes more than {_MOST_STEPS:,} steps to match; write the paths "
                f"of modules instead of patterns"
            )

    def _compiled(self, pattern: str) -> Callable[[str], bool]:
        """Returns a function that tells whether a pattern fits a path."""
        self.count(_STEPS_OF_A_CHARACTER * (len(pattern) + 1))
        whole = rf"(.*\.)?({pattern})$"
        try:
            expression = re.compile(whole)
            if _PLAIN.fullmatch(pattern):
                return lambda path: expression.match(path) is not None
            program = list(_parser.parse(whole))
        except (re.error, OverflowError, RecursionError) as error:
            raise SourceError(
                f"{self._place}: not a JSON object with regular expressions as keys: "
                f"{pattern!r:.80}: {error}"
            ) from error
        if expression.flags != re.UNICODE:
            raise self.unknown(pattern, "flags")
        return lambda path: _Text(path, pattern, self).ends(program, 1) != 0

    def unknown(self, pattern: str, what: object) -> SourceError:
        """Returns the error of a pattern that cannot be matched in bounded time."""
        return SourceError(
            f"{self._place}: {pattern!r:.80}: {what} cannot be matched in bounded time; write the "
            f"paths of modules"
        )


class _Text:
    """Matches an expression with a text.

    Args:
        text: what is matched.
        pattern: the expression as it was written, for errors.
        patterns: counts the steps.
    """

    def __init__(self, text: str, pattern: str, patterns: Patterns) -> None:
        self._text = text
        self._pattern = pattern
        self._patterns = patterns
        self._masks: dict[str, int] = {}  # places before characters of a kind

    def ends(self, program: Iterable[tuple[Any, Any]], starts: int) -> int:
        """Returns the places to which a part of an expression leads from some places."""
        places = starts
        for operation, argument in program:
            self._patterns.count()
            places = self._step(str(operation), argument, places)
            if not places:
                return 0
        return places

    def _step(self, operation: str, argument: Any, places: int) -> int:
        """Returns the places to which one operation leads from some places."""
        if operation in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return (places & self._mask(operation, argument)) << 1
        if operation == "BRANCH":
            found = 0
            for branch in argument[1]:
                found |= self.ends(branch, places)
            return found
        if operation == "SUBPATTERN":
            _, added, removed, inner = argument
            if added or removed:
                raise self._patterns.unknown(self._pattern, "flags")
            return self.ends(inner, places)
        if operation in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = argument
            return self._repeat(least, most, inner, places)
        if operation in ("ASSERT", "ASSERT_NOT"):
            direction, inner = argument
            return self._look(direction, inner, places, is_wanted=operation == "ASSERT")
        if operation == "AT":
            return places & self._anchor(str(argument))
        if operation == "FAILURE":
            return 0
        raise self._patterns.unknown(self._pattern, operation.lower())

    def _repeat(self, least: int, most: int, inner: Any, places: int) -> int:
        """Returns the places to which `least` to `most` repetitions lead from some places."""
        # more often than there are characters, nothing changes any more
        enough = len(self._text) + 1
        for _ in range(min(least, enough)):
            places = self.ends(inner, places)
            if not places:
                return 0
        new = places
        for _ in range(min(most - least, enough)):
            new = self.ends(inner, new) & ~places
            if not new:
                break
            places |= new
        return places

    def _look(self, direction: int, inner: Any, places: int, *, is_wanted: bool) -> int:
        """Returns the places at which an expression matches ahead of them, or behind them.

        Without `is_wanted` it returns the places at which the expression does not match.
        """
        width = inner.getwidth()[0] if direction < 0 else 0
        found = 0
        for place in range(len(self._text) + 1):
            here = 1 << place
            if not places & here:
                continue
            matches = False
            if place >= width:
                ends = self.ends(inner, here >> width)
                matches = ends != 0 if direction > 0 else bool(ends & here)
            if matches == is_wanted:
                found |= here
        return found

    def _anchor(self, name: str) -> int:
        """Returns the places at which an anchor such as ^, $ or a word boundary matches."""
        size = len(self._text)
        if name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return 1
        if name == "AT_END_STRING":
            return 1 << size
        if name == "AT_END":
            is_line = self._text.endswith("\n")
            return 1 << size | (1 << size - 1 if is_line else 0)
        boundary = re.compile(r"\b" if name == "AT_BOUNDARY" else r"\B")
        return sum(1 << found.start() for found in boundary.finditer(self._text))

    def _mask(self, operation: str, argument: Any) -> int:
        """Returns the places before characters that one operation takes."""
        key = f"{operation} {argument}"
        if key not in self._masks:
            self._patterns.count(len(self._text))
            mask = 0
            for place, character in enumerate(self._text):
                if _takes(operation, argument, character):
                    mask |= 1 << place
            self._masks[key] = mask
        return self._masks[key]


def _takes(operation: str, argument: Any, character: str) -> bool:
    """Returns True if an operation of an expression takes a character."""
    code = ord(character)
    if operation == "LITERAL":
        return bool(code == argument)
    if operation == "NOT_LITERAL":
        return bool(code != argument)
    if operation == "ANY":
        return character != "\n"
    if operation == "RANGE":
        return bool(argument[0] <= code <= argument[1])
    if operation == "CATEGORY":
        return _CATEGORIES[str(argument)].match(character) is not None
    is_negated = str(argument[0][0]) == "NEGATE"
    items = argument[1:] if is_negated else argument
    is_listed = any(_takes(str(kind), value, character) for kind, value in items)
    return is_listed != is_negated
