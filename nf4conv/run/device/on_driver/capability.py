"""Tells what the kernels can do: which of them a job takes, or why it takes torch."""

from typing import Final

from nf4conv.format.dtypes import DTYPE_NAMES, TAGS
from nf4conv.format.layout import Format
from nf4conv.plan.jobs import CopyJob, Job, PackJob
from nf4conv.report.measured import TensorDifference
from nf4conv.run.device.on_driver.kernels import Purpose
from nf4conv.run.device.on_driver.loading import kernels_for_tensor
from nf4conv.run.pieces import ENOUGH, located, pieces_of, whole_weight
from nf4conv.sources.arranged import Excerpt, Joined, Merged, StackedExperts
from nf4conv.sources.cutting import pieces_alike
from nf4conv.sources.tensors import TensorInfo

_NOTHING: Final = frozenset[Purpose]()


def kernels_for_job(job: Job, format: Format, *, is_measured: bool) -> frozenset[Purpose] | None:
    """Tells which kernels a job takes; None if there are none for it, so that it takes torch."""
    if isinstance(job, CopyJob):
        if not job.is_changed:
            return _NOTHING
        # all pieces are as the first one
        first = next(iter(pieces_of(job.source, ENOUGH)), None)
        return _NOTHING if first is None else kernels_for_tensor(first.tensor, job.steps)
    if job.stored is not None:
        return _NOTHING
    if job.source.encoding is not None and len(job.matrix.shape) > 2:
        return None  # a stack is decoded matrix by matrix, and packed as a whole
    whole = whole_weight(job)
    if whole.tensor is None:
        return None
    found = kernels_for_tensor(whole.tensor, packing_steps(job.source, format))
    if found is None:
        return None
    purposes = {packing_purpose(format)}
    if is_measured:
        purposes.add(measuring_purpose(format))
    return found | purposes


def kernels_for_pair(result: TensorDifference) -> frozenset[Purpose] | None:
    """Tells which kernels subtract two tensors; None if there are none for them."""
    dtypes = (result.a.dtype, result.b.dtype)
    if dtypes[0] not in DTYPE_NAMES or dtypes[1] not in DTYPE_NAMES:
        return None
    found = {Purpose("subtractor", dtypes)}
    _, *pieces = next(pieces_alike(result.a, result.b, ENOUGH))
    for piece in pieces:
        of_piece = kernels_for_tensor(piece, (piece.dtype,))
        if of_piece is None:
            return None
        found |= of_piece
    return frozenset(found)


def packing_purpose(format: Format) -> Purpose:
    details = (format.dtype, format.quant_type, format.blocksize, format.scales)
    return Purpose("encoder", details)


def measuring_purpose(format: Format) -> Purpose:
    details = (format.dtype, format.quant_type, format.blocksize, format.scales)
    return Purpose("comparer", (*details, format.double_quant))


def packing_steps(source: TensorInfo, format: Format) -> tuple[str, ...]:
    """Returns the dtypes that a weight goes through before it is packed."""
    tag = TAGS[format.dtype]
    return (tag,) if source.dtype == tag else (source.dtype, tag)


def why_torch(job: Job) -> str:
    """Says in a few words why there are no kernels for a job."""
    source = job.source
    if isinstance(job, PackJob) and located(job)[1].transpose:
        return "stored transposed"
    if isinstance(source.encoding, Merged | Joined | StackedExperts | Excerpt):
        return source.encoding.name
    if isinstance(job, PackJob) and (job.matrix.columns is not None or job.matrix.step > 1):
        return "cut out of a larger tensor"
    if source.encoding is not None:
        return f"stored as {source.encoding.name}"
    return f"stored in {source.dtype}"
