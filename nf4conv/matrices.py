"""Reading the weights that are packed: a run of a file's bytes, or cut out of a larger tensor, or decoded."""

import torch

from nf4conv.checkpoint.encoded import BITSANDBYTES_4BIT
from nf4conv.checkpoint.encoded_pieces import (
    EncodedPiece,
    can_cut_rows,
    encoded_pieces,
    is_stack_of_matrices,
    matrix_of,
    packed_pieces,
    rows_of,
)
from nf4conv.checkpoint.header import TensorInfo
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
        weight = _read_encoded(worker, source, matrix.index)
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


def _read_encoded(worker: TorchWorker, source: TensorInfo, index: int | None) -> torch.Tensor:
    """An encoded matrix, or one at an index of an encoded stack."""
    if index is None:
        return read_decoded(worker, source)
    if is_stack_of_matrices(source):
        return read_decoded(worker, matrix_of(source, index))
    return read_decoded(worker, source)[index]


def matrix_pieces(job: PackJob, most: int, unit: int) -> list[EncodedPiece]:
    """An encoded weight in pieces that can be decoded one by one.

    Args:
        job: a weight.
        most: elements of a piece, unless its rows are longer.
        unit: every piece begins at a multiple of so many elements.

    Returns:
        The pieces in order; a single one, or none, for a weight that `read_matrix` has to read.
    """
    matrix, source = job.matrix, job.source
    if source.encoding is None or matrix.transpose or matrix.columns is not None:
        return []
    if source.encoding.method == BITSANDBYTES_4BIT and matrix.index is None and matrix.rows is None:
        return packed_pieces(source, most, unit)
    if matrix.index is not None:
        if not is_stack_of_matrices(source):
            return []
        source = matrix_of(source, matrix.index)
    if matrix.rows is not None:
        if not can_cut_rows(source, matrix.rows[0]):
            return []
        source = rows_of(source, *matrix.rows)
    return encoded_pieces(source, most, unit)
