"""Finds weights that hold values which cannot be packed: a pass that only counts. Takes torch."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.format.layout import Format, block_count
from nf4conv.options import MachineOptions
from nf4conv.plan.jobs import PackJob
from nf4conv.run.device.on_torch.backend import TorchBackend
from nf4conv.run.loop import make_pipeline, open_reader
from nf4conv.run.pieces import pieces_of
from nf4conv.run.worker import Worker
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo

_LARGEST_SUM: Final = 3e38
"""Of the scales of a weight, whose mean double quantization takes in float32."""


class UnfitValues(NamedTuple):
    """Counts values of a tensor that cannot be stored."""

    not_finite: int
    too_large: int


class _Counts:
    """Counts values by the name of the tensor."""

    def __init__(self) -> None:
        self.found: dict[str, UnfitValues] = {}
        self._lock = threading.Lock()

    def add(self, name: str, not_finite: int, too_large: int) -> None:
        with self._lock:
            before = self.found.get(name, UnfitValues(0, 0))
            self.found[name] = UnfitValues(
                before.not_finite + not_finite, before.too_large + too_large
            )


def _ignore(_: int) -> None:
    """Takes a count that nobody asked for."""


def _count_piece(
    backend: TorchBackend,
    name: str,
    tensor: TensorInfo,
    limit: float,
    counts: _Counts,
    worker: Worker,
) -> None:
    """Counts the values of a piece of a tensor; the limit is that of a magnitude."""
    from nf4conv.run.device.on_torch.device import device_of  # importing torch takes seconds

    counts.add(name, *device_of(worker, backend).count_unpackable(tensor, limit))


def count_values(
    tensors: Mapping[str, TensorInfo],
    limits: Mapping[str, float],
    run: MachineOptions,
    source: Source | None,
    progress: Callable[[int], None] | None = None,
) -> Mapping[str, UnfitValues]:
    """Counts the values of tensors that are NaN or infinite, or whose magnitude is too large.

    Args:
        tensors: the tensors, by name.
        limits: the largest magnitude of each, by the same names.
        run: how to use the machine.
        source: the checkpoint that they belong to; None if they are in files at hand.
        progress: told how many more bytes have been read, from any thread.

    Returns:
        What was counted of each tensor, by name.
    """
    found = _Counts()
    torch = TorchBackend(run.device)
    pipeline = make_pipeline([torch], run, progress or _ignore)
    tasks = []
    for name, tensor in tensors.items():
        most = pipeline.piece * 8 // DTYPE_BITS[tensor.dtype]
        tasks += [
            partial(_count_piece, torch, name, piece.tensor, limits[name], found)
            for piece in pieces_of(tensor, most)
        ]
    with open_reader(source) as reader:
        pipeline.run(tasks, reader)
    return found.found


def find_unpackable(
    jobs: Sequence[PackJob], format: Format, run: MachineOptions, source: Source
) -> Mapping[str, tuple[int, str]]:
    """Counts the values of source tensors that cannot be packed.

    They are NaN or infinite, or so large that the mean of the scales may become so.

    Returns:
        (count, reason) by the name of the tensor; tensors without such values are left out.
    """
    largest = _LARGEST_SUM if format.double_quant else math.inf
    tensors = {job.source.name: job.source for job in jobs}
    limits = {}
    for name, tensor in tensors.items():
        limits[name] = largest / (block_count(tensor.elements, format.blocksize) or 1)
    unpackable = {}
    for name, count in sorted(count_values(tensors, limits, run, source).items()):
        if count.not_finite:
            unpackable[name] = (count.not_finite, "NaN or infinite")
        elif count.too_large:
            unpackable[name] = (count.too_large, "too large for double quantization")
    return unpackable
