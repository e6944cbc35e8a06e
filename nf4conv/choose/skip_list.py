"""Builds and checks llm_int8_skip_modules: the modules that a loader must leave alone.

Every loader matches the list by a rule of its own (loader_rules.py). A full path from the root is
the one spelling that all of them take, and the only one that is written. A module that loaders know
by different paths is listed under each of them.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from nf4conv.choose.loader_rules import is_name
from nf4conv.errors import PlanError
from nf4conv.models.family_table import GATE_UP, QKV
from nf4conv.models.module_names import ADDED

_DECODERS: Final = ("model", "transformer")
"""Names of the base in decoders, which have no pooler; encoders name it after the family."""

_FUSED: Final = {**dict.fromkeys(QKV, "qkv_proj"), **dict.fromkeys(GATE_UP, "gate_up_proj")}
"""The modules that vLLM and SGLang merge into one. They look for its name in the list."""


class Paths:
    """Paths of packed modules, and what a name in a skip list hits among them."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._sorted = sorted(set(paths))
        self.places: set[str] = set()  # the paths, and whatever is above one
        for path in self._sorted:
            while path and path not in self.places:
                self.places.add(path)
                path = path.rpartition(".")[0]
        self._reversed = sorted(place[::-1] for place in self.places)

    def begun_by(self, name: str) -> Sequence[str]:
        """Returns the paths that begin with a name, which may end inside a part."""
        return _begun_by(self._sorted, name)

    def hit_by(self, name: str) -> Iterator[str]:
        """Yields the paths that at least one loader would skip.

        Two rules are enough. Whatever transformers 5.21 skips by a beginning, 5.0 skips too; and
        what vLLM skips, transformers 4 skips by an end of the path above, or 5.0 by a beginning.
        """
        yield from self.begun_by(name)
        for backwards in _begun_by(self._reversed, name[::-1]):
            place = backwards[::-1]
            found = self.begun_by(place)
            yield from (path for path in found if path == place or path[len(place)] == ".")

    def base(self) -> str | None:
        """Returns the first part of most paths; None if it is itself the list of layers."""
        sizes = Counter(path.partition(".")[0] for path in self._sorted)
        base = max(sizes, key=sizes.__getitem__, default="")
        if 2 * sizes[base] <= sizes.total() or self.begun_by(base)[0] == base:
            return None
        below = (path.split(".", 2)[1] for path in self.begun_by(f"{base}."))
        return None if any(part.isdecimal() for part in below) else base


def _begun_by(in_order: Sequence[str], name: str) -> Sequence[str]:
    """Returns those of some sorted texts that begin with a name."""
    start = bisect_left(in_order, name)
    return in_order[start : bisect_left(in_order, f"{name}\U0010ffff", start)]


def fused_modules(packed: Iterable[str], kept: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns what vLLM makes of modules that it fuses.

    First the paths of fused modules of which no part is packed: they have to be listed too. Then
    those of which only some parts are packed, which vLLM cannot load.
    """
    # a dict, because it keeps the order
    with_kept_part = dict.fromkeys(path for path in map(_fused_path, kept) if path is not None)
    if not with_kept_part:
        return [], []
    with_packed_part = set(map(_fused_path, packed))
    unpacked = []
    split = []
    for path in with_kept_part:
        if path in with_packed_part:
            split.append(path)
        else:
            unpacked.append(path)
    return unpacked, split


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
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Builds the shortest list of full paths that covers every kept module.

    Returns it in natural order ("layers.2" before "layers.10"), and the packed modules that a
    loader would nevertheless take for skipped.

    If possible it covers no packed one. A kept module is named by the highest module above it that
    has nothing packed below. Where a loader's rule would see a packed module in that name, the kept
    module is named by its own path. What is listed is also listed as it is called in the model
    without its head.
    """
    paths = Paths(packed)
    kept = list(kept)
    covered = _covering(kept, paths)
    _check_names(covered)
    entries = {entry for entry in absent if not _is_too_wide(entry, paths)}
    mistaken: set[str] = set()
    for entry, modules in covered.items():
        if not _is_too_wide(entry, paths):
            entries.add(entry)
            continue
        _check_names(modules)
        entries.update(modules)
        for module in modules:
            mistaken.update(paths.hit_by(module))
    if not mistaken:
        entries |= without_base(entries, paths, kept)
    return tuple(sorted(entries, key=_natural_order)), frozenset(mistaken)


def _is_too_wide(entry: str, packed: Paths) -> bool:
    """Returns True if at least one loader would skip a packed module because of an entry."""
    return any(True for _ in packed.hit_by(entry))


def _covering(kept: Iterable[str], packed: Paths) -> dict[str, list[str]]:
    """Returns the highest modules that cover the kept ones, each with those that it covers."""
    covered: dict[str, list[str]] = {}
    for parent, group in groupby(kept, lambda path: path.rpartition(".")[0]):
        highest = _highest_without(packed, parent)
        for path in group:
            covered.setdefault(highest or path, []).append(path)
    return covered


def _highest_without(packed: Paths, path: str) -> str:
    """Returns the shortest beginning of a path that has nothing packed below; "" if none is so."""
    highest = ""
    while path and path not in packed.places:
        highest = path
        path = path.rpartition(".")[0]
    return highest


def without_base(entries: set[str], packed: Paths, kept: Iterable[str]) -> set[str]:
    """Returns what to list for the model without its head, and for another head on the same base.

    "model.layers.0.gate" in a Qwen2MoeForCausalLM is "layers.0.gate" in a Qwen2MoeModel, into which
    AutoModel loads the same checkpoint. So every entry is listed without the name of the base, too.
    Where that would match a packed module, the modules that the entry stands for are listed
    instead, as far as they match none.
    """
    base = packed.base()
    if base is None:
        return set()

    def fits(entry: str) -> bool:
        # an end of a path without the base is one of the whole path, too
        return not _is_too_wide(entry, packed) and not packed.begun_by(f"{base}.{entry}")

    prefix = f"{base}."
    more = {entry.removeprefix(prefix) for entry in entries if entry.startswith(prefix)}
    if base not in _DECODERS:
        more.add(f"{prefix}pooler")
    fitting = set(filter(fits, more))
    too_wide = tuple(f"{prefix}{entry}." for entry in more - fitting)
    instead = {path.removeprefix(prefix) for path in kept if path.startswith(too_wide)}
    return fitting | set(filter(fits, instead))


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


def _natural_order(entry: str) -> tuple[list[tuple[int, int, str]], str]:
    """Returns a sort key that compares numbers in a path by their value."""
    order = []
    for part in re.split(r"(\d+)", entry):
        if part.isdecimal():
            order.append((0, int(part), ""))
        else:
            order.append((1, 0, part))
    return order, entry
