"""Fills a model with weights of a checkpoint: read, decoded and merged as for every other run."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from nf4conv.calibrate.model.building import release, set_tensor
from nf4conv.calibrate.model.names import Filling
from nf4conv.choose.decisions import PackedMatrix
from nf4conv.sources.tensors import TensorInfo

Values = dict[str, torch.Tensor]
"""Values of tensors of the checkpoint, by their names."""


class Contents:
    """The weights of a part of a model, while they are in memory.

    Args:
        model: the model, whose parameters they become.
        fillings: what the parameters are filled from.
        read: returns the values of a tensor, in the dtype that its parameter has.
        device: the device that holds them.

    Attributes:
        values: the tensors of the checkpoint by name. After changing one, call `renew`.
        device: the device that holds them.
    """

    def __init__(
        self,
        model: nn.Module,
        fillings: Sequence[Filling],
        read: Callable[[TensorInfo, str], torch.Tensor],
        device: torch.device,
    ) -> None:
        self.device = device
        self._model = model
        self._fillings = fillings
        self.values: Values = {}
        for filling in fillings:
            for tensor in filling.tensors:
                self.values[tensor.name] = read(tensor, filling.parameters[0])
        self.renew(self.values)

    def renew(self, names: Collection[str]) -> None:
        """Makes those parameters anew that are made from tensors of these names."""
        for filling in self._fillings:
            tensors = [self.values[tensor.name] for tensor in filling.tensors]
            if not any(tensor.name in names for tensor in filling.tensors):
                continue
            if filling.convert is None:
                set_tensor(self._model, filling.parameters[0], tensors[0])
                continue
            for name, made in filling.convert(tensors).items():
                set_tensor(self._model, name, made.contiguous())

    def release(self) -> None:
        """Lets the memory go."""
        self.values.clear()
        names = [name for filling in self._fillings for name in filling.parameters]
        release(self._model, names)


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
