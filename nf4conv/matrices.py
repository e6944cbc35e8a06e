"""Reading the weights that are packed: a run of a file's bytes, or cut out of a larger tensor, or decoded."""

import torch

from nf4conv.checkpoint.plan import PackJob
from nf4conv.decoding import TORCH_DTYPES, read_decoded
from nf4conv.worker import TorchWorker


def read_matrix(worker: TorchWorker, job: PackJob, dtype: torch.dtype) -> torch.Tensor:
    """A whole weight, as it is before it is packed.

    Args:
        worker: reads and computes.
        job: a weight that is stored transposed, encoded, or as some columns of a larger matrix.
        dtype: to cast to.

    Returns:
        [n] on the worker's device, contiguous.
    """
    matrix, source = job.matrix, job.source
    if source.encoding is not None:
        weight = read_decoded(worker, source, matrix.index)
        if matrix.rows is not None:
            weight = weight[slice(*matrix.rows)]
    else:
        [raw] = worker.read([(source.file, *job.source_range)])
        weight = raw.view(TORCH_DTYPES[source.dtype]).view(-1, source.shape[-1])
    with worker.timed("encode"):
        if matrix.columns is not None:
            weight = weight[:, slice(*matrix.columns)]
        if matrix.transpose:
            weight = weight.t()
        return weight.to(dtype).contiguous().view(-1)
