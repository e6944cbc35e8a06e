"""Finds the families of a model, and how it stores its experts, by the names in its config.json."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from nf4conv.models.config import levels
from nf4conv.models.family_table import FAMILIES, STANDARD, ExpertLayout, Family

_NUMBERS: Final = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_moe_experts",
)
"""Keys of config.json for the number of experts in a layer."""

_BY_LAYER: Final = re.compile(r"num_\w*expert|num_routed|block_configs")
"""Found in keys that may hold a list with such a number for each layer."""


def families_of(config: Mapping[str, Any]) -> tuple[Family, ...]:
    """Returns the listed families of a model and of its parts, each once, the outermost first."""
    names = dict.fromkeys(model_types(config))
    return tuple(FAMILIES[name] for name in names if name in FAMILIES)


def is_transposed(module: str, families: Sequence[Family]) -> bool:
    """Returns True if a module of these families stores its weight as [in, out]."""
    return any(family.transposed and re.search(family.transposed, module) for family in families)


def model_types(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the model_type at every level of a config, the outermost first.

    A submodel of diffusers has a class instead: it yields "_class_name", which stands for all of
    them in the table, and the name of the class.
    """
    for _, level in levels(config):
        if "_class_name" in level:
            yield "_class_name"
            yield str(level["_class_name"])
        if isinstance(level.get("model_type"), str):
            yield level["model_type"]


def layouts_of(config: Mapping[str, Any]) -> tuple[ExpertLayout, ...]:
    """Returns the layouts of a model and of its parts, each once, the outermost first."""
    found = [layout for family in families_of(config) for layout in family.experts]
    return tuple(dict.fromkeys(found))


def are_stacked(config: Mapping[str, Any]) -> bool:
    """Returns True if a model's authors store its experts as stacks.

    Loaders then know no names of single experts.
    """
    return any(family.experts and not family.has_single_experts for family in families_of(config))


def stacked_layouts(config: Mapping[str, Any]) -> tuple[ExpertLayout, ...]:
    """Returns the layouts in which a model's experts are stored; none if they are stored singly."""
    outermost = FAMILIES.get(str(config.get("model_type")))
    if outermost is not None and outermost.stacks_alone:
        return (STANDARD,)
    return layouts_of(config) if are_stacked(config) else ()


def has_uneven_experts(config: Mapping[str, Any]) -> bool:
    """Returns True if layers may have fewer experts than their routers know, or several kinds."""
    return any(family.has_uneven_experts for family in families_of(config))


def experts_in(config: Mapping[str, Any]) -> frozenset[int]:
    """Returns the numbers of experts in a layer that a config names, most often a single one."""
    numbers = set()
    for _, level in levels(config):
        for key, value in level.items():
            if isinstance(value, list) and _BY_LAYER.search(key):
                return frozenset()
            if key in _NUMBERS and type(value) is int and value > 0:
                numbers.add(value)
    return frozenset(numbers)
