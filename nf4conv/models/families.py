"""What a model family does differently from the general rule of selection.py. Keys are
config.json's model_type; of submodels of diffusers, their class.

A family is listed in families.json only when names and shapes cannot tell. Patterns are regular
expressions, searched in the path of a module on disk (a tensor's name without ".weight").
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nf4conv.models.config import levels


@dataclass(frozen=True, slots=True)
class Family:
    """Deviations of one family."""

    transposed: str = (
        ""  # modules that store [in, out] (transformers' Conv1D) and are packed as [out, in]
    )
    linear: str = ""  # modules that are packed although their names speak against it
    keep: tuple[tuple[str, str], ...] = ()  # (pattern, reason) of modules that must not be packed
    # (pattern, replacement): names on disk → names in memory, where loaders rename what is not
    # packed
    renamed: tuple[tuple[str, str], ...] = ()
    heads: tuple[
        str, ...
    ] = ()  # modules that are in memory but, being tied or merged, not on disk; none is packed
    float32: str = (
        ""  # modules whose weights loaders want in float32, if that is how they are stored
    )
    # whether experts stacked as [expert, in, out] are loaded as one `nn.Linear` each when packed
    splits_experts: bool = False
    only_blocks: bool = False  # whether linear layers that are below nothing numbered are kept
    # whether loaders take vision and audio parts under other names, by which nothing in them could
    # be told from the rest
    renames_towers: bool = False


READ: Final = (
    "transformers reads this weight outside of its module, which a packed one does not survive"
)


def _read() -> Iterator[tuple[str, Family]]:
    sections = json.loads(Path(__file__).with_name("families.json").read_bytes())
    for entry in (entry for entries in sections.values() for entry in entries):
        stated = {key: value for key, value in entry.items() if key not in ("model_types", "note")}
        pairs = {
            key: tuple(map(tuple, stated[key])) for key in ("keep", "renamed") if key in stated
        }
        heads = {key: tuple(stated[key]) for key in ("heads",) if key in stated}
        yield from ((name, Family(**(stated | pairs | heads))) for name in entry["model_types"])


FAMILIES: Final[Mapping[str, Family]] = dict(_read())  # of families.json, whose sections say why


def families_of(config: Mapping[str, Any]) -> tuple[Family, ...]:
    """The families of a model and of its parts, as far as they are listed."""
    return tuple(FAMILIES[name] for name in dict.fromkeys(model_types(config)) if name in FAMILIES)


def is_transposed(module: str, families: Sequence[Family]) -> bool:
    """Whether a module of such a model stores its weight as [in, out], to be packed as [out, in]."""
    return bool(families) and any(
        family.transposed and re.search(family.transposed, module) for family in families
    )


def model_types(config: Mapping[str, Any]) -> Iterator[str]:
    """model_type at every level of a config, the outermost first; of a submodel of diffusers its
    class, too.
    """
    for _, level in levels(config):
        if "_class_name" in level:
            yield "_class_name"
            yield str(level["_class_name"])
        if isinstance(level.get("model_type"), str):
            yield level["model_type"]
