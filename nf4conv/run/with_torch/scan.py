"""A pass over weights that only counts: which of them hold values that cannot be packed."""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import torch

from nf4conv.format.layout import Format, block_count
from nf4conv.options import RunOptions
from nf4conv.plan.jobs import PackJob
from nf4conv.run.loop import Activity, make_pipeline
from nf4conv.run.shards import pieces_of
from nf4conv.run.with_torch.reading import read_values
from nf4conv.run.with_torch.worker import TorchEngine, TorchWorker
from nf4conv.sources.reader import Reader
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import DTYPE_BITS, TensorInfo

_LARGEST_SUM: Final = (
    3e38  # of the scales of a weight, whose mean double quantization takes in float32
)


def _count_piece(
    tensor: TensorInfo,
    limit: float,
    counts: Counter[tuple[str, str]],
    lock: threading.Lock,
    worker: TorchWorker,
) -> None:
    """A piece of a tensor, whose values that cannot be packed are added to counts that the lock
    guards.
    """
    values = read_values(worker, tensor)
    with worker.timed(Activity.COMPUTE):
        finite = torch.isfinite(values)
        found = {"NaN or infinite": values.numel() - int(finite.sum())}
        if limit < torch.finfo(values.dtype).max:
            found["too large for double quantization"] = int(
                (finite & (values.abs() > limit)).sum()
            )
    with lock:
        for what, count in found.items():
            counts[tensor.name, what] += count


def find_unpackable(
    jobs: Sequence[PackJob], format: Format, run: RunOptions, source: Source
) -> Mapping[str, tuple[int, str]]:
    """How many values of each source tensor cannot be packed, and why; tensors without any are left
    out.

    They are NaN or infinite, or so large that the mean of the scales may become so.
    """
    counts, lock = Counter[tuple[str, str]](), threading.Lock()
    blocksize, largest = format.blocksize, _LARGEST_SUM if format.double_quant else math.inf
    pipeline = make_pipeline(TorchEngine(run.device), run, lambda _: None)
    tensors = {job.source.name: job.source for job in jobs}
    with _open_reader(source) as reader:
        tasks = (
            partial(
                _count_piece,
                piece.tensor,
                largest / (block_count(tensor.elements, blocksize) or 1),
                counts,
                lock,
            )
            for tensor in tensors.values()
            for piece in pieces_of(tensor, pipeline.piece * 8 // DTYPE_BITS[tensor.dtype])
        )
        pipeline.run(tasks, reader)
    return {
        name: (count, what) for (name, what), count in sorted(counts.items(), reverse=True) if count
    }


def _open_reader(source: Source) -> Reader:
    fetched = source.fetched
    if fetched is None or fetched.repository is None or not fetched.absent:
        return Reader()
    from nf4conv.sources.remote.stream import (
        RemoteReader,  # importing huggingface_hub takes a while
    )

    return RemoteReader(fetched.repository, fetched.absent)
