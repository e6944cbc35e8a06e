"""A pass over weights that only counts: which of them hold NaN or infinity."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from nf4conv.checkpoint.header import DTYPE_BITS, TensorInfo
from nf4conv.checkpoint.plan import PackJob
from nf4conv.encode import SOURCE_DTYPES
from nf4conv.options import RunOptions
from nf4conv.pipeline import Task, make_pipeline
from nf4conv.worker import TorchEngine, TorchWorker


@dataclass
class _Counts:
    by_name: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class _CountPiece:
    tensor: TensorInfo
    start: int
    stop: int
    counts: _Counts

    def run(self, worker: TorchWorker) -> None:
        [raw] = worker.read([(self.tensor.file, self.start, self.stop)])
        with worker.timed("encode"):
            found = int((~torch.isfinite(raw.view(SOURCE_DTYPES[self.tensor.dtype]))).sum())
        if found:
            with self.counts.lock:
                self.counts.by_name[self.tensor.name] += found


def count_non_finite(jobs: Sequence[PackJob], run: RunOptions) -> Mapping[str, int]:
    """How many values of each source tensor are NaN or infinite; tensors without any are left out."""
    counts = _Counts()
    pipeline = make_pipeline(TorchEngine(run.device), run, lambda _: None)
    pipeline.run(_pieces({job.source.name: job.source for job in jobs}, pipeline.piece, counts))
    return dict(sorted(counts.by_name.items()))


def _pieces(tensors: Mapping[str, TensorInfo], piece: int, counts: _Counts) -> Iterator[Task[TorchWorker]]:
    for tensor in tensors.values():
        step = piece - piece % (DTYPE_BITS[tensor.dtype] // 8)
        for start in range(tensor.start, tensor.stop, step):
            yield _CountPiece(tensor, start, min(start + step, tensor.stop), counts)
