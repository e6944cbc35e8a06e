"""Finds values that are not finite, or would not be once they are decoded.

Passes that only count take torch. Scales of weights in 4 bits are looked at without: one that is
NaN or infinite makes a block of NaN. Reading them costs little: they take an eighth of the codes'
bytes, and a few bytes of a weight with double quantization.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from nf4conv.errors import SourceError
from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.options import MachineOptions
from nf4conv.plan.jobs import CopyJob, Job
from nf4conv.report.measured import WeightResult
from nf4conv.run.device.choice import open_torch
from nf4conv.run.loop import make_pipeline
from nf4conv.run.worker import Worker
from nf4conv.sources.arranged import StackedExperts
from nf4conv.sources.cutting import pieces_of
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.reader import Reader
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo

_AT_A_TIME: Final = 4  # weights
_CHUNK: Final = 2**22  # bytes of scales that are read at once


def count_not_finite(
    tensors: Sequence[TensorInfo], run: MachineOptions, progress: Callable[[int], None]
) -> tuple[str, dict[str, int]]:
    """Counts the values of tensors in files at hand that are NaN or infinite, by their names.

    `progress` is told how many more bytes have been read, from any thread. Returns the device that
    counted, and the counts.
    """
    torch = open_torch(run)
    pipeline = make_pipeline(torch, run, progress)
    found: list[tuple[str, int]] = []  # of pieces; workers append to it
    tasks = []
    for tensor in tensors:
        most = pipeline.piece * 8 // DTYPE_BITS[tensor.dtype]
        tasks += [partial(_count, piece.tensor, found) for piece in pieces_of(tensor, most)]
    with Reader() as reader:
        pipeline.run(tasks, reader)
    counts: Counter[str] = Counter()
    for name, count in found:
        counts[name] += count
    return torch.name, dict(counts)


def _count(tensor: TensorInfo, found: list[tuple[str, int]], worker: Worker) -> None:
    from nf4conv.run.device.on_torch.device import device_of  # importing torch takes seconds

    found.append((tensor.name, device_of(worker).count_not_finite(tensor)))


def check_scales(jobs: Sequence[Job], source: Source) -> None:
    """Refuses weights in 4 bits whose scales are NaN or infinite: they would decode to NaN."""
    weights = []
    for job in jobs:
        if isinstance(job, CopyJob):
            weights += [(job, encoding) for encoding in _encodings(job.source.unmerged)]
    with Reader(source.absent) as reader, ThreadPoolExecutor(_AT_A_TIME) as pool:
        encodings = [encoding for _, encoding in weights]
        verdicts = pool.map(partial(_are_scales_finite, reader), encodings)
        for (job, _), is_finite in zip(weights, verdicts, strict=True):
            if not is_finite:
                raise SourceError.about(
                    job.source.file,
                    job.name,
                    "has scales that are NaN or infinite, and would decode to NaN; "
                    "quantize the original again",
                )


def count_improper_scales(result: WeightResult, piece: int, worker: Worker) -> None:
    """Counts the scales of a packed weight that are infinite, NaN or, if they were not searched,
    negative.
    """
    from nf4conv.codec.finite import count_improper  # importing numpy takes a moment

    weight = result.weight
    may_be_negative = weight.format.scales != "absmax"
    if weight.nested_offset is not None and weight.nested_offset < 0 and not may_be_negative:
        result.improper += weight.absmax.elements  # it is the mean of them
    # the magnitudes of nested blocks are never negative
    scales = weight.absmax if weight.nested_absmax is None else weight.nested_absmax
    may_be_negative &= weight.nested_absmax is None
    for start in range(scales.start, scales.stop, piece):
        stop = min(start + piece, scales.stop)
        host = worker.buffer[: stop - start]
        worker.fill(host, [(scales.file, start, stop)], [0])
        result.improper += count_improper(host, may_be_negative=may_be_negative)
    worker.advance(weight.nbytes - weight.values.nbytes - scales.nbytes)


def _encodings(tensor: TensorInfo) -> Iterator[Bitsandbytes4bit]:
    if isinstance(tensor.encoding, Bitsandbytes4bit):
        yield tensor.encoding
    elif isinstance(tensor.encoding, StackedExperts):
        for _, part in tensor.encoding.parts:
            yield from _encodings(part)


def _are_scales_finite(reader: Reader, encoding: Bitsandbytes4bit) -> bool:
    from nf4conv.codec.finite import are_finite  # importing numpy takes a moment

    scales = encoding.absmax if encoding.nested_absmax is None else encoding.nested_absmax
    for start in range(scales.start, scales.stop, _CHUNK):
        buffer = memoryview(bytearray(min(_CHUNK, scales.stop - start)))
        reader.read_into(scales.file, start, buffer)
        if not are_finite(buffer):
            return False
    return math.isfinite(encoding.nested_offset or 0.0)
