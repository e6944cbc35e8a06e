"""Follows the names of a checkpoint's tensors to the parameters of a model, and fills these.

transformers renames tensors as it loads them, and joins or divides some: its own conversions are
what does it here, too. Tensors are read, decoded and merged as for every other run.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from nf4conv.calibrate.model.building import planning_error
from nf4conv.choose.decisions import PackedMatrix
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


def follow_names(model: Any, tensors: Sequence[TensorInfo]) -> list[Filling]:
    """Returns what each parameter and buffer of a model is filled from.

    Tensors that the model has no place for are left out.
    """
    name = type(model).__name__
    with planning_error(f"--calibrate: transformers cannot load these tensors into {name}"):
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
            patterns, members = zip(*parts, strict=True)
            convert = partial(_convert, model, target, by_pattern[patterns[0]], patterns)
            empty = [torch.empty(tensor.shape, device="meta") for tensor in members]
            fillings.append(Filling(tuple(convert(empty)), members, convert))
    return fillings


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a sort key by which "layers.2" comes before "layers.10"."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _convert(
    model: Any,
    target: str,
    converter: Any,
    patterns: Sequence[str],
    values: Sequence[torch.Tensor],
) -> Mapping[str, torch.Tensor]:
    """Joins or divides tensors as transformers does when it loads them.

    `patterns` has the one that each tensor matched.
    """
    converter = deepcopy(converter)
    for pattern, value in zip(patterns, values, strict=True):
        converter.add_tensor(target, target, pattern, value)
    made = converter.convert(target, model=model, config=model.config)
    found = {}
    for name, value in made.items():
        found[name] = value[0] if isinstance(value, list) else value
    return found


@dataclass
class Contents:
    """The weights of a part of a model, while they are in memory.

    Attributes:
        model: the model, whose parameters they become.
        fillings: what the parameters are filled from.
        read: returns the values of a tensor, in the dtype that its parameter has.
        device: the device that holds them.
        values: the tensors of the checkpoint by name. After changing one, call `renew`.
        nbytes: their bytes in the source.
    """

    model: nn.Module
    fillings: Sequence[Filling]
    read: Callable[[TensorInfo, str], torch.Tensor]
    device: torch.device

    def __post_init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.nbytes = 0
        for filling in self.fillings:
            for tensor in filling.tensors:
                self.values[tensor.name] = self.read(tensor, filling.parameters[0])
                self.nbytes += tensor.nbytes
        self.renew(self.values)

    def renew(self, names: Collection[str]) -> None:
        """Makes those parameters anew that are made from tensors of these names."""
        for filling in self.fillings:
            tensors = [self.values[tensor.name] for tensor in filling.tensors]
            if not any(tensor.name in names for tensor in filling.tensors):
                continue
            if filling.convert is None:
                set_tensor(self.model, filling.parameters[0], tensors[0])
                continue
            for name, made in filling.convert(tensors).items():
                set_tensor(self.model, name, made.contiguous())

    def release(self) -> None:
        """Lets the memory go."""
        self.values.clear()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for filling in self.fillings:
            for name in filling.parameters:
                if name in parameters:
                    set_tensor(self.model, name, parameters[name].detach().to("meta"))


def matrix_in(values: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    """Returns a view of the part of a tensor that becomes one weight, [out, in]."""
    part = values
    if matrix.expert is not None:
        part = part[matrix.expert]
    if matrix.rows is not None:
        part = part[slice(*matrix.rows)]
    if matrix.columns is not None:
        part = part[:, slice(*matrix.columns)]
    if matrix.transpose:
        part = part.T
    return part[:: matrix.step]


def set_tensor(model: nn.Module, name: str, values: torch.Tensor) -> None:
    """Puts a tensor in the place of a parameter or a buffer."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(values, requires_grad=False)
    else:
        module._buffers[leaf] = values
