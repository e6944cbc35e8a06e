"""Follows the names of a checkpoint's tensors to the parameters of a model.

transformers renames tensors as it loads them, and joins or divides some: its own conversions are
what does it here, too.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nf4conv.errors import PlanError, first_line
from nf4conv.sources.tensors import TensorInfo


@dataclass(frozen=True)
class Filling:
    """Says what parameters are filled from.

    Attributes:
        parameters: their names in the model.
        tensors: the tensors of the checkpoint, in the order in which they are joined.
        convert: makes the parameters, by name, of the values of the tensors; None for a single
            parameter that is the tensor itself.
    """

    parameters: tuple[str, ...]
    tensors: tuple[TensorInfo, ...]
    convert: Callable[[Sequence[torch.Tensor]], Mapping[str, torch.Tensor]] | None = None


def follow_names(model: nn.Module, tensors: Sequence[TensorInfo]) -> list[Filling]:
    """Returns what each parameter and buffer of a model is filled from.

    Tensors that the model has no place for are left out.
    """
    try:
        return _follow(model, tensors)
    except PlanError:
        raise
    except Exception as error:  # transformers raises anything
        raise PlanError(
            f"--calibrate: transformers cannot load these tensors into "
            f"{type(model).__name__}: {first_line(error)}"
        ) from error


def _follow(model: Any, tensors: Sequence[TensorInfo]) -> list[Filling]:
    """Follows the names; transformers may raise anything."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    by_pattern = {}
    for converter in converters:
        for pattern in converter.source_patterns:
            by_pattern[pattern] = converter
    state = model.state_dict()
    prefix = model.base_model_prefix
    fillings: list[Filling] = []
    joined: dict[str, list[tuple[str, TensorInfo]]] = {}
    for tensor in sorted(tensors, key=lambda tensor: _natural(tensor.name)):
        target, matched = rename_source_key(tensor.name, renamings, converters, prefix, state)
        if target not in state and tensor.name in state:
            fillings.append(Filling((tensor.name,), (tensor,)))
        elif target not in state:
            continue
        elif matched is None:
            fillings.append(Filling((target,), (tensor,)))
        else:
            joined.setdefault(target, []).append((matched, tensor))
    for target, parts in joined.items():
        convert = _Conversion(model, target, by_pattern[parts[0][0]], [part[0] for part in parts])
        members = tuple(tensor for _, tensor in parts)
        empty = [torch.empty(tensor.shape, device="meta") for tensor in members]
        fillings.append(Filling(tuple(convert(empty)), members, convert))
    return fillings


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a sort key by which "layers.2" comes before "layers.10"."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


@dataclass(frozen=True)
class _Conversion:
    """Joins or divides tensors as transformers does when it loads them."""

    model: Any
    target: str
    converter: Any
    # the pattern that each tensor matched
    patterns: Sequence[str]

    def __call__(self, values: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        converter = deepcopy(self.converter)
        for pattern, value in zip(self.patterns, values, strict=True):
            converter.add_tensor(self.target, self.target, pattern, value)
        made = converter.convert(self.target, model=self.model, config=self.model.config)
        found = {}
        for name, value in made.items():
            found[name] = value[0] if isinstance(value, list) else value
        return found
