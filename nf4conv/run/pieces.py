"""Divides work: cuts weights and tensors into the pieces that a worker takes at a time, puts small
items together, and takes items of several groups in turn.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, islice
from typing import Final, NamedTuple, TypeVar

from nf4conv.choose.decisions import PackedMatrix
from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.plan.jobs import PackJob
from nf4conv.sources.cutting import Piece, pieces_of
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit, cut_parts
from nf4conv.sources.tensors import FileRange, TensorInfo

T = TypeVar("T")

ENOUGH: Final = 2**62  # more elements, or bytes, than there are
LARGEST_BATCH: Final = 4096  # items that a worker takes together


class WeightPiece(NamedTuple):
    """A run of the elements of a weight that is to be packed."""

    job: PackJob
    start: int  # elements of the weight before it
    elements: int
    # the run as it is stored; None for a weight that has to be read as a whole matrix, because it
    # is transposed or cut out of other columns, or because its encoding cannot be cut
    tensor: TensorInfo | None


def whole_weight(job: PackJob) -> WeightPiece:
    """Returns a weight in one piece; a stack of encoded experts, cut at each, as a whole matrix."""
    first, *others = weight_pieces(job, ENOUGH, ENOUGH, 1)
    return WeightPiece(job, 0, job.elements, None) if others else first


def weight_pieces(job: PackJob, piece: int, most: int, unit: int) -> list[WeightPiece]:
    """Cuts a weight into pieces, each of which begins at a multiple of `unit` elements.

    A piece has at most `piece` bytes if the weight is stored as it is, `most` elements if it has to
    be decoded; a weight that has to be read as a whole matrix is one.
    """
    if job.is_cut_out:
        pieces = _matrix_pieces(job, most, unit)
    else:
        begin, end = job.source_range
        run = job.source._replace(shape=(job.elements,), start=begin, stop=end)
        pieces = list(pieces_of(run, piece * 8 // DTYPE_BITS[run.dtype], unit))
    if not pieces:
        return [WeightPiece(job, 0, job.elements, None)]
    return [WeightPiece(job, start, tensor.elements, tensor) for tensor, start in pieces]


def _matrix_pieces(job: PackJob, most: int, unit: int) -> list[Piece]:
    """Cuts a weight that is encoded, transposed or cut out of other columns."""
    source, matrix = located(job)
    is_cut = matrix.transpose or matrix.columns is not None or matrix.step > 1
    if source.encoding is None or is_cut or matrix.expert is not None:
        return []
    if matrix.rows is not None:
        together = source.rows_together
        if together is None or matrix.rows[0] % together:
            return []
        source = source.rows(*matrix.rows)
    return list(pieces_of(source, most, unit))


def located(job: PackJob) -> tuple[TensorInfo, PackedMatrix]:
    """Finds the smallest encoded tensor that holds a weight, and where it is in that.

    It is the source, or the matrix of an expert that was cut out of it, as it lies or transposed.
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


def scale_ranges(stored: Bitsandbytes4bit, piece: WeightPiece) -> dict[str, FileRange]:
    """Returns where the scales of a piece are stored, by role."""
    stop = piece.start + piece.elements
    parts = cut_parts(dict(stored.parts), stored.format.blocksize, piece.start, stop)
    roles = ("absmax", "nested_absmax")
    return {role: parts[role].file_range for role in roles if role in parts}


def interleave(groups: Iterable[Iterable[T]], width: int) -> Iterator[T]:
    """Yields items of `width` groups in turn; a new group takes the place of an exhausted one."""
    waiting = iter(groups)
    active = deque(iter(group) for group in islice(waiting, width))
    while active:
        group = active.popleft()
        for item in group:
            yield item
            active.append(group)
            break
        else:
            active.extend(iter(group) for group in islice(waiting, 1))


def batches(
    items: Iterable[T],
    size: Callable[[T], int],
    room: int,
    kind: Callable[[T], object],
    most: int | None = None,
) -> Iterator[tuple[T, ...]]:
    """Groups neighbouring items of the same kind.

    The items of a group take `room` bytes at most, and are not more than `most`. A larger item
    comes alone.
    """
    batch: list[T] = []
    left = room
    for item in items:
        needed = size(item)
        if batch:
            is_full = needed > left or len(batch) == most
            if is_full or kind(item) != kind(batch[0]):
                yield tuple(batch)
                batch = []
                left = room
        batch.append(item)
        left -= needed
    if batch:
        yield tuple(batch)


def aligned(nbytes: int) -> int:
    """Returns the room that a range of so many bytes takes in a worker's buffer."""
    return nbytes + -nbytes % 64


def starts(sizes: Iterable[int]) -> list[int]:
    """Returns where each of some neighbours begins, and where the last one ends."""
    return list(accumulate(sizes, initial=0))


def bytes_of(tag: str, elements: int) -> int:
    """Returns the bytes of so many elements of the dtype that a tag names."""
    return DTYPE_BITS[tag] * elements // 8
