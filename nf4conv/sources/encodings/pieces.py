"""Encoded tensors taken apart: rows of a matrix, a matrix of a stack, blocks of a 4-bit weight,
still encoded.

What is decoded at a time decides how much memory a conversion takes. Only encodings whose parts lie
row by row can be cut; the others are taken whole. What is merged can be cut where what it is merged
into can.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from nf4conv.format.codebook import NESTED_BLOCKSIZE
from nf4conv.format.encodings import Method
from nf4conv.format.layout import block_count
from nf4conv.sources.header import DTYPE_BITS, TensorInfo

_BY_ROWS: Final = (Method.SCALED, Method.INT8_ROWS, Method.FP4, Method.BITSANDBYTES_4BIT)
_BY_MATRICES: Final = (Method.SCALED, Method.FP4_TRANSPOSED)


class Piece(NamedTuple):
    """A run of a tensor's elements."""

    tensor: TensorInfo  # that run, encoded if the tensor is
    start: int  # elements of the whole tensor before it


def encoded_pieces(tensor: TensorInfo, most: int, unit: int = 1) -> Iterator[Piece]:
    """An encoded tensor in pieces that are decoded one by one, in order; the whole of it if it
    cannot be cut so.

    A piece has at most so many elements, unless its rows are longer. Every piece begins at a
    multiple of a unit of elements, and only the last one ends elsewhere.
    """
    size = math.prod(tensor.shape[1:])
    if is_stack_of_matrices(tensor) and size % unit == 0:
        for index in range(tensor.shape[0]):
            for piece, start in encoded_pieces(matrix_of(tensor, index), most, unit):
                yield Piece(piece, index * size + start)
        return
    for span in _row_spans(tensor, most, unit):
        yield Piece(rows_of(tensor, *span), span[0] * size)


def matrix_of(tensor: TensorInfo, index: int) -> TensorInfo:
    """A matrix of a stack [matrices, rows, columns] whose method is one of those that can be cut
    so.
    """
    if tensor.encoding is None:
        return _cut(tensor, index, index + 1)._replace(shape=tensor.shape[1:])
    encoding = tensor.encoding
    if encoding.method is Method.MERGED:
        deltas = tuple(delta._replace(expert=index) for delta in encoding.deltas)
        part = ("values", matrix_of(encoding.parts[0][1], index))
        return tensor._replace(
            shape=tensor.shape[1:], encoding=encoding._replace(parts=(part,), deltas=deltas)
        )
    cut = [
        (
            role,
            _cut(part, index, index + 1)
            if len(part.shape) > 1 and part.shape[0] == tensor.shape[0]
            else part,
        )
        for role, part in encoding.parts
    ]
    cut = [
        (role, part._replace(shape=part.shape[1:]) if len(part.shape) == 3 else part)
        for role, part in cut
    ]
    return tensor._replace(shape=tensor.shape[1:], encoding=encoding._replace(parts=tuple(cut)))


def is_stack_of_matrices(tensor: TensorInfo) -> bool:
    """Whether `matrix_of` can be asked."""
    encoding = tensor.unmerged.encoding
    return len(tensor.shape) == 3 and (encoding is None or encoding.method in _BY_MATRICES)


def rows_of(tensor: TensorInfo, start: int, stop: int) -> TensorInfo:
    """Rows start … stop of a matrix; start is a multiple of the rows that share a scale."""
    rows = tensor.shape[0] if tensor.shape else 1
    if (start, stop) == (0, rows):
        return tensor
    if tensor.encoding is None:
        return _cut(tensor, start, stop)
    encoding, height = tensor.encoding, _height(tensor)
    shape = (stop - start, *tensor.shape[1:])
    if encoding.method is Method.MERGED:
        [(role, base)], before = encoding.parts, encoding.block[0]
        merged = encoding._replace(
            parts=((role, rows_of(base, start, stop)),), block=(before + start,)
        )
        return tensor._replace(shape=shape, encoding=merged)
    if encoding.method is Method.BITSANDBYTES_4BIT:
        return packed_part(tensor, start * shape[1], stop * shape[1])._replace(shape=shape)
    cut = []
    for role, part in encoding.parts:
        if role == "scale" and encoding.block:
            part = _cut(part, start // height, -(-stop // height))
        elif role == "values" or (role == "scale" and part.elements > 1 and part.shape[0] == rows):
            part = _cut(part, start, stop)
        cut.append((role, part))
    return tensor._replace(shape=shape, encoding=encoding._replace(parts=tuple(cut)))


def can_cut_rows(tensor: TensorInfo, start: int) -> bool:
    """Whether `rows_of` can be asked for rows from `start` on."""
    encoding = tensor.encoding
    if encoding is None or len(tensor.shape) != 2:
        return len(tensor.shape) == 2
    if encoding.method is Method.MERGED:
        return can_cut_rows(encoding.parts[0][1], start) and not any(
            delta.needs_all_rows for delta in encoding.deltas
        )
    return encoding.method in _BY_ROWS and start % _height(tensor) == 0


def _row_spans(tensor: TensorInfo, most: int, unit: int) -> Iterator[tuple[int, int]]:
    rows = tensor.shape[0] if tensor.shape else 1
    if not can_cut_rows(tensor, 0):
        yield 0, rows
        return
    columns = max(tensor.shape[1], 1)
    together = math.lcm(_height(tensor), unit // math.gcd(unit, columns))
    step = max(most // (columns * together), 1) * together
    for start in range(0, max(rows, 1), step):
        yield start, min(start + step, rows)


def _height(tensor: TensorInfo) -> int:
    """Rows that share a scale."""
    encoding = tensor.unmerged.encoding
    if encoding is None:
        return 1
    if encoding.method is Method.BITSANDBYTES_4BIT:
        unit = encoding.block[0] * NESTED_BLOCKSIZE
        return unit // math.gcd(unit, max(tensor.shape[1], 1))
    return encoding.block[0] if encoding.block else 1


def _cut(part: TensorInfo, first: int, last: int) -> TensorInfo:
    size = part.nbytes // part.shape[0]
    shape = (last - first, *part.shape[1:])
    return part._replace(
        shape=shape, start=part.start + first * size, stop=part.start + last * size
    )


def packed_pieces(tensor: TensorInfo, most: int, unit: int = 1) -> list[Piece]:
    """A weight that bitsandbytes packed to 4 bits, in pieces; arguments as `encoded_pieces`. Their
    shape is flat.
    """
    assert tensor.encoding is not None
    spans = packed_spans(tensor.elements, tensor.encoding.block[0], most, unit)
    return [Piece(packed_part(tensor, *span), span[0]) for span in spans or [(0, 0)]]


def packed_part(tensor: TensorInfo, start: int, stop: int) -> TensorInfo:
    """Elements start … stop of a weight that bitsandbytes packed, still packed; start and stop as
    of `cut_parts`.
    """
    encoding = tensor.encoding
    assert encoding is not None
    parts = tuple(cut_parts(dict(encoding.parts), encoding.block[0], start, stop).items())
    return tensor._replace(shape=(stop - start,), encoding=encoding._replace(parts=parts))


def packed_spans(elements: int, blocksize: int, most: int, unit: int = 1) -> list[tuple[int, int]]:
    """A packed weight in pieces: (start, stop) in elements, at most so many, but at least 256
    blocks and a unit.
    """
    together = math.lcm(unit, blocksize * NESTED_BLOCKSIZE)
    step = max(most - most % together, together)
    return [(start, min(start + step, elements)) for start in range(0, elements, step)]


def cut_parts(
    parts: Mapping[str, TensorInfo], blocksize: int, start: int, stop: int
) -> dict[str, TensorInfo]:
    """What elements start … stop of a packed weight are decoded from: its parts with their bytes
    cut to size.

    They are given by role: "values", which become bytes, whatever they are stored as, and the
    suffixes of the components beside them. Start is a multiple of 256 blocks; stop is another, or
    the end of the weight.
    """
    first, last = start // blocksize, block_count(stop, blocksize)
    ranges = {
        "values": (start // 2, -(-stop // 2)),
        "absmax": (first, last),
        "nested_absmax": (first // NESTED_BLOCKSIZE, block_count(last, NESTED_BLOCKSIZE)),
    }
    found = dict(parts) | {"values": parts["values"]._replace(dtype="U8")}
    return {
        role: cut_elements(part, *ranges[role]) if role in ranges else part
        for role, part in found.items()
    }


def plain_pieces(tensor: TensorInfo, most: int) -> list[Piece]:
    """A tensor that is stored as it is, in pieces of at most so many elements; an empty one in one
    piece.
    """
    ends = (
        (start, min(start + most, tensor.elements))
        for start in range(0, max(tensor.elements, 1), most)
    )
    return [Piece(cut_elements(tensor, *span), span[0]) for span in ends]


def cut_elements(tensor: TensorInfo, start: int, stop: int) -> TensorInfo:
    """Elements start … stop of a tensor that is stored as it is, flat."""
    bits = DTYPE_BITS[tensor.dtype]
    begin, end = tensor.start + start * bits // 8, tensor.start + -(-stop * bits // 8)
    return tensor._replace(shape=(stop - start,), start=begin, stop=end)


def pieces_alike(
    a: TensorInfo, b: TensorInfo, nbytes: int
) -> Iterator[tuple[int, TensorInfo, TensorInfo]]:
    """Two tensors of one shape, encoded or not, cut at the same places: (first element, piece of A,
    piece of B).

    Two pieces have about so many bytes, unless rows are longer. Both tensors come whole if they
    cannot be cut alike.
    """
    most = nbytes * a.elements // (a.nbytes + b.nbytes)
    if all(
        tensor.encoding is None or tensor.encoding.method is Method.BITSANDBYTES_4BIT
        for tensor in (a, b)
    ):
        a, b = (tensor._replace(shape=(tensor.elements, 1)) for tensor in (a, b))
    elif is_stack_of_matrices(a) and is_stack_of_matrices(b):
        for index in range(a.shape[0]):
            for start, one, other in pieces_alike(matrix_of(a, index), matrix_of(b, index), nbytes):
                yield index * math.prod(a.shape[1:]) + start, one, other
        return
    if not (can_cut_rows(a, 0) and can_cut_rows(b, 0)):
        yield 0, a, b
        return
    columns, together = a.shape[1], math.lcm(_height(a), _height(b))
    step = max(most // (columns * together), 1) * together
    for start in range(0, a.shape[0], step):
        span = start, min(start + step, a.shape[0])
        yield start * columns, rows_of(a, *span), rows_of(b, *span)
