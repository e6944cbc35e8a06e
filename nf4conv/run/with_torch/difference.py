"""Comparison as pipeline tasks: how far the values of two tensors are apart, whatever they are."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

import torch

from nf4conv.report.measured import PieceDifference, TensorDifference
from nf4conv.run.loop import Activity, Task
from nf4conv.run.with_torch.reading import read_values
from nf4conv.run.with_torch.worker import TorchWorker
from nf4conv.sources.encodings.pieces import pieces_alike
from nf4conv.sources.tensors import TensorInfo

_CHUNK: Final = (
    2**18
)  # values compared at a time: in float64 they take a few times as much memory as they do in a file


def value_tasks(results: Iterable[TensorDifference], piece: int) -> Iterator[Task[TorchWorker]]:
    """The comparison of tensors value by value."""
    for result in results:
        # both decoded take a few times as much
        for start, *both in pieces_alike(result.a, result.b, piece // 4):
            yield partial(_compare_values, result, start, both)


def _compare_values(
    result: TensorDifference, start: int, pieces: Sequence[TensorInfo], worker: TorchWorker
) -> None:
    """A piece of two tensors, which begins at an element."""
    a = read_values(worker, pieces[0]).clone()  # the next read reuses the buffer
    b = read_values(worker, pieces[1])
    with worker.timed(Activity.COMPUTE):
        result.add_piece(start, difference(a, b))


def difference(a: torch.Tensor, b: torch.Tensor) -> PieceDifference:
    """Compare the values of two flat tensors of one length and any dtypes."""
    sums = torch.zeros(3, dtype=torch.float64, device=a.device)
    largest = torch.zeros((), dtype=torch.float64, device=a.device)
    for start in range(0, a.numel(), _CHUNK):
        left, right = a[start : start + _CHUNK], b[start : start + _CHUNK]
        x, y = left.double(), right.double()
        unequal = x != y
        if a.dtype == b.dtype and a.dtype in (
            torch.int64,
            torch.uint64,
        ):  # not all of which float64 holds
            unequal = left.view(torch.int64) != right.view(torch.int64)
        unequal &= ~(x.isnan() & y.isnan())
        distance = torch.where(unequal, (x - y).abs(), 0.0).nan_to_num_(
            nan=torch.inf, posinf=torch.inf
        )
        values = x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        sums += torch.stack([distance.square().sum(), values.square().sum(), unequal.sum()])
        largest = torch.maximum(largest, distance.amax())
    squared_difference, squared_values, differing = sums.tolist()
    return PieceDifference(squared_difference, squared_values, float(largest), int(differing))
