"""Holds inputs of a group in registers, and finds levels and scales, for all kernels of rounding.

Weights are transposed here, [inputs, outputs]. Outputs are independent of each other: each thread
has its own. PIECE inputs of a group are a tuple of tensors, and loops over them are unrolled, so
nothing is gathered or reduced across threads. The errors of pieces before are read back from
memory. (The time to compile grows with the square of a piece: 64 inputs would take minutes.)
"""

import functools

import torch
import triton
import triton.language as tl

from nf4conv.calibrate.rounding.levels import INFINITY, ascending
from nf4conv.calibrate.rounding.scales import StorableScales
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


@triton.jit
def load_piece(base_ptr, stride, outputs, mask):
    """Returns PIECE inputs, a tuple of tensors like `outputs`.

    Args:
        base_ptr: [PIECE, …] float32.
        stride: elements from one input to the next.
        outputs: the numbers of the outputs.
        mask: of outputs that exist.
    """
    piece = ()
    for j in tl.static_range(PIECE):
        piece = piece + (tl.load(base_ptr + j * stride + outputs, mask=mask, other=0.0),)
    return piece


@triton.jit
def subtract_products(
    piece, factors_ptr, factors_stride, outputs, mask, matrix_ptr, matrix_stride, count
):
    """Returns a piece minus what `count` inputs take from it: Σ factors[j] · matrix[j, piece].

    Args:
        piece: PIECE tensors.
        factors_ptr: [count, …] float32.
        factors_stride: elements from one input to the next.
        outputs: where the factors of the outputs stand.
        mask: of outputs that exist.
        matrix_ptr: [count, PIECE] float32.
        matrix_stride: elements from one of its rows to the next.
        count: the number of inputs.
    """
    for j in range(count):
        factor = tl.load(factors_ptr + j * factors_stride + outputs, mask=mask, other=0.0)
        row_ptr = matrix_ptr + j * matrix_stride
        changed = ()
        for k in tl.static_range(PIECE):
            changed = changed + (tl.fma(-factor, tl.load(row_ptr + k), piece[k]),)
        piece = changed
    return piece


@triton.jit
def nearest_value(quotient, LEVELS: tl.constexpr):
    """Returns the value of the level nearest to each quotient.

    It is a tree of choices: the last one depends on the middle cut.
    """
    pair0 = tl.where(quotient > LEVELS[16], LEVELS[1], LEVELS[0])
    pair1 = tl.where(quotient > LEVELS[18], LEVELS[3], LEVELS[2])
    pair2 = tl.where(quotient > LEVELS[20], LEVELS[5], LEVELS[4])
    pair3 = tl.where(quotient > LEVELS[22], LEVELS[7], LEVELS[6])
    pair4 = tl.where(quotient > LEVELS[24], LEVELS[9], LEVELS[8])
    pair5 = tl.where(quotient > LEVELS[26], LEVELS[11], LEVELS[10])
    pair6 = tl.where(quotient > LEVELS[28], LEVELS[13], LEVELS[12])
    pair7 = tl.where(quotient > LEVELS[30], LEVELS[15], LEVELS[14])
    four0 = tl.where(quotient > LEVELS[17], pair1, pair0)
    four1 = tl.where(quotient > LEVELS[21], pair3, pair2)
    four2 = tl.where(quotient > LEVELS[25], pair5, pair4)
    four3 = tl.where(quotient > LEVELS[29], pair7, pair6)
    eight0 = tl.where(quotient > LEVELS[19], four1, four0)
    eight1 = tl.where(quotient > LEVELS[27], four3, four2)
    return tl.where(quotient > LEVELS[23], eight1, eight0)


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


def snapping_tensors(storable: StorableScales, any_float: torch.Tensor):
    """Returns the offsets and the maxima of one group, [outputs] float32 each.

    Without double quantization `any_float` stands in their place, and kernels do not read it.
    """
    if storable.offset is None or storable.maxima is None:
        return any_float, any_float
    return storable.offset, storable.maxima


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
