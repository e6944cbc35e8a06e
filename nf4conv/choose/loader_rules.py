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
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Final, TypeAlias

from nf4conv.choose.path_tree import PathTree
from nf4conv.errors import PlanError

Rule: TypeAlias = Callable[[str], bool]
"""Tells of a path whether the loader leaves the module alone."""

_END_OF_A_PART: Final = r"(?:(?<=\.)|(?=\.|$))"


def is_name(entry: str) -> bool:
    """Returns True if an entry means itself to all loaders.

    To transformers 5 every entry is a regular expression. In a name only the dots are special.
    """
    return entry != "" and not re.search(r"[\\^$*+?{}()|\[\]]", entry)


def transformers_4(entries: Iterable[str]) -> Rule:
    """Returns the rule of transformers 4 for a list."""
    names = frozenset(entries)
    ends = _ending_with_any(names - {""})

    @lru_cache(maxsize=2**16)  # the modules of a checkpoint come in groups
    def has_skipped_above(path: str) -> bool:
        parent, dot, _ = path.rpartition(".")
        # an empty entry stands before any dot
        return dot != "" and ("" in names or ends(parent) or has_skipped_above(parent))

    return lambda path: path in names or _last_part(path) in names or has_skipped_above(path)


def transformers_5(entries: Iterable[str]) -> Rule:
    """Returns the rule of transformers 5.21 and newer: an entry matches to the end of a part."""
    return _rule_of_transformers_5(entries, _END_OF_A_PART)


def transformers_5_0(entries: Iterable[str]) -> Rule:
    """Returns the rule of transformers 5.0 … 5.20: "layers.1" also matches "layers.11"."""
    return _rule_of_transformers_5(entries, "")


def _rule_of_transformers_5(entries: Iterable[str], end: str) -> Rule:
    """Returns the rule for entries that match up to such an end."""
    names = tuple(entries)
    if not all(map(is_name, names)):
        starts = _expression(names, end)
        return lambda path: path.endswith(names) or starts(path) is not None
    tree = PathTree(names)
    ends = _ending_with_any(names)

    def is_skipped(path: str) -> bool:
        if ends(path):
            return True
        stops = tree.ends_in(path)
        if not end:
            return next(stops, None) is not None
        return any(_is_end_of_part(path, stop) for stop in stops)

    return is_skipped


def _is_end_of_part(path: str, stop: int) -> bool:
    return path[stop : stop + 1] in ("", ".") or path[stop - 1] == "."


def _expression(patterns: tuple[str, ...], end: str) -> Callable[[str], re.Match[str] | None]:
    try:
        return re.compile("|".join(f"(?:{pattern}){end}" for pattern in patterns)).match
    except (re.error, OverflowError, RecursionError) as error:
        odd = [pattern for pattern in patterns if not re.fullmatch(r"[\w.-]*", pattern)]
        shown = ", ".join(odd[:3])
        raise PlanError(
            f"llm_int8_skip_modules cannot name {shown}: "
            f"transformers 5 takes it for a regular expression, which fails: {error}"
        ) from error


def vllm(entries: Iterable[str]) -> Rule:
    """Returns the rule of vLLM and SGLang for a list."""
    names = frozenset(entries)

    @lru_cache(maxsize=2**16)
    def is_skipped(path: str) -> bool:
        parent, dot, last = path.rpartition(".")
        return path in names or last in names or (dot != "" and is_skipped(parent))

    return is_skipped


def _last_part(path: str) -> str:
    return path.rpartition(".")[2]


def _ending_with_any(names: Collection[str]) -> Rule:
    """Returns a function that tells whether a path ends with one of many names."""
    within_a_part = tuple(name for name in names if "." not in name)
    by_last_part: dict[str, list[str]] = {}
    for name in names:
        if "." in name:
            by_last_part.setdefault(_last_part(name), []).append(name)
    others = {last: tuple(found) for last, found in by_last_part.items()}

    def ends(path: str) -> bool:
        last = _last_part(path)
        return last.endswith(within_a_part) or path.endswith(others.get(last, ()))

    return ends


RULES: Final[Mapping[str, Callable[[Iterable[str]], Rule]]] = {
    "transformers 4": transformers_4,
    "transformers 5": transformers_5,
    "transformers 5.0": transformers_5_0,
    "vLLM": vllm,
}
"""The rule of every loader."""

LITERAL: Final = ("transformers 4", "vLLM")
"""Loaders to whom an entry is never a regular expression."""
