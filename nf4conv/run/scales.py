"""Looks at the scales of weights in 4 bits before they are decoded.

A scale that is NaN or infinite makes a block of NaN, and a large one makes values that float16
cannot hold. Reading the scales costs little: they take an eighth of the codes' bytes, and a few
bytes of a weight with double quantization.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from nf4conv.errors import SourceError
from nf4conv.format.dtypes import DTYPE_NAMES
from nf4conv.options import MachineOptions
from nf4conv.plan.jobs import CopyJob, Job
from nf4conv.run.loop import open_reader
from nf4conv.sources.arranged import StackedExperts
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.reader import Reader
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo

_AT_A_TIME: Final = 4  # weights
_CHUNK: Final = 2**22  # bytes of scales that are read at once
_FIRST_TOO_LARGE: Final = 65520.0
"""The least magnitude that float16 rounds to infinity."""


@dataclass(frozen=True)
class _Weight:
    """A weight in 4 bits, or an expert of a stack of them, that a job decodes."""

    job: CopyJob
    encoding: Bitsandbytes4bit


def check_scales(jobs: Sequence[Job], source: Source, run: MachineOptions) -> None:
    """Checks that weights decode to finite values.

    Args:
        jobs: what is written.
        source: the checkpoint, files of which may still be on the Hub.
        run: how to use the machine.

    Raises:
        SourceError: a weight decodes to NaN or infinity, or to values that float16 cannot hold.
    """
    large = []
    for weight, largest in _largest_of(list(_weights(jobs)), source):
        where = f"{weight.job.source.file}: {weight.job.name}"
        if not math.isfinite(largest):
            raise SourceError(
                f"{where}: has scales that are NaN or infinite, and would decode to NaN; "
                f"repair the checkpoint, or leave it in 4 bits with --exclude",
                path=weight.job.source.file,
                tensor=weight.job.name,
            )
        if _is_cast_to_float16(weight) and largest >= _FIRST_TOO_LARGE:
            large.append(weight.job)
    if large:
        _refuse_overflow(large, source, run)


def _weights(jobs: Sequence[Job]) -> Iterator[_Weight]:
    for job in jobs:
        if isinstance(job, CopyJob):
            for encoding in _encodings(job.source.unmerged):
                yield _Weight(job, encoding)


def _is_cast_to_float16(weight: _Weight) -> bool:
    """Returns True if a weight is decoded to float16 and was of another dtype before.

    One that was float16 before decodes to what bitsandbytes makes of it, infinity included.
    """
    return weight.job.dtype == "F16" and weight.encoding.dtype != "F16"


def _encodings(tensor: TensorInfo) -> Iterator[Bitsandbytes4bit]:
    if isinstance(tensor.encoding, Bitsandbytes4bit):
        yield tensor.encoding
    elif isinstance(tensor.encoding, StackedExperts):
        for _, part in tensor.encoding.parts:
            yield from _encodings(part)


def _largest_of(weights: Sequence[_Weight], source: Source) -> Iterator[tuple[_Weight, float]]:
    """Yields each weight with a magnitude that no decoded value exceeds; NaN if one is NaN."""
    with open_reader(source) as reader, ThreadPoolExecutor(_AT_A_TIME) as pool:
        encodings = [weight.encoding for weight in weights]
        largest = pool.map(partial(_largest_scale, reader), encodings)
        yield from zip(weights, largest, strict=True)


def _largest_scale(reader: Reader, encoding: Bitsandbytes4bit) -> float:
    from nf4conv.codec.finite import largest_magnitude  # importing numpy takes a moment

    scales = encoding.absmax if encoding.nested_absmax is None else encoding.nested_absmax
    largest = 0.0
    for start in range(scales.start, scales.stop, _CHUNK):
        buffer = bytearray(min(_CHUNK, scales.stop - start))
        reader.read_into(scales.file, start, memoryview(buffer))
        found = largest_magnitude(memoryview(buffer))
        if not math.isfinite(found):
            return found
        largest = max(largest, found)
    return largest + abs(encoding.nested_offset or 0.0)


def _refuse_overflow(jobs: Sequence[CopyJob], source: Source, run: MachineOptions) -> None:
    """Raises a SourceError if a decoded value is too large for float16."""
    from nf4conv.run.tasks.scan import count_values  # importing torch takes seconds

    wide: Mapping[str, TensorInfo] = {job.name: job.source._replace(dtype="F32") for job in jobs}
    limits = dict.fromkeys(wide, math.nextafter(_FIRST_TOO_LARGE, 0))
    on_cpu = replace(run, device="cpu")  # few weights are looked at, whatever device computes
    found = count_values(wide, limits, on_cpu, source)
    for name, count in found.items():
        tensor = wide[name]
        if count.too_large:
            raise SourceError.about(
                tensor.file,
                name,
                f"{count.too_large:,} of {tensor.elements:,} values are too "
                f"large for {DTYPE_NAMES['F16']}; --dtype bf16 holds them",
            )
