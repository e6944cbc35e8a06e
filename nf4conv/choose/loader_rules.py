"""Matches a list of modules (llm_int8_skip_modules) as each loader does.

Three loaders read the list, each by a rule of its own, and none of them with the names on disk but
with those that the modules have in memory:

    transformers 4   an entry is a module's last part or its whole path, or it stands anywhere in
                     the path before a dot
    transformers 5   an entry is a regular expression that matches from the start of the path to the
                     end of a part (before 5.21: to anywhere), or the path ends with it
    vLLM, SGLang     an entry is one part of the path, or a dotted prefix of it

(transformers 4.57.6 integrations/bitsandbytes.py, 5.23.0 quantizers/quantizers_utils.py; vLLM's
bitsandbytes quantization.) The rules here are for entries that are names, in which a dot is a dot.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Final, TypeAlias

Rule: TypeAlias = Callable[[str], bool]
"""Tells of a path whether the loader leaves the module alone."""


def is_name(entry: str) -> bool:
    """Returns True if an entry means itself to all loaders.

    To transformers 5 every entry is a regular expression. In a name only the dots are special.
    """
    return entry != "" and not re.search(r"[\\^$*+?{}()|\[\]]", entry)


def transformers_4(entries: Iterable[str]) -> Rule:
    """Returns the rule of transformers 4 for a list."""
    names = frozenset(entries)
    ends = _ending_with_any(names)

    @lru_cache(maxsize=2**16)  # the modules of a checkpoint come in groups
    def has_skipped_above(path: str) -> bool:
        parent, dot, _ = path.rpartition(".")
        return dot != "" and (ends(parent) or has_skipped_above(parent))

    return lambda path: path in names or _last_part(path) in names or has_skipped_above(path)


def transformers_5(entries: Iterable[str]) -> Rule:
    """Returns the rule of transformers 5.21 and newer: an entry matches to the end of a part."""
    names = frozenset(entries)
    ends = _ending_with_any(names)

    @lru_cache(maxsize=2**16)
    def is_within(path: str) -> bool:
        return path in names or ("." in path and is_within(path.rpartition(".")[0]))

    return lambda path: ends(path) or is_within(path)


def transformers_5_0(entries: Iterable[str]) -> Rule:
    """Returns the rule of transformers 5.0 … 5.20: "layers.1" also matches "layers.11"."""
    names = frozenset(entries)
    ends = _ending_with_any(names)
    sizes = sorted({len(name) for name in names})
    return lambda path: ends(path) or any(path[:size] in names for size in sizes)


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
