"""Cuts rows out of an encoded matrix, or a matrix out of a stack of them.

A cut is encoded as the whole is. Encodings whose parts do not lie row by row cannot be
cut. A tensor that an adapter changes can be cut where the tensor below it can.
"""

import math
from dataclasses import replace

from nf4conv.format.codebook import NESTED_BLOCKSIZE
from nf4conv.format.gguf import ROTARY, TRANSPOSED
from nf4conv.sources.encodings.cuts.integer_rows import integer_rows
from nf4conv.sources.encodings.cuts.lines import cut_rows
from nf4conv.sources.encodings.cuts.packed_runs import packed_part
from nf4conv.sources.encodings.types.arranged import (
    Columns,
    Excerpt,
    Joined,
    StackedExperts,
    Strided,
)
from nf4conv.sources.encodings.types.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.encodings.types.gguf import GgufBlocks
from nf4conv.sources.encodings.types.integers import HalfQuadratic, PackedIntegers
from nf4conv.sources.encodings.types.merged import Delta, LowRankDelta, Merged
from nf4conv.sources.encodings.types.scaled import Bitsandbytes8bit, Fp4, Scaled
from nf4conv.sources.encodings.types.ternary import Ternary
from nf4conv.sources.tensors import Encoding, TensorInfo


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
        case Bitsandbytes8bit(is_transposed=True):
            return False
        case GgufBlocks() if encoding.changed not in (None, ROTARY):
            return False
        case Strided() | Joined() | Excerpt() | Columns():
            return False
        case _:
            return start % rows_together(tensor) == 0


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


def rows_together(tensor: TensorInfo) -> int:
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
    if isinstance(encoding, Ternary):
        return replace(encoding, first=encoding.first + start, rows=stop - start)
    if isinstance(encoding, GgufBlocks):
        heads = encoding.heads
        if encoding.changed == ROTARY:
            heads = (stop - start) // rows_together(tensor)
        return replace(encoding, values=cut_rows(encoding.values, start, stop), heads=heads)
    if isinstance(encoding, (Bitsandbytes8bit, Fp4)):
        values = cut_rows(encoding.values, start, stop)
        return replace(encoding, values=values, scale=cut_rows(encoding.scale, start, stop))
    if isinstance(encoding, StackedExperts):
        height = rows_together(tensor)
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
