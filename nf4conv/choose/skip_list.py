"""llm_int8_skip_modules: the modules that a loader must leave alone, in spellings that every loader
understands.

Three loaders read the list, each by a rule of its own, and none of them with the names on disk but
with those that the modules have in memory:

    transformers 4   an entry is a module's last part, its whole path, or stands anywhere in the path before a dot
    transformers 5   an entry is a regular expression that matches from the start of the path to the end of a
                     part (before 5.21: to anywhere), or the path ends with it
    vLLM, SGLang     an entry is one part of the path, or a dotted prefix of it

(transformers 4.57.6 integrations/bitsandbytes.py, 5.23.0 quantizers/quantizers_utils.py; vLLM's
bitsandbytes quantization.) A full path from the root is the one spelling that all of them take. A
module that loaders know by different paths is listed under each of them.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, filterfalse, groupby
from typing import Final

from nf4conv.choose.name_index import NameIndex
from nf4conv.errors import PlanError
from nf4conv.models.module_names import ADDED

Predicate = Callable[[str], bool]
Siblings = Sequence[tuple[str, Sequence[str]]]  # paths in groups: what is above them, and they

_DECODERS: Final = ("model", "transformer")
"""What decoders call their base, which has no pooler; encoders call it by the name of the family.
"""

_SOME: Final = 32  # paths, which tell most of the entries that are too wide


class Rule:
    """Whether a loader leaves a module alone, by its path: because of the path itself, or because
    of one above it.
    """

    def __init__(self, own: Predicate, above: Predicate = lambda _: False) -> None:
        self._own, self._above = own, above
        self._known = {"": False}  # paths above others, since a checkpoint's modules come in groups

    def __call__(self, path: str) -> bool:
        return self._own(path) or self._skips_below(_parent(path))

    def among(self, paths: Siblings, *, skipped: bool = True) -> Iterator[str]:
        """Those of many paths that the loader leaves alone, or unless `skipped` the others."""
        for parent, siblings in paths:
            if not self._skips_below(parent):
                yield from (filter if skipped else filterfalse)(self._own, siblings)
            elif skipped:
                yield from siblings

    def _skips_below(self, path: str) -> bool:
        if path not in self._known:
            self._known[path] = self._skips_below(_parent(path)) or self._above(path)
        return self._known[path]


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _siblings(paths: Iterable[str]) -> Siblings:
    return [(parent, tuple(group)) for parent, group in groupby(paths, _parent)]


def transformers_4(entries: Iterable[str]) -> Rule:
    """How transformers 4 takes a list."""
    names = frozenset(entries)
    if "" in names:  # stands before any dot
        return Rule(lambda path: "." in path or path in names)
    return Rule(
        lambda path: path in names or path.rpartition(".")[2] in names, NameIndex(names).ends
    )


def is_name(entry: str) -> bool:
    """Whether an entry means itself to all loaders: to transformers 5 it is a regular expression,
    if only of dots.
    """
    return entry != "" and not re.search(r"[\\^$*+?{}()|\[\]]", entry)


def _by_patterns(patterns: tuple[str, ...], end: str) -> Rule:
    try:
        starts = re.compile("|".join(f"(?:{pattern}){end}" for pattern in patterns)).match
    except (re.error, OverflowError, RecursionError) as error:
        odd = [pattern for pattern in patterns if not re.fullmatch(r"[\w.-]*", pattern)]
        raise PlanError(
            f"llm_int8_skip_modules cannot name {', '.join(odd[:3])}: "
            f"transformers 5 takes it for a regular expression, which fails: {error}"
        ) from error
    return Rule(lambda path: path.endswith(patterns) or starts(path) is not None)


def transformers_5_0(entries: Iterable[str]) -> Rule:
    """How transformers 5.0 … 5.20 takes a list: "layers.1" also hits "layers.11"."""
    return transformers_5(entries, end="")


def transformers_5(entries: Iterable[str], end: str = r"(?:(?<=\.)|(?=\.|$))") -> Rule:
    """How transformers 5.21 or newer takes a list: an entry has to match to the `end` of a part, or
    to anywhere.
    """
    names = tuple(sorted(entries))
    if not all(map(is_name, names)):
        return _by_patterns(names, end)
    index = NameIndex(names)
    return Rule(
        lambda path: index.ends(path) or index.starts(path, len(path), end),
        lambda above: index.starts(f"{above}.", len(above), end),
    )


def vllm(entries: Iterable[str]) -> Rule:
    """How vLLM or SGLang takes a list."""
    names = frozenset(entries)

    def is_named(path: str) -> bool:
        return path in names or path.rpartition(".")[2] in names

    return Rule(is_named, is_named)


MATCHERS: Final[Mapping[str, Callable[[Iterable[str]], Rule]]] = {
    "transformers 4": transformers_4,
    "transformers 5": transformers_5,
    "transformers 5.0": transformers_5_0,
    "vLLM": vllm,
}


LITERAL: Final = (
    "transformers 4",
    "vLLM",
)  # loaders to whom an entry is never a regular expression


_FUSED: Final = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
"""Modules that vLLM and SGLang make one of, and look for in the list by its name."""


def fused_modules(
    packed: Iterable[str], kept: Iterable[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What vLLM makes of modules that it fuses, given the paths of packed ones, and of others that
    may be `nn.Linear`.

    First come the paths of fused modules of which no part is packed: they have to be listed too.
    Then those of which only some parts are packed, which vLLM cannot load.
    """
    found = dict.fromkeys(filter(None, map(_fused_path, kept)))
    also_packed = set(map(_fused_path, packed)) if found else set()
    return tuple(path for path in found if path not in also_packed), tuple(
        filter(also_packed.__contains__, found)
    )


def _fused_path(path: str) -> str | None:
    parent, _, leaf = path.rpartition(".")
    fused = _FUSED.get(leaf)
    # experts it fuses with each other, and skips as a whole
    return None if fused is None or not parent or ".experts." in parent else f"{parent}.{fused}"


def build_skip_modules(
    packed: Iterable[str], kept: Iterable[str], absent: Iterable[str] = ADDED
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The shortest list of full paths that covers every kept module, and if possible no packed one.

    A kept module is named by the highest module above it that has nothing packed below; where a
    loader's rule would see a packed module in that name, by its own path.

    The paths are in every spelling; `kept` are those of modules that may be `nn.Linear` and are not
    packed, `absent` those of modules that the checkpoint lacks and a loader may add, which are left
    out where they hit a packed one.

    Given back are the list, in natural order, and the packed modules that a loader would
    nevertheless take for skipped. A PlanError if a module that must be listed has a name that is no
    name to transformers 5.
    """
    packed = tuple(packed)
    above_packed = level = set(packed)
    while level := set(map(_parent, level)) - above_packed:
        above_packed |= level
    covered: dict[str, list[str]] = {}
    for parent, siblings in groupby(kept, _parent):
        prefixes = accumulate(parent.split("."), "{}.{}".format)
        highest = next((name for name in prefixes if name and name not in above_packed), None)
        for path in siblings:
            covered.setdefault(highest or path, []).append(path)
    _check_names(covered)
    absent = set(absent)
    too_wide = _too_wide([*covered, *absent], packed)
    entries = {
        path
        for entry, paths in covered.items()
        for path in (paths if entry in too_wide else [entry])
    }
    entries |= absent - too_wide
    _check_names(entries)
    return _in_order(entries), mistaken_for_skipped(entries, packed if too_wide else ())


def complete_for_base(
    entries: Iterable[str], packed: Iterable[str], kept: Iterable[str]
) -> tuple[str, ...]:
    """Complete a list for the model without its head, and for another head on the same base.

    What is "model.layers.0.gate" in a Qwen2MoeForCausalLM is "layers.0.gate" in a Qwen2MoeModel,
    into which AutoModel loads the same checkpoint. An entry that would hit a packed module gives
    way to the modules that it stands for, and is left out where they would, too. The other paths
    are as of `build_skip_modules`.
    """
    entries, packed = set(entries), tuple(packed)
    base = _base(packed)
    if base is None:
        return _in_order(entries)
    prefix = f"{base}."
    more = {entry.removeprefix(prefix) for entry in entries if entry.startswith(prefix)}
    more |= {f"{prefix}pooler"} if base not in _DECODERS else set()
    paths = (*packed, *(path.removeprefix(prefix) for path in packed)) if more else ()
    too_wide = _too_wide(more, paths)
    covered = tuple(f"{prefix}{entry}." for entry in too_wide)
    instead = {path.removeprefix(prefix) for path in kept if too_wide and path.startswith(covered)}
    return _in_order(entries | more - too_wide | instead - _too_wide(instead, paths))


def _base(packed: Sequence[str]) -> str | None:
    """The part that most paths begin with, unless it is itself the list of layers."""
    if not packed:
        return None
    [(base, count)] = Counter(path.partition(".")[0] for path in packed).most_common(1)
    is_list = re.compile(rf"{re.escape(base)}(\.\d+(\.|$)|$)").match
    return base if 2 * count > len(packed) and not any(map(is_list, packed)) else None


def _check_names(entries: Iterable[str]) -> None:
    # one of them could match anything, or, being matched, never come to an end
    odd = [entry for entry in entries if not is_name(entry)]
    if odd:
        raise PlanError(
            f"llm_int8_skip_modules cannot name "
            f"{', '.join(repr(entry[:100]) for entry in odd[:3])}: "
            "transformers 5 takes it for a regular expression"
        )


def mistaken_for_skipped(entries: Iterable[str], packed: Collection[str]) -> tuple[str, ...]:
    """The paths that at least one loader would skip, by entries that are names."""
    # whatever transformers 5.21 skips, 5.0 skips too, and what vLLM skips, 4 or 5.0 does
    index = NameIndex(entries)
    begins = Rule(
        lambda head: index.starts(head, len(head)),
        lambda above: index.starts(f"{above}.", len(above)),
    )
    begun = set(begins.among(_siblings({path[: index.longest] for path in packed})))
    ended = set(Rule(index.ends, index.ends).among(_siblings(packed)))
    return tuple(path for path in packed if path[: index.longest] in begun or path in ended)


def _too_wide(entries: Collection[str], packed: Collection[str]) -> set[str]:
    """The entries, names all of them, by which at least one loader would skip a packed path.

    Few paths tell most of them: there may be as many paths and entries as a checkpoint has tensors.
    """
    found: set[str] = set()
    mistaken = mistaken_for_skipped(entries, packed) if entries else ()
    while mistaken:
        some = mistaken[:: len(mistaken) // _SOME + 1]
        found |= {
            entry
            for entry in entries
            if entry not in found and any(hits(entry, path) for path in some)
        }
        mistaken = mistaken_for_skipped(
            [entry for entry in entries if entry not in found], mistaken
        )
    return found


def hits(entry: str, path: str) -> bool:
    """Whether at least one loader would skip a path because of an entry that is a name:
    `mistaken_for_skipped`.
    """
    if f"{entry}." in f"{path}.":
        return True
    # to transformers 5 a dot is any character
    return len(entry) <= len(path) and all(
        mine in (".", its) for mine, its in zip(entry, path, strict=False)
    )


def _in_order(entries: Iterable[str]) -> tuple[str, ...]:
    """Entries in natural order: "layers.2" before "layers.10"."""

    def order(entry: str) -> tuple[list[tuple[int, int, str]], str]:
        parts = re.split(r"(\d+)", entry)
        return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts], entry

    return tuple(sorted(entries, key=order))


def check_skip_modules(entries: Iterable[str], packed: Iterable[str], kept: Iterable[str]) -> None:
    """Hold a list against all loaders' rules, in both directions: transformers 5 would fail at the
    first forward only.

    None of the paths of packed modules may be matched, and all of those kept that may be
    `nn.Linear` must be. A PlanError names every module that a loader would take for the wrong kind.
    """
    entries, groups, others = tuple(entries), _siblings(packed), _siblings(kept)
    faults = []
    for loader, match in MATCHERS.items():
        rule = match(entries)
        faults += [f"{path} is packed, but {loader} would skip it" for path in rule.among(groups)]
        missed = rule.among(others, skipped=False)
        faults += [f"{path} is not packed, but {loader} would not skip it" for path in missed]
    if faults:
        shown = "; ".join(faults[:10])
        raise PlanError(
            f"llm_int8_skip_modules cannot tell packed modules from others ({len(faults)} times): "
            f"{shown}. "
            "This is a bug of nf4conv: please report the model"
        )
