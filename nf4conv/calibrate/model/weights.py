"""Fills a model with weights of a checkpoint: read, decoded and merged as for every other run."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

import torch
from torch import nn

from nf4conv.calibrate.model.building import release, set_tensor
from nf4conv.calibrate.model.names import Filling
from nf4conv.choose.decisions import PackedMatrix
from nf4conv.run.device.on_torch.buffers import SharedTensors, TorchBuffers
from nf4conv.run.device.on_torch.reading import read_values
from nf4conv.run.worker import Worker
from nf4conv.sources.reader import Reader
from nf4conv.sources.tensors import TensorInfo

_BUFFER: Final = 2**25  # bytes of host memory to read into

Values = dict[str, torch.Tensor]
"""Values of tensors of the checkpoint, by their names."""


class WeightReader:
    """Reads tensors of a checkpoint to a device.

    Args:
        buffers: the buffers that bring bytes to the device.
        dtype: the dtype that the model computes in.
    """

    def __init__(self, buffers: TorchBuffers, dtype: torch.dtype) -> None:
        self._buffers = buffers
        self._dtype = dtype

    def read(self, tensor: TensorInfo, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the values of a tensor, of which nobody else has the memory.

        Floats get the dtype that is given, or else that of the model.
        """
        values = read_values(self._buffers, tensor).view(tensor.shape)
        wanted = dtype or self._dtype
        if not values.is_floating_point():
            wanted = values.dtype
        return values.to(wanted, copy=True)


@contextmanager
def open_reader(device: torch.device, dtype: torch.dtype) -> Iterator[WeightReader]:
    """Opens a reader of local files."""
    with ExitStack() as stack:
        reader = stack.enter_context(Reader())
        worker = stack.enter_context(Worker(reader, _BUFFER, _ignore))
        yield WeightReader(TorchBuffers(device, SharedTensors(), None, worker), dtype)


def _ignore(count: int) -> None:
    """Counts nothing: progress is told by blocks."""


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
