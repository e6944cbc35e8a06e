"""Builds and checks llm_int8_skip_modules: the modules that a loader must leave alone.

Every loader matches the list by a rule of its own (loader_rules.py). A full path from the root is
the one spelling that all of them take, and the only one that is written. A module that loaders know
by different paths is listed under each of them.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from itertools import groupby
from typing import Final, NamedTuple

from nf4conv.choose.loader_rules import (
    RULES,
    Rule,
    grouped,
    is_name,
    parent_of,
    rule_by_beginning,
)
from nf4conv.choose.name_index import NameIndex
from nf4conv.errors import PlanError
from nf4conv.models.module_names import ADDED

_DECODERS: Final = ("model", "transformer")
"""Names of the base in decoders, which have no pooler; encoders name it after the family."""

_SAMPLE: Final = 32  # paths, which tell most of the entries that are too wide

_FUSED: Final = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""The modules that vLLM and SGLang merge into one. They look for its name in the list."""


class FusedModules(NamedTuple):
    """Lists what vLLM makes of modules that it fuses.

    Attributes:
        unpacked: paths of fused modules of which no part is packed: they have to be listed too.
        split: paths of those of which only some parts are packed, which vLLM cannot load.
    """

    unpacked: tuple[str, ...]
    split: tuple[str, ...]


class SkipList(NamedTuple):
    """Holds a list of modules to skip.

    Attributes:
        entries: the list, in natural order.
        mistaken: packed modules that a loader would nevertheless take for skipped.
    """

    entries: tuple[str, ...]
    mistaken: tuple[str, ...]


def fused_modules(packed: Iterable[str], kept: Iterable[str]) -> FusedModules:
    """Returns what vLLM makes of modules that it fuses.

    Args:
        packed: paths of the packed modules.
        kept: paths of other modules that may be `nn.Linear`.
    """
    # a dict, because it keeps the order
    with_kept_part = dict.fromkeys(path for path in map(_fused_path, kept) if path is not None)
    if not with_kept_part:
        return FusedModules((), ())
    with_packed_part = set(map(_fused_path, packed))
    unpacked = []
    split = []
    for path in with_kept_part:
        if path in with_packed_part:
            split.append(path)
        else:
            unpacked.append(path)
    return FusedModules(tuple(unpacked), tuple(split))


def _fused_path(path: str) -> str | None:
    """Returns the path of the module into which vLLM fuses another; None if it is not fused."""
    parent, _, leaf = path.rpartition(".")
    fused = _FUSED.get(leaf)
    # vLLM fuses experts with each other, and skips them as a whole
    if fused is None or not parent or ".experts." in parent:
        return None
    return f"{parent}.{fused}"


def build_skip_modules(
    packed: Iterable[str], kept: Iterable[str], absent: Iterable[str] = ADDED
) -> SkipList:
    """Builds the shortest list of full paths that covers every kept module.

    If possible it covers no packed one. A kept module is named by the highest module above it that
    has nothing packed below. Where a loader's rule would see a packed module in that name, the kept
    module is named by its own path.

    Args:
        packed: paths of the packed modules, in every spelling.
        kept: paths of the modules that may be `nn.Linear` and are not packed, in every spelling.
        absent: modules that the checkpoint lacks and a loader may add. They are left out where they
            match a packed one.

    Raises:
        PlanError: a module that must be listed has a name that is no name to transformers 5.
    """
    packed = tuple(packed)
    absent = set(absent)
    covered = _covering(kept, _with_ancestors(packed))
    _check_names(covered)
    too_wide = _too_wide([*covered, *absent], packed)
    entries = absent - too_wide
    for entry, paths in covered.items():
        if entry in too_wide:
            entries.update(paths)
        else:
            entries.add(entry)
    _check_names(entries)
    mistaken = mistaken_for_skipped(entries, packed) if too_wide else ()
    return SkipList(_in_order(entries), mistaken)


def _covering(kept: Iterable[str], above_packed: Set[str]) -> dict[str, list[str]]:
    """Returns the highest modules that cover the kept ones, each with those that it covers.

    Args:
        kept: paths of modules.
        above_packed: paths of the packed modules and of everything above them.
    """
    covered: dict[str, list[str]] = {}
    for parent, siblings in groupby(kept, parent_of):
        prefixes = (prefix for prefix in _prefixes(parent) if prefix)
        highest = next((prefix for prefix in prefixes if prefix not in above_packed), None)
        if highest is not None:
            covered.setdefault(highest, []).extend(siblings)
            continue
        for path in siblings:
            covered.setdefault(path, []).append(path)
    return covered


def _prefixes(path: str) -> Iterator[str]:
    """Yields what is before each dot of a path, the shortest first, and then the path."""
    dot = path.find(".")
    while dot >= 0:
        yield path[:dot]
        dot = path.find(".", dot + 1)
    yield path


def _with_ancestors(paths: Iterable[str]) -> set[str]:
    """Returns paths and everything above them, most of which they share."""
    found = set(paths)
    newest = found
    while newest:
        newest = set(map(parent_of, newest)) - found
        found |= newest
    return found


def complete_for_base(
    entries: Iterable[str], packed: Iterable[str], kept: Iterable[str]
) -> tuple[str, ...]:
    """Completes a list for the model without its head, and for another head on the same base.

    "model.layers.0.gate" in a Qwen2MoeForCausalLM is "layers.0.gate" in a Qwen2MoeModel, into which
    AutoModel loads the same checkpoint. So every entry is listed without the name of the base, too.
    Where that would match a packed module, the modules that the entry stands for are listed
    instead, as far as they match none.

    Args:
        entries: a list that is complete for the model with its head.
        packed: paths of the packed modules, in every spelling.
        kept: paths of the modules that may be `nn.Linear` and are not packed, in every spelling.

    Returns:
        The list, in natural order.
    """
    listed = set(entries)
    packed = tuple(packed)
    base = _base_of(packed)
    if base is None:
        return _in_order(listed)

    prefix = f"{base}."
    more = {entry.removeprefix(prefix) for entry in listed if entry.startswith(prefix)}
    if base not in _DECODERS:
        more.add(f"{prefix}pooler")
    if not more:
        return _in_order(listed)

    packed_in_either = (*packed, *(path.removeprefix(prefix) for path in packed))
    too_wide = _too_wide(more, packed_in_either)
    listed |= more - too_wide
    if too_wide:
        covered = tuple(f"{prefix}{entry}." for entry in too_wide)
        instead = {path.removeprefix(prefix) for path in kept if path.startswith(covered)}
        listed |= instead - _too_wide(instead, packed_in_either)
    return _in_order(listed)


def _base_of(packed: Sequence[str]) -> str | None:
    """Returns the first part of most paths; None if it is itself the list of layers."""
    if not packed:
        return None
    first_parts = Counter(path.partition(".")[0] for path in packed)
    base, count = first_parts.most_common(1)[0]
    if 2 * count <= len(packed):
        return None
    is_list_of_layers = re.compile(rf"{re.escape(base)}(\.\d+(\.|$)|$)").match
    return None if any(map(is_list_of_layers, packed)) else base


def _check_names(entries: Iterable[str]) -> None:
    """Raises a PlanError for an entry that transformers 5 would not take for a name."""
    # a regular expression could match anything, or take for ever to match
    odd = [entry for entry in entries if not is_name(entry)]
    if odd:
        shown = ", ".join(repr(entry[:100]) for entry in odd[:3])
        raise PlanError(
            f"llm_int8_skip_modules cannot name {shown}: "
            "transformers 5 takes it for a regular expression"
        )


def mistaken_for_skipped(entries: Iterable[str], packed: Collection[str]) -> tuple[str, ...]:
    """Returns the paths that at least one loader would skip.

    Args:
        entries: the list, of names only.
        packed: the paths.
    """
    # Two rules are enough. Whatever transformers 5.21 skips by a beginning, 5.0 skips too; and what
    # vLLM skips, transformers 4 skips by an end of the path above, or 5.0 by a beginning.
    index = NameIndex(entries)
    by_beginning = rule_by_beginning(index)
    by_end = Rule(index.ends, index.ends)
    # only so many characters of a path can match, and many paths have these in common
    beginnings = {path[: index.longest] for path in packed}
    skipped_beginnings = set(by_beginning.skipped(grouped(beginnings)))
    skipped_paths = set(by_end.skipped(grouped(packed)))
    return tuple(
        path
        for path in packed
        if path[: index.longest] in skipped_beginnings or path in skipped_paths
    )


def _too_wide(entries: Collection[str], packed: Collection[str]) -> set[str]:
    """Returns the entries by which at least one loader would skip a packed path.

    A few paths tell most of them, so a sample is looked at first: there may be as many paths and
    entries as a checkpoint has tensors.

    Args:
        entries: names.
        packed: paths of packed modules.
    """
    found: set[str] = set()
    if not entries:
        return found
    mistaken = mistaken_for_skipped(entries, packed)
    while mistaken:
        step = len(mistaken) // _SAMPLE + 1
        sample = mistaken[::step]
        rest = []
        for entry in entries:
            if entry in found:
                continue
            if any(hits(entry, path) for path in sample):
                found.add(entry)
            else:
                rest.append(entry)
        mistaken = mistaken_for_skipped(rest, mistaken)
    return found


def hits(entry: str, path: str) -> bool:
    """Returns True if at least one loader would skip a path because of an entry that is a name.

    `mistaken_for_skipped` says the same about many entries at once.
    """
    if f"{entry}." in f"{path}.":
        return True
    if len(entry) > len(path):
        return False
    # to transformers 5 a dot is any character
    return all(mine in (".", its) for mine, its in zip(entry, path, strict=False))


def _in_order(entries: Iterable[str]) -> tuple[str, ...]:
    """Returns entries in natural order: "layers.2" before "layers.10"."""
    return tuple(sorted(entries, key=_natural_order))


def _natural_order(entry: str) -> tuple[list[tuple[int, int, str]], str]:
    """Returns a sort key that compares numbers in a path by their value."""
    order = []
    for part in re.split(r"(\d+)", entry):
        if part.isdecimal():
            order.append((0, int(part), ""))
        else:
            order.append((1, 0, part))
    return order, entry


def check_skip_modules(entries: Iterable[str], packed: Iterable[str], kept: Iterable[str]) -> None:
    """Checks a list by the rules of all loaders, in both directions.

    transformers 5 would notice a wrong list no earlier than in the first forward pass.

    Args:
        entries: the list.
        packed: paths of packed modules, of which no loader may skip any.
        kept: paths of other modules that may be `nn.Linear`, all of which every loader must skip.

    Raises:
        PlanError: a loader would take modules for the wrong kind; it names them.
    """
    entries = tuple(entries)
    packed_groups = grouped(packed)
    kept_groups = grouped(kept)
    faults = []
    for loader, rule_for in RULES.items():
        rule = rule_for(entries)
        mistaken = rule.skipped(packed_groups)
        faults += [f"{path} is packed, but {loader} would skip it" for path in mistaken]
        missed = rule.not_skipped(kept_groups)
        faults += [f"{path} is not packed, but {loader} would not skip it" for path in missed]
    if faults:
        shown = "; ".join(faults[:10])
        raise PlanError(
            f"llm_int8_skip_modules cannot tell packed modules from others ({len(faults)} times): "
            f"{shown}. "
            "This is a bug of nf4conv: please report the model"
        )
