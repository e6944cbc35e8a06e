"""Finds the families of a model, by the names in its config.json."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from nf4conv.models.config import levels
from nf4conv.models.denoiser_table import CLASSES
from nf4conv.models.family import Family
from nf4conv.models.family_table import MODEL_TYPES

FAMILIES: Final[Mapping[str, Family]] = {**CLASSES, **MODEL_TYPES}


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
