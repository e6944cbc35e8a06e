"""A pass over weights that only counts: which of them hold NaN or infinity."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from nf4conv.checkpoint.encoded_pieces import encoded_pieces
from nf4conv.checkpoint.header import DTYPE_BITS, TensorInfo
from nf4conv.checkpoint.plan import PackJob
from nf4conv.checkpoint.reader import Reader
from nf4conv.checkpoint.source import Source
from nf4conv.options import RunOptions
from nf4conv.pipeline.loop import Activity, make_pipeline
from nf4conv.pipeline.with_torch.reading import cut_elements, read_values
from nf4conv.pipeline.with_torch.worker import TorchEngine, TorchWorker


@dataclass(frozen=True)
class _CountPiece:
    """A piece of a tensor, whose NaN and infinities are added to a count that the lock guards."""

    tensor: TensorInfo
    counts: Counter[str]
    lock: threading.Lock

    def run(self, worker: TorchWorker) -> None:
        values = read_values(worker, self.tensor)
        with worker.timed(Activity.COMPUTE):
            found = int((~torch.isfinite(values)).sum())
        if found:
            with self.lock:
                self.counts[self.tensor.name] += found


def count_non_finite(jobs: Sequence[PackJob], run: RunOptions, source: Source) -> Mapping[str, int]:
    """How many values of each source tensor are NaN or infinite; tensors without any are left out."""
    counts, lock = Counter[str](), threading.Lock()
    pipeline = make_pipeline(TorchEngine(run.device), run, lambda _: None)
    pieces = _pieces({job.source.name: job.source for job in jobs}, pipeline.piece)
    with _open_reader(source) as reader:
        pipeline.run((_CountPiece(piece, counts, lock) for piece in pieces), reader)
    return dict(sorted(counts.items()))


def _open_reader(source: Source) -> Reader:
    fetched = source.fetched
    if fetched is None or fetched.repository is None or not fetched.absent:
        return Reader()
    from nf4conv.checkpoint.stream import RemoteReader  # importing huggingface_hub takes a while

    return RemoteReader(fetched.repository, fetched.absent)


def _pieces(tensors: Mapping[str, TensorInfo], piece: int) -> Iterator[TensorInfo]:
    for tensor in tensors.values():
        if tensor.encoding is not None:
            yield from (part.tensor for part in encoded_pieces(tensor, piece // 2))
            continue
        step = piece // (DTYPE_BITS[tensor.dtype] // 8)
        for start in range(0, tensor.elements, step):
            yield cut_elements(tensor, start, min(start + step, tensor.elements))
