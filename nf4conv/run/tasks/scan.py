"""Finds weights that hold values which cannot be packed: a pass that only counts. Takes torch."""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from nf4conv.format.layout import Format, block_count
from nf4conv.options import RunOptions
from nf4conv.plan.jobs import PackJob
from nf4conv.run.device.on_torch.backend import TorchBackend
from nf4conv.run.loop import make_pipeline
from nf4conv.run.pieces import pieces_of
from nf4conv.run.worker import Worker
from nf4conv.sources.reader import Reader
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import DTYPE_BITS, TensorInfo

_LARGEST_SUM: Final = 3e38
"""Of the scales of a weight, whose mean double quantization takes in float32."""


class _Counts:
    """Values that cannot be packed, counted by the name of the tensor and the reason."""

    def __init__(self) -> None:
        self.counts = Counter[tuple[str, str]]()
        self._lock = threading.Lock()

    def add(self, name: str, not_finite: int, too_large: int) -> None:
        with self._lock:
            self.counts[name, "NaN or infinite"] += not_finite
            self.counts[name, "too large for double quantization"] += too_large


def _count_piece(
    backend: TorchBackend, tensor: TensorInfo, limit: float, counts: _Counts, worker: Worker
) -> None:
    """Counts the values of a piece of a tensor; the limit is that of a magnitude."""
    from nf4conv.run.device.on_torch.device import device_of  # importing torch takes seconds

    counts.add(tensor.name, *device_of(worker, backend).count_unpackable(tensor, limit))


def find_unpackable(
    jobs: Sequence[PackJob], format: Format, run: RunOptions, source: Source
) -> Mapping[str, tuple[int, str]]:
    """Counts the values of source tensors that cannot be packed.

    They are NaN or infinite, or so large that the mean of the scales may become so.

    Returns:
        (count, reason) by the name of the tensor; tensors without such values are left out.
    """
    found = _Counts()
    largest = _LARGEST_SUM if format.double_quant else math.inf
    torch = TorchBackend(run.device)
    pipeline = make_pipeline([torch], run, lambda _: None)
    tensors = {job.source.name: job.source for job in jobs}
    tasks = []
    for tensor in tensors.values():
        limit = largest / (block_count(tensor.elements, format.blocksize) or 1)
        most = pipeline.piece * 8 // DTYPE_BITS[tensor.dtype]
        tasks += [
            partial(_count_piece, torch, piece.tensor, limit, found)
            for piece in pieces_of(tensor, most)
        ]
    with _open_reader(source) as reader:
        pipeline.run(tasks, reader)
    unpackable = {}
    for (name, reason), count in sorted(found.counts.items(), reverse=True):
        if count:
            unpackable[name] = (count, reason)
    return unpackable


def _open_reader(source: Source) -> Reader:
    """Opens a reader of a source, some files of which may still have to be fetched."""
    fetched = source.fetched
    if fetched is None or fetched.repository is None or not fetched.absent:
        return Reader()
    from nf4conv.sources.remote.stream import (
        RemoteReader,  # importing huggingface_hub takes a while
    )

    return RemoteReader(fetched.repository, fetched.absent)
