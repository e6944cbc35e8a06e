"""Cuts weights and tensors into the pieces that a worker takes at a time."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from nf4conv.choose.decisions import PackedMatrix
from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.plan.jobs import PackJob
from nf4conv.sources.cutting import Piece, encoded_pieces, packed_pieces, plain_pieces
from nf4conv.sources.foreign.bitsandbytes import packed_in_order
from nf4conv.sources.tensors import TensorInfo

ENOUGH: Final = 2**62  # more elements, or bytes, than there are


class WeightPiece(NamedTuple):
    """A run of the elements of a weight that is to be packed."""

    job: PackJob
    start: int  # elements of the weight before it
    elements: int
    # the run as it is stored; None for a weight that has to be read as a whole matrix, because it
    # is transposed or cut out of other columns, or because its encoding cannot be cut
    tensor: TensorInfo | None


def whole_weight(job: PackJob) -> WeightPiece:
    """Returns a weight in one piece."""
    pieces = weight_pieces(job, ENOUGH, ENOUGH, 1)
    return WeightPiece(job, 0, job.elements, pieces[0].tensor if pieces else None)


def weight_pieces(job: PackJob, piece: int, most: int, unit: int) -> list[Piece]:
    """Cuts a weight into pieces.

    Args:
        job: the weight.
        piece: bytes of a piece at most, if the weight is stored as it is.
        most: elements of a piece at most, if the weight has to be decoded.
        unit: every piece begins at a multiple of so many elements.

    Returns:
        The pieces. A weight that has to be read as a whole matrix has none, or a single one.
    """
    if job.is_cut_out:
        return _matrix_pieces(job, most, unit)
    begin, end = job.source_range
    run = job.source._replace(shape=(job.elements,), start=begin, stop=end)
    elements = piece * 8 // DTYPE_BITS[run.dtype]
    return plain_pieces(run, max(elements - elements % unit, unit))


def _matrix_pieces(job: PackJob, most: int, unit: int) -> list[Piece]:
    """Cuts a weight that is encoded, transposed or cut out of other columns."""
    source, matrix = located(job)
    is_cut = matrix.transpose or matrix.columns is not None or matrix.step > 1
    if source.encoding is None or is_cut or matrix.expert is not None:
        return []
    if matrix.rows is None and packed_in_order(source) is not None:
        return packed_pieces(source, most, unit)
    if matrix.rows is not None:
        if not source.can_cut(matrix.rows[0]):
            return []
        source = source.rows(*matrix.rows)
    return list(encoded_pieces(source, most, unit))


def located(job: PackJob) -> tuple[TensorInfo, PackedMatrix]:
    """Finds the smallest encoded tensor that holds a weight, and where it is in that.

    Returns:
        The source, or the matrix of an expert that was cut out of it, as it lies or transposed.
        The place of the weight in it.
    """
    source = job.source
    matrix = job.matrix
    if source.encoding is None:
        return source, matrix
    if matrix.expert is not None and source.is_stack:
        source = source.matrix(matrix.expert)
        matrix = matrix._replace(expert=None)
    flipped = source.transposed() if matrix.transpose else None
    if flipped is not None:
        source = flipped
        matrix = matrix._replace(transpose=False, rows=matrix.columns, columns=matrix.rows)
    return source, matrix


def pieces_of(source: TensorInfo, most: int) -> Iterable[Piece]:
    """Cuts a tensor into pieces of at most `most` elements, if it can be cut so."""
    if source.encoding is None:
        return plain_pieces(source, most // 64 * 64)
    if packed_in_order(source) is not None:
        return packed_pieces(source, most)
    return encoded_pieces(source, most)
