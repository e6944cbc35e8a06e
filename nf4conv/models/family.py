"""Declares the ways in which a model family may deviate from the rules of choose/selection.py."""

from dataclasses import dataclass
from typing import NamedTuple


class KeptModules(NamedTuple):
    """Modules of a family that must not be packed."""

    pattern: str  # matches their paths on disk
    reason: str  # what the user reads about them


class Renaming(NamedTuple):
    """A change of name between disk and memory, with the meaning of `re.sub`."""

    pattern: str  # matches in a path on disk
    replacement: str  # what stands there in memory


@dataclass(frozen=True, slots=True)
class Family:
    """Lists the deviations of one model family from the general rules.

    Patterns are regular expressions. They are searched in the path of a module on disk, which is a
    tensor's name without ".weight". An empty pattern matches nothing.

    Attributes:
        transposed: matches modules that store their weight as [in, out], as transformers' Conv1D
            does. They are packed as [out, in].
        linear: matches modules that are packed although their names speak against it.
        keep: the modules that must not be packed, with the reason for each.
        renamed: how names on disk become names in memory, where loaders rename modules that are
            not packed.
        heads: modules that exist in memory but not on disk, because they are tied to others or
            merged from them. None of them is packed.
        float32: matches modules whose weights loaders want in float32, if they are stored so.
        splits_experts: True if experts that are stacked as [expert, in, out] are loaded as one
            `nn.Linear` each when they are packed.
        only_blocks: True if linear layers outside of the numbered blocks are kept.
        renames_towers: True if loaders know vision and audio parts by other names than those on
            disk. Nothing inside such a part could be told from the rest, so all of it is kept.
    """

    transposed: str = ""
    linear: str = ""
    keep: tuple[KeptModules, ...] = ()
    renamed: tuple[Renaming, ...] = ()
    heads: tuple[str, ...] = ()
    float32: str = ""
    splits_experts: bool = False
    only_blocks: bool = False
    renames_towers: bool = False
