"""Cuts tensors into pieces that are read, and decoded, one by one.

A piece is a few rows of a matrix, a matrix of a stack, or some blocks of a 4-bit weight; a piece of
an encoded tensor is encoded as well. Pieces decide how much memory a conversion takes. Tensors that
cannot be cut are taken whole.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nf4conv.sources.arranged import Columns
from nf4conv.sources.foreign.bitsandbytes import packed_in_order, packed_spans
from nf4conv.sources.tensors import TensorInfo, cut_elements


class Piece(NamedTuple):
    """A run of a tensor's elements."""

    tensor: TensorInfo  # that run, encoded if the tensor is
    start: int  # elements of the whole tensor before it


def pieces_of(tensor: TensorInfo, most: int, unit: int = 1) -> Iterator[Piece]:
    """Cuts a tensor into pieces in order: flat ones, unless it is encoded and no 4-bit weight whose
    codes stand in order. One that cannot be cut is a single piece, and so is one without elements.

    A piece has at most `most` elements, unless a row or 256 blocks that are decoded together have
    more, and begins at a multiple of `unit` elements.
    """
    encoding = packed_in_order(tensor)
    if encoding is not None:
        spans = packed_spans(tensor.elements, encoding.format.blocksize, most, unit)
        for start, stop in spans or [(0, 0)]:
            run = encoding.run(start, stop)
            yield Piece(tensor._replace(shape=(stop - start,), encoding=run), start)
    elif tensor.encoding is None:
        together = math.lcm(unit, 64)
        step = max(most - most % together, together)
        for start in range(0, max(tensor.elements, 1), step):
            stop = min(start + step, tensor.elements)
            yield Piece(cut_elements(tensor, start, stop), start)
    else:
        for start, [piece] in _cut_alike([tensor], most, unit):
            yield Piece(piece, start)


def pieces_alike(
    a: TensorInfo, b: TensorInfo, nbytes: int
) -> Iterator[tuple[int, TensorInfo, TensorInfo]]:
    """Cuts two tensors of one shape, encoded or not, at the same places; yields (first element,
    piece of A, piece of B). Both come whole if they cannot be cut so.

    Two pieces have about `nbytes` together, unless a single row has more.
    """
    most = nbytes * a.elements // (a.nbytes + b.nbytes)
    if _is_cut_anywhere(a) and _is_cut_anywhere(b):
        a = a._replace(shape=(a.elements, 1))
        b = b._replace(shape=(b.elements, 1))
    for start, [piece_of_a, piece_of_b] in _cut_alike([a, b], most, 1):
        yield start, piece_of_a, piece_of_b


def share_parts(tensor: TensorInfo) -> bool:
    """Returns True if pieces of a weight, of which one is given, are decoded from the same bytes.

    Then a single worker takes them all, so that these are read once.
    """
    encoding = tensor.unmerged.encoding
    if encoding is None or not encoding.is_quantization:
        return False
    for role, part in encoding.parts:
        if isinstance(part.encoding, Columns) or role == "group_index":
            return True
    return False


def _cut_alike(
    tensors: Sequence[TensorInfo], most: int, unit: int
) -> Iterator[tuple[int, Sequence[TensorInfo]]]:
    """Cuts tensors of one shape at the same places; yields the first element, and a piece of each.
    `most` and `unit` are as of `pieces_of`.
    """
    shape = tensors[0].shape
    matrix_size = math.prod(shape[1:])
    if all(tensor.is_stack for tensor in tensors) and matrix_size % unit == 0:
        for index in range(shape[0]):
            matrices = [tensor.matrix(index) for tensor in tensors]
            for start, pieces in _cut_alike(matrices, most, unit):
                yield index * matrix_size + start, pieces
        return
    together = 1
    for tensor in tensors:
        if tensor.rows_together is None:
            yield 0, tensors
            return
        together = math.lcm(together, tensor.rows_together)
    rows, columns = shape[0], max(shape[1], 1)
    together = math.lcm(together, unit // math.gcd(unit, columns))
    step = max(most // (columns * together), 1) * together
    for start in range(0, max(rows, 1), step):
        stop = min(start + step, rows)
        yield start * matrix_size, [tensor.rows(start, stop) for tensor in tensors]


def _is_cut_anywhere(tensor: TensorInfo) -> bool:
    """Returns True if cuts follow the flat order of a tensor's elements, whatever its shape."""
    return tensor.encoding is None or packed_in_order(tensor) is not None
