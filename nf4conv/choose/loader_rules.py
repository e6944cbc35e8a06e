"""Matches a list of modules (llm_int8_skip_modules) as each loader does.

Three loaders read the list, each by a rule of its own, and none of them with the names on disk but
with those that the modules have in memory:

    transformers 4   an entry is a module's last part or its whole path, or it stands anywhere in
                     the path before a dot
    transformers 5   an entry is a regular expression that matches from the start of the path to the
                     end of a part (before 5.21: to anywhere), or the path ends with it
    vLLM, SGLang     an entry is one part of the path, or a dotted prefix of it

(transformers 4.57.6 integrations/bitsandbytes.py, 5.23.0 quantizers/quantizers_utils.py; vLLM's
bitsandbytes quantization.)
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import filterfalse, groupby
from typing import Final, NamedTuple

from nf4conv.choose.name_index import NameIndex
from nf4conv.errors import PlanError

Predicate = Callable[[str], bool]

_END_OF_A_PART: Final = r"(?:(?<=\.)|(?=\.|$))"


class Siblings(NamedTuple):
    """Groups paths that are directly below the same parent."""

    parent: str
    paths: Sequence[str]


def parent_of(path: str) -> str:
    """Returns the path of the module above another; "" for one at the top."""
    return path.rpartition(".")[0]


def grouped(paths: Iterable[str]) -> list[Siblings]:
    """Groups paths that stand beside each other and have the same parent."""
    return [Siblings(parent, tuple(group)) for parent, group in groupby(paths, parent_of)]


def _never(path: str) -> bool:  # noqa: ARG001 - has the signature of a predicate
    return False


class Rule:
    """Knows which modules a loader leaves alone because of a list. Call it with a path.

    Args:
        own: True for a path that is left alone by itself.
        above: True for a path below which every module is left alone.
    """

    def __init__(self, own: Predicate, above: Predicate = _never) -> None:
        self.own = own
        self.above = above
        # the answers about paths above others: a checkpoint's modules come in groups
        self._known = {"": False}

    def __call__(self, path: str) -> bool:
        return self.own(path) or self._skips_below(parent_of(path))

    def skipped(self, groups: Iterable[Siblings]) -> Iterator[str]:
        """Yields the paths that the loader leaves alone."""
        for group in groups:
            if self._skips_below(group.parent):
                yield from group.paths
            else:
                yield from filter(self.own, group.paths)

    def not_skipped(self, groups: Iterable[Siblings]) -> Iterator[str]:
        """Yields the paths that the loader does not leave alone."""
        for group in groups:
            if not self._skips_below(group.parent):
                yield from filterfalse(self.own, group.paths)

    def _skips_below(self, path: str) -> bool:
        if path not in self._known:
            self._known[path] = self._skips_below(parent_of(path)) or self.above(path)
        return self._known[path]


def is_name(entry: str) -> bool:
    """Returns True if an entry means itself to all loaders.

    To transformers 5 every entry is a regular expression. In a name only the dots are special.
    """
    return entry != "" and not re.search(r"[\\^$*+?{}()|\[\]]", entry)


def transformers_4(entries: Iterable[str]) -> Rule:
    """Returns the rule of transformers 4 for a list."""
    names = frozenset(entries)

    def is_skipped(path: str) -> bool:
        return path in names or _last_part(path) in names

    def is_skipped_by_empty_name(path: str) -> bool:
        # an empty entry stands before any dot
        return "." in path or path in names

    if "" in names:
        return Rule(is_skipped_by_empty_name)
    return Rule(is_skipped, NameIndex(names).ends)


def transformers_5(entries: Iterable[str]) -> Rule:
    """Returns the rule of transformers 5.21 and newer: an entry matches to the end of a part."""
    names = tuple(sorted(entries))
    if not all(map(is_name, names)):
        return _rule_of_patterns(names, _END_OF_A_PART)
    index = NameIndex(names)

    def is_skipped(path: str) -> bool:
        return index.ends(path) or index.begins(path, len(path), len(path))

    def is_skipped_below(path: str) -> bool:
        # the name ends with the path, or with the dot after it
        return index.begins(f"{path}.", len(path), len(path) + 1)

    return Rule(is_skipped, is_skipped_below)


def transformers_5_0(entries: Iterable[str]) -> Rule:
    """Returns the rule of transformers 5.0 … 5.20: "layers.1" also matches "layers.11"."""
    names = tuple(sorted(entries))
    if not all(map(is_name, names)):
        return _rule_of_patterns(names, end="")
    index = NameIndex(names)
    by_beginning = rule_by_beginning(index)

    def is_skipped(path: str) -> bool:
        return index.ends(path) or by_beginning.own(path)

    return Rule(is_skipped, by_beginning.above)


def rule_by_beginning(index: NameIndex) -> Rule:
    """Returns the rule that skips what begins with a name, even if the name ends inside a part.

    Only names that end in the last part are looked up: shorter ones are found for the paths above.
    """

    def is_skipped(path: str) -> bool:
        last_part = path.rfind(".") + 1
        return index.begins(path, last_part + 1, len(path))

    def is_skipped_below(path: str) -> bool:
        last_part = path.rfind(".") + 1
        return index.begins(f"{path}.", last_part + 1, len(path) + 1)

    return Rule(is_skipped, is_skipped_below)


def _rule_of_patterns(patterns: tuple[str, ...], end: str) -> Rule:
    """Returns the rule of transformers 5 for a list of which some entries are no names.

    Raises:
        PlanError: one of them is not a regular expression.
    """
    try:
        starts = re.compile("|".join(f"(?:{pattern}){end}" for pattern in patterns)).match
    except (re.error, OverflowError, RecursionError) as error:
        odd = [pattern for pattern in patterns if not re.fullmatch(r"[\w.-]*", pattern)]
        shown = ", ".join(odd[:3])
        raise PlanError(
            f"llm_int8_skip_modules cannot name {shown}: "
            f"transformers 5 takes it for a regular expression, which fails: {error}"
        ) from error

    def is_skipped(path: str) -> bool:
        return path.endswith(patterns) or starts(path) is not None

    return Rule(is_skipped)


def vllm(entries: Iterable[str]) -> Rule:
    """Returns the rule of vLLM and SGLang for a list."""
    names = frozenset(entries)

    def is_named(path: str) -> bool:
        return path in names or _last_part(path) in names

    return Rule(is_named, is_named)


def _last_part(path: str) -> str:
    return path.rpartition(".")[2]


RULES: Final[Mapping[str, Callable[[Iterable[str]], Rule]]] = {
    "transformers 4": transformers_4,
    "transformers 5": transformers_5,
    "transformers 5.0": transformers_5_0,
    "vLLM": vllm,
}
"""The rule of every loader."""

LITERAL: Final = ("transformers 4", "vLLM")
"""Loaders to whom an entry is never a regular expression."""
