"""Kept tensors decoded and cast with torch."""

import math
from collections.abc import Iterator, Sequence

import torch

from nf4conv.errors import SourceError
from nf4conv.plan.jobs import CopyJob
from nf4conv.run.device.on_torch.buffers import TorchBuffers
from nf4conv.run.device.on_torch.reading import TORCH_DTYPES, exactly_decoded, read_values
from nf4conv.run.device.protocol import CastError, Converted, CopyPart, MergeError
from nf4conv.run.worker import Activity
from nf4conv.sources.merged import Merged
from nf4conv.sources.tensors import TensorInfo


def convert(device: TorchBuffers, parts: Sequence[CopyPart]) -> Iterator[Converted]:
    """Yields kept tensors, or parts of them, in the dtypes that they are stored in.

    Raises:
        CastError: finite values become infinite; raised once all values have been given.
        MergeError: finite values become NaN or infinite where an adapter changes them; raised once
            all values have been given.
    """
    error: SourceError | None = None
    for job, piece in parts:
        values = read_values(device, piece.tensor)
        with device.timed(Activity.COMPUTE):
            cast = values.to(TORCH_DTYPES[job.dtype])
            if error is None:
                error = _error_of(device, job, piece.tensor, values, cast)
            [fetched] = device.fetch([cast])
        yield Converted(job, piece.start * cast.element_size(), fetched)
    if error is not None:
        raise error


def _error_of(
    device: TorchBuffers,
    job: CopyJob,
    tensor: TensorInfo,
    values: torch.Tensor,
    cast: torch.Tensor,
) -> SourceError | None:
    """Returns what is wrong with the values of a tensor, or of a part of it; None if nothing is."""
    if isinstance(tensor.encoding, Merged):
        if _has_new_non_finite(device, tensor.unmerged, cast):
            return MergeError(job.source, job.dtype)
    elif len(job.steps) > 1 and _loses_values(device, tensor, values, cast):
        return CastError(job.source, job.dtype)
    return None


def _has_new_non_finite(device: TorchBuffers, before: TensorInfo, after: torch.Tensor) -> bool:
    """Returns True if values are NaN or infinite that were finite before adapters changed them."""
    if math.isfinite(after.sum(dtype=torch.float32).item()):
        return False
    base = read_values(device, before)
    return bool((torch.isfinite(base) & ~torch.isfinite(after)).any())


def _loses_values(
    device: TorchBuffers, tensor: TensorInfo, values: torch.Tensor, cast: torch.Tensor
) -> bool:
    """Returns True if a cast made finite values infinite.

    What is infinite or NaN in the source may stay so. Only if the result has such values, they are
    held against those of the source, in a dtype that holds them all.
    """
    # a sum is NaN or infinite if any term is; finite terms whose sum overflows are looked at too
    if math.isfinite(cast.sum(dtype=torch.float32).item()):
        return False
    exact = values
    if tensor.encoding is not None:
        exact = read_values(device, exactly_decoded(tensor))
    return bool((torch.isfinite(exact) & ~torch.isfinite(cast)).any())
