"""Holds inputs of a group in registers, and finds levels and scales, for all kernels of rounding.

Weights are transposed here, [inputs, outputs]. Outputs are independent of each other: each thread
has its own. PIECE inputs of a group are a tuple of tensors, and loops over them are unrolled, so
nothing is gathered or reduced across threads. The errors of pieces before are read back from
memory. (The time to compile grows with the square of a piece: 64 inputs would take minutes.)
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from nf4conv.calibrate.rounding.draft import Draft
from nf4conv.calibrate.rounding.levels import INFINITY, ascending
from nf4conv.codec.kernels.arithmetic import SMALLEST_NORMAL
from nf4conv.codec.reference.quantize import dynamic_cuts
from nf4conv.format.codebook import DYNAMIC_MAP

PIECE = tl.constexpr(8)

_NEVER = 3e38  # no quotient is above this


def level_constants(quant_type: str) -> tuple[float, ...]:
    """Returns the 16 values and the 15 cuts of a data type, for the constexpr LEVELS."""
    values, cuts, _ = ascending(quant_type)
    finite = [_NEVER if cut == INFINITY else cut for cut in cuts]
    return (*values, *finite)


class Pointers(NamedTuple):
    """Gives kernels the tensors of a Draft of one group.

    Attributes:
        ranks: [inputs, outputs] uint8.
        scales: [outputs] float32.
        scale_codes: [outputs] uint8.
        offset: [outputs] float32; without double quantization others stand in its place, unread.
        maxima: [outputs] float32, likewise.
    """

    ranks: Any
    scales: Any
    scale_codes: Any
    offset: Any
    maxima: Any

    @classmethod
    def of(cls, draft: Draft) -> "Pointers":
        """Returns the tensors of a draft whose outputs stand one behind the other."""
        assert draft.ranks.is_contiguous()
        offset = draft.scales
        maxima = draft.scales
        if draft.offset is not None and draft.maxima is not None:
            offset = draft.offset
            maxima = draft.maxima
        return cls(draft.ranks, draft.scales, draft.scale_codes, offset, maxima)

    def addresses(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self)


@triton.jit
def load_snapping(draft, output, mask, NESTED: tl.constexpr):
    """Returns offsets and maxima of outputs, for `snap`; zeros without double quantization."""
    offset = output * 0.0
    maximum = output * 0.0
    if NESTED:
        offset = tl.load(draft.offset + output, mask=mask, other=0.0)
        maximum = tl.load(draft.maxima + output, mask=mask, other=0.0)
    return offset, maximum


@triton.jit
def load_piece(rows, start):
    """Returns PIECE inputs from `start` on, a tuple of tensors like the outputs.

    rows: where they are in memory: a pointer to [inputs, …] float32, elements from one input to the
        next, the numbers of the outputs, and a mask of those that exist.
    """
    base_ptr, stride, outputs, mask = rows
    piece = ()
    for j in tl.static_range(PIECE):
        at = base_ptr + (start + j) * stride + outputs
        piece = piece + (tl.load(at, mask=mask, other=0.0),)
    return piece


@triton.jit
def subtract_products(piece, rows, matrix_ptr, matrix_stride, count):
    """Returns a piece minus what `count` inputs take from it: Σ factors[j] · matrix[j, piece].

    Args:
        piece: PIECE tensors.
        rows: where the factors are in memory, as for `load_piece`.
        matrix_ptr: [count, PIECE] float32.
        matrix_stride: elements from one of its rows to the next.
        count: the number of inputs.
    """
    factors_ptr, factors_stride, outputs, mask = rows
    for j in range(count):
        factor = tl.load(factors_ptr + j * factors_stride + outputs, mask=mask, other=0.0)
        row_ptr = matrix_ptr + j * matrix_stride
        piece = move_rest(piece, factor, row_ptr, 0)
    return piece


@triton.jit
def move_rest(piece, factor, row_ptr, FIRST: tl.constexpr):
    """Returns the last inputs of a piece, minus the products of a factor with a row of a matrix.

    Args:
        piece: tensors, of which the last stand for the last of PIECE inputs.
        factor: like each of them.
        row_ptr: [PIECE] float32.
        FIRST: the first of PIECE inputs that is returned.
    """
    rest = ()
    for k in tl.static_range(FIRST, PIECE):
        moved = tl.fma(-factor, tl.load(row_ptr + k), piece[k - PIECE + len(piece)])
        rest = rest + (moved,)
    return rest


@triton.jit
def nearest_value(quotient, LEVELS: tl.constexpr):
    """Returns the value of the level nearest to each quotient.

    It is a tree of choices: the last one depends on the middle cut.
    """
    values = ()
    for k in tl.static_range(8):
        is_upper = quotient > LEVELS[16 + 2 * k]
        values = values + (tl.where(is_upper, LEVELS[2 * k + 1], LEVELS[2 * k]),)
    values = halve(quotient, values, LEVELS, 17, 4)
    values = halve(quotient, values, LEVELS, 19, 8)
    return halve(quotient, values, LEVELS, 23, 16)[0]


@triton.jit
def halve(quotient, values, LEVELS: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr):
    """Returns of each pair of values the one on the quotient's side of a cut.

    The cuts are every STEP-th of LEVELS from the FIRST on.
    """
    halved = ()
    for k in tl.static_range(16 // STEP):
        is_upper = quotient > LEVELS[FIRST + STEP * k]
        halved = halved + (tl.where(is_upper, values[2 * k + 1], values[2 * k]),)
    return halved


@triton.jit
def nearest_rank(quotient, LEVELS: tl.constexpr):
    """Returns the number of cuts below each quotient, int32."""
    rank = (quotient > LEVELS[16]).to(tl.int32)
    for k in tl.static_range(14):
        rank += (quotient > LEVELS[17 + k]).to(tl.int32)
    return rank


@triton.jit
def inverse_of(scale):
    """Returns 1 / scale, and 0 for a scale of 0."""
    return tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale)))


@functools.cache
def dynamic_table(device: torch.device) -> torch.Tensor:
    """Returns the 256 values of the dynamic map and the 255 cuts between, [512] float32."""
    values = torch.tensor(DYNAMIC_MAP, dtype=torch.float32, device=device)
    end = values.new_full((1,), float("inf"))
    return torch.cat([values, dynamic_cuts(device), end])


@triton.jit
def snap(wanted, offset, maximum, table_ptr, NESTED: tl.constexpr):
    """Returns the nearest storable scales, and their codes as int32.

    Args:
        wanted: float32, of any shape.
        offset: of the same shape.
        maximum: of the same shape, the nested absmax.
        table_ptr: [512] float32, of dynamic_table.
        NESTED: scales are quantized; else they stay as they are.
    """
    code = (wanted * 0.0).to(tl.int32)
    scale = wanted
    if NESTED:
        quotient = tl.div_rn(wanted - offset, tl.where(maximum > 0.0, maximum, 1.0))
        for level in tl.static_range(8):
            cut = tl.load(table_ptr + 256 + code + (127 >> level))
            code += tl.where(quotient > cut, 128 >> level, 0)
        product = tl.load(table_ptr + code) * maximum
        product = tl.where(tl.abs(product) < SMALLEST_NORMAL, 0.0, product)
        scale = product + offset
    return scale, code
