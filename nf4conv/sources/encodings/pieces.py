"""Cuts tensors into pieces that are read, and decoded, one by one.

A piece is a few rows of a matrix, a matrix of a stack, or some blocks of a 4-bit weight; a piece of
an encoded tensor is encoded as well. Pieces decide how much memory a conversion takes. Encodings
whose parts do not lie row by row cannot be cut: such tensors are taken whole. A tensor that an
adapter changes can be cut where the tensor below it can.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from nf4conv.format.codebook import NESTED_BLOCKSIZE
from nf4conv.format.gguf import ROTARY, TRANSPOSED
from nf4conv.format.layout import block_count
from nf4conv.sources.encodings.integer_rows import integer_rows
from nf4conv.sources.encodings.lines import cut_rows
from nf4conv.sources.encodings.types.arranged import (
    Columns,
    Excerpt,
    Joined,
    StackedExperts,
    Strided,
)
from nf4conv.sources.encodings.types.bitsandbytes import Bitsandbytes4bit, packed_in_order
from nf4conv.sources.encodings.types.gguf import GgufBlocks
from nf4conv.sources.encodings.types.integers import HalfQuadratic, PackedIntegers
from nf4conv.sources.encodings.types.merged import Delta, LowRankDelta, Merged
from nf4conv.sources.encodings.types.scaled import Bitsandbytes8bit, Fp4, Scaled
from nf4conv.sources.tensors import DTYPE_BITS, Encoding, TensorInfo


class Piece(NamedTuple):
    """A run of a tensor's elements."""

    tensor: TensorInfo  # that run, encoded if the tensor is
    start: int  # elements of the whole tensor before it


def encoded_pieces(tensor: TensorInfo, most: int, unit: int = 1) -> Iterator[Piece]:
    """Cuts an encoded tensor into pieces that can be decoded one by one.

    Args:
        tensor: an encoded tensor.
        most: elements of a piece at most, unless a single row has more.
        unit: every piece begins at a multiple of so many elements; only the last one may end
            elsewhere.

    Yields:
        The pieces in order; the whole tensor if it cannot be cut.
    """
    matrix_size = math.prod(tensor.shape[1:])
    if is_stack_of_matrices(tensor) and matrix_size % unit == 0:
        for index in range(tensor.shape[0]):
            for piece, start in encoded_pieces(matrix_of(tensor, index), most, unit):
                yield Piece(piece, index * matrix_size + start)
        return
    for first, last in _row_spans(tensor, most, unit):
        yield Piece(rows_of(tensor, first, last), first * matrix_size)


def is_stack_of_matrices(tensor: TensorInfo) -> bool:
    """Returns True if `matrix_of` can take a matrix out of the tensor."""
    if len(tensor.shape) != 3:
        return False
    match tensor.unmerged.encoding:
        case None | Scaled():
            return True
        case StackedExperts(experts=experts):
            return tensor.shape[0] == len(experts)  # else a convolution
        case Fp4(is_transposed=is_transposed):
            return is_transposed
        case Bitsandbytes4bit(is_transposed=is_transposed):
            return not is_transposed
        case _:
            return False


def matrix_of(tensor: TensorInfo, index: int) -> TensorInfo:
    """Returns one matrix of a stack for which `is_stack_of_matrices` holds."""
    shape = tensor.shape[1:]
    encoding = tensor.encoding
    if encoding is None:
        return cut_rows(tensor, index, index + 1)._replace(shape=shape)
    if isinstance(encoding, Merged):
        deltas = tuple(_delta_of_expert(delta, index) for delta in encoding.deltas)
        merged = Merged(matrix_of(encoding.base, index), deltas, encoding.first_row)
        return tensor._replace(shape=shape, encoding=merged)
    if isinstance(encoding, StackedExperts):
        alone = replace(encoding, experts=encoding.experts[index : index + 1])
        return tensor._replace(shape=shape, encoding=alone)
    if isinstance(encoding, Bitsandbytes4bit):
        return _excerpt(tensor, encoding, index * math.prod(shape), shape)
    if not isinstance(encoding, (Scaled, Fp4)):
        raise AssertionError(f"{tensor.name}: {encoding.name} is no stack of matrices")
    matrices = tensor.shape[0]
    values = _matrix_part(encoding.values, matrices, index)
    if encoding.scale is None:
        return tensor._replace(shape=shape, encoding=replace(encoding, values=values))
    scale = _matrix_part(encoding.scale, matrices, index)
    matrix = replace(encoding, values=values, scale=scale)
    return tensor._replace(shape=shape, encoding=matrix)


def share_parts(tensor: TensorInfo) -> bool:
    """Returns True if pieces of a weight, of which one is given, are decoded from the same bytes.

    Then a single worker takes them all, so that these are read once.
    """
    encoding = tensor.unmerged.encoding
    if not isinstance(encoding, PackedIntegers):
        return False
    is_by_columns = any(isinstance(part.encoding, Columns) for _, part in encoding.parts)
    return is_by_columns or encoding.group_index is not None


def transposed(tensor: TensorInfo) -> TensorInfo | None:
    """Returns the transpose of a matrix, if that is how its parts lie; None for any other."""
    encoding = tensor.encoding
    if len(tensor.shape) != 2:
        return None
    shape = tensor.shape[::-1]
    if isinstance(encoding, Fp4) and encoding.is_transposed:
        return tensor._replace(shape=shape, encoding=replace(encoding, is_transposed=False))
    if isinstance(encoding, GgufBlocks) and encoding.changed == TRANSPOSED:
        return tensor._replace(shape=shape, encoding=replace(encoding, changed=None))
    return None


def _excerpt(
    tensor: TensorInfo, encoding: Bitsandbytes4bit, start: int, shape: tuple[int, ...]
) -> TensorInfo:
    """Cuts a matrix out of a packed stack, whose groups of blocks run over its borders.

    Args:
        tensor: the stack.
        encoding: its encoding.
        start: elements of the stack before the matrix.
        shape: the shape of the matrix.
    """
    together = encoding.blocksize * NESTED_BLOCKSIZE
    first = start - start % together
    stop = start + math.prod(shape)
    last = min(stop + -stop % together, tensor.elements)
    base = packed_part(tensor, first, last)
    return tensor._replace(shape=shape, encoding=Excerpt(base, start - first))


def _delta_of_expert(delta: Delta, expert: int) -> Delta:
    """Returns what a delta of a stack of experts does to one of them."""
    return replace(delta, expert=expert) if isinstance(delta, LowRankDelta) else delta


def _matrix_part(part: TensorInfo, matrices: int, index: int) -> TensorInfo:
    """Cuts what belongs to one matrix out of a part of a stack; all matrices may share the part."""
    if len(part.shape) > 1 and part.shape[0] == matrices:
        part = cut_rows(part, index, index + 1)
    if len(part.shape) == 3:
        part = part._replace(shape=part.shape[1:])
    return part


def can_cut_rows(tensor: TensorInfo, start: int) -> bool:
    """Returns True if `rows_of` can cut the tensor before row `start`."""
    if len(tensor.shape) != 2:
        return False
    encoding = tensor.encoding
    match encoding:
        case None:
            return True
        case Merged():
            return not encoding.needs_all_rows and can_cut_rows(encoding.base, start)
        case Fp4() | PackedIntegers() | Bitsandbytes4bit() if encoding.is_transposed:
            return False
        case GgufBlocks() if encoding.changed not in (None, ROTARY):
            return False
        case Strided() | Joined() | Excerpt() | Columns():
            return False
        case _:
            return start % _rows_together(tensor) == 0


def rows_of(tensor: TensorInfo, start: int, stop: int) -> TensorInfo:
    """Returns rows start … stop of a matrix for which `can_cut_rows` holds.

    All rows of any other tensor can be asked for, too.
    """
    rows = tensor.shape[0] if tensor.shape else 1
    if (start, stop) == (0, rows):
        return tensor
    encoding = tensor.encoding
    if encoding is None:
        return cut_rows(tensor, start, stop)
    shape = (stop - start, *tensor.shape[1:])
    if isinstance(encoding, Bitsandbytes4bit):
        columns = tensor.shape[1]
        return packed_part(tensor, start * columns, stop * columns)._replace(shape=shape)
    return tensor._replace(shape=shape, encoding=_encoded_rows(tensor, encoding, start, stop))


def _encoded_rows(tensor: TensorInfo, encoding: Encoding, start: int, stop: int) -> Encoding:
    """Cuts rows start … stop out of what a tensor is decoded from."""
    if isinstance(encoding, Merged):
        base = rows_of(encoding.base, start, stop)
        return Merged(base, encoding.deltas, encoding.first_row + start)
    if isinstance(encoding, Scaled):
        values = cut_rows(encoding.values, start, stop)
        rows = tensor.shape[0]
        scale = _scale_rows(encoding.scale, encoding, rows, start, stop)
        zero = _scale_rows(encoding.zero, encoding, rows, start, stop)
        return replace(encoding, values=values, scale=scale, zero=zero)
    if isinstance(encoding, PackedIntegers):
        return integer_rows(encoding, start, stop)
    if isinstance(encoding, HalfQuadratic):
        columns = tensor.shape[1]
        first = encoding.first + start * columns
        return replace(encoding, first=first, elements=(stop - start) * columns)
    if isinstance(encoding, GgufBlocks):
        heads = encoding.heads
        if encoding.changed == ROTARY:
            heads = (stop - start) // _rows_together(tensor)
        return replace(encoding, values=cut_rows(encoding.values, start, stop), heads=heads)
    if isinstance(encoding, (Bitsandbytes8bit, Fp4)):
        values = cut_rows(encoding.values, start, stop)
        return replace(encoding, values=values, scale=cut_rows(encoding.scale, start, stop))
    if isinstance(encoding, StackedExperts):
        height = _rows_together(tensor)
        return replace(encoding, experts=encoding.experts[start // height : -(-stop // height)])
    raise AssertionError(f"{tensor.name}: {encoding.name} cannot be cut into rows")


def _scale_rows(
    scale: TensorInfo | None, encoding: Scaled, rows: int, start: int, stop: int
) -> TensorInfo | None:
    """Cuts the scales of rows start … stop out of those of all rows; all rows may share them.

    Args:
        scale: the scales, or what is subtracted before, of as many values; None if there are none.
        encoding: the encoding of the whole tensor.
        rows: how many rows it has.
        start: the first row.
        stop: the row after the last one.
    """
    if scale is None:
        return None
    if encoding.block is not None:
        height, _ = encoding.block
        return cut_rows(scale, start // height, -(-stop // height))
    has_one_per_row = scale.elements > 1 and scale.shape[0] == rows
    return cut_rows(scale, start, stop) if has_one_per_row else scale


def _row_spans(tensor: TensorInfo, most: int, unit: int) -> Iterator[tuple[int, int]]:
    """Yields (first row, last row + 1) of each piece; arguments as of `encoded_pieces`."""
    rows = tensor.shape[0] if tensor.shape else 1
    if not can_cut_rows(tensor, 0):
        yield 0, rows
        return
    columns = max(tensor.shape[1], 1)
    rows_of_unit = unit // math.gcd(unit, columns)
    together = math.lcm(_rows_together(tensor), rows_of_unit)
    step = max(most // (columns * together), 1) * together
    for start in range(0, max(rows, 1), step):
        yield start, min(start + step, rows)


def _rows_together(tensor: TensorInfo) -> int:
    """Returns how many rows of a matrix must stay together, because they share scales, or change
    places in the head that they belong to.
    """
    encoding = tensor.unmerged.encoding
    match encoding:
        case Bitsandbytes4bit():
            elements = encoding.blocksize * NESTED_BLOCKSIZE
            return elements // math.gcd(elements, max(tensor.shape[1], 1))
        case Scaled(block=(height, _)):
            return height
        case PackedIntegers():
            return encoding.rows_together
        case GgufBlocks(changed=changed, heads=heads) if changed == ROTARY:
            return max(tensor.shape[0] // heads, 1)
        case StackedExperts(experts=experts):
            return max(tensor.shape[0] // len(experts), 1)
        case _:
            return 1


def packed_pieces(tensor: TensorInfo, most: int, unit: int = 1) -> list[Piece]:
    """Cuts a weight that bitsandbytes packed into pieces that can be decoded one by one.

    Args:
        tensor: a weight for which `packed_in_order` returns an encoding.
        most: elements of a piece at most, but see `packed_spans`.
        unit: every piece begins at a multiple of so many elements.

    Returns:
        The pieces in order, each of a flat shape; a weight without elements is one piece.
    """
    encoding = packed_in_order(tensor)
    assert encoding is not None
    spans = packed_spans(tensor.elements, encoding.blocksize, most, unit)
    if not spans:
        spans.append((0, 0))
    return [Piece(packed_part(tensor, start, stop), start) for start, stop in spans]


def packed_part(tensor: TensorInfo, start: int, stop: int) -> TensorInfo:
    """Cuts a run of elements out of a weight that bitsandbytes packed.

    Args:
        tensor: a weight for which `packed_in_order` returns an encoding.
        start: the first element, a multiple of 256 blocks.
        stop: the element after the last one, a multiple of 256 blocks or the end of the weight.

    Returns:
        The run, still packed, of shape [stop - start].
    """
    encoding = packed_in_order(tensor)
    assert encoding is not None
    cut = cut_parts(dict(encoding.parts), encoding.blocksize, start, stop)
    run = replace(
        encoding,
        values=cut["values"],
        absmax=cut["absmax"],
        nested_absmax=cut.get("nested_absmax"),
    )
    return tensor._replace(shape=(stop - start,), encoding=run)


def packed_spans(elements: int, blocksize: int, most: int, unit: int = 1) -> list[tuple[int, int]]:
    """Divides the elements of a packed weight into runs that can be decoded one by one.

    Args:
        elements: how many the weight has.
        blocksize: elements that share one absmax.
        most: elements of a run at most; but a run has at least 256 blocks, which share one
            nested_absmax, and at least one unit.
        unit: every run begins at a multiple of so many elements.

    Returns:
        (start, stop) of each run, in elements.
    """
    together = math.lcm(unit, blocksize * NESTED_BLOCKSIZE)
    step = max(most - most % together, together)
    return [(start, min(start + step, elements)) for start in range(0, elements, step)]


def cut_parts(
    parts: Mapping[str, TensorInfo], blocksize: int, start: int, stop: int
) -> dict[str, TensorInfo]:
    """Cuts the parts of a packed weight to what decoding elements start … stop takes.

    Args:
        parts: the tensors of the weight by role: "values", and the suffixes of the components.
        blocksize: elements that share one absmax.
        start: the first element, a multiple of 256 blocks.
        stop: the element after the last one, a multiple of 256 blocks or the end of the weight.

    Returns:
        The parts by role. The values are bytes, whatever dtype they are stored in; the maps and the
        quant state stay whole.
    """
    first_block = start // blocksize
    last_block = block_count(stop, blocksize)
    found = dict(parts)
    found["values"] = cut_elements(parts["values"]._replace(dtype="U8"), start // 2, -(-stop // 2))
    if "absmax" in parts:
        found["absmax"] = cut_elements(parts["absmax"], first_block, last_block)
    if "nested_absmax" in parts:
        found["nested_absmax"] = cut_elements(
            parts["nested_absmax"],
            first_block // NESTED_BLOCKSIZE,
            block_count(last_block, NESTED_BLOCKSIZE),
        )
    return found


def plain_pieces(tensor: TensorInfo, most: int) -> list[Piece]:
    """Cuts a tensor that is stored as it is into pieces of at most `most` elements.

    Returns:
        The pieces in order, each of a flat shape; a tensor without elements is one piece.
    """
    elements = tensor.elements
    pieces = []
    for start in range(0, max(elements, 1), most):
        stop = min(start + most, elements)
        pieces.append(Piece(cut_elements(tensor, start, stop), start))
    return pieces


def cut_elements(tensor: TensorInfo, start: int, stop: int) -> TensorInfo:
    """Returns elements start … stop of a tensor that is stored as it is, in a flat shape."""
    bits = DTYPE_BITS[tensor.dtype]
    return tensor._replace(
        shape=(stop - start,),
        start=tensor.start + start * bits // 8,
        stop=tensor.start + -(-stop * bits // 8),
    )


def pieces_alike(
    a: TensorInfo, b: TensorInfo, nbytes: int
) -> Iterator[tuple[int, TensorInfo, TensorInfo]]:
    """Cuts two tensors of one shape, encoded or not, at the same places.

    Args:
        a: a tensor.
        b: another tensor of the same shape.
        nbytes: about how many bytes two pieces have together, unless a single row has more.

    Yields:
        (first element, piece of A, piece of B). Both tensors come whole if they cannot be cut at
        the same places.
    """
    most = nbytes * a.elements // (a.nbytes + b.nbytes)
    if _is_cut_anywhere(a) and _is_cut_anywhere(b):
        a = a._replace(shape=(a.elements, 1))
        b = b._replace(shape=(b.elements, 1))
    elif is_stack_of_matrices(a) and is_stack_of_matrices(b):
        matrix_size = math.prod(a.shape[1:])
        for index in range(a.shape[0]):
            pairs = pieces_alike(matrix_of(a, index), matrix_of(b, index), nbytes)
            for start, piece_of_a, piece_of_b in pairs:
                yield index * matrix_size + start, piece_of_a, piece_of_b
        return
    if not (can_cut_rows(a, 0) and can_cut_rows(b, 0)):
        yield 0, a, b
        return
    rows, columns = a.shape
    together = math.lcm(_rows_together(a), _rows_together(b))
    step = max(most // (columns * together), 1) * together
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield start * columns, rows_of(a, start, stop), rows_of(b, start, stop)


def _is_cut_anywhere(tensor: TensorInfo) -> bool:
    """Returns True if cuts follow the flat order of a tensor's elements, whatever its shape."""
    return tensor.encoding is None or packed_in_order(tensor) is not None
