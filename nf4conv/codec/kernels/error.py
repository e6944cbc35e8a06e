"""Compares a weight with its packed form: one pass over both; the decoded weight is never written.

A program walks over TILES tiles and writes one partial result of each kind; torch adds the partials
up, in float64 and in a fixed order, so a result is the same from run to run. Squares are taken and
summed in float64: no weight is too small or too large for its square, and 2^31 of them add up with
15 digits.
"""

import torch
import triton.language as tl

from nf4conv.codec.error_sums import NESTED_ERROR, SMALLEST_NORMAL
from nf4conv.codec.kernels.arithmetic import lookup, multiply
from nf4conv.codec.kernels.decoding.dequantize import load_absmax
from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.codec.kernels.slots import (
    access,
    by_slot,
    configuration,
    halves,
    load_packed,
    load_words,
)
from nf4conv.codec.kernels.tables import bound_table, value_table
from nf4conv.codec.quant_state import Decoding

CONFIGURATIONS = {2: (256, 4), 4: (256, 4)}
"""By bytes of an element of the weight, slots and warps of a program."""

TILES = tl.constexpr(8)  # of a program


def error_sums(weight: torch.Tensor, packed: torch.Tensor, decoding: Decoding) -> torch.Tensor:
    """Compares a weight with its packed form, as `reference.error_sums` does."""
    quant_type = decoding.quant_type
    blocksize = decoding.blocksize
    n = weight.numel()
    device = weight.device
    tile, num_warps = configuration(weight.dtype, blocksize, CONFIGURATIONS)
    programs = -(-n // (tile * TILES.value))
    peaks = torch.zeros((2, programs), dtype=torch.float32, device=device)
    squares = torch.zeros((2, programs), dtype=torch.float64, device=device)
    outside = torch.zeros(programs, dtype=torch.int64, device=device)
    touched = access(n, weight.dtype, tile, weight.data_ptr(), packed.data_ptr())
    if n:
        _launch(
            programs,
            (
                weight,
                packed,
                *decoding.pointers(),
                value_table(quant_type, device),
                bound_table(quant_type, decoding.scales, device),
                peaks,
                squares,
                outside,
                n,
                programs,
            ),
            (blocksize, tile, touched, weight.is_cuda),
            (weight.dtype, decoding.offset is None),
            num_warps,
        )
    largest = peaks.amax(1) if n else peaks.new_zeros(2)
    return torch.cat([squares.sum(1), largest.double(), outside.sum().double().view(1)])


_NESTED_ERROR = tl.constexpr(NESTED_ERROR)
_SMALLEST_NORMAL = tl.constexpr(SMALLEST_NORMAL)


@kernel
def error_kernel(
    weight_ptr,
    packed_ptr,
    absmax_ptr,
    nested_code_ptr,
    nested_absmax_ptr,
    offset_ptr,
    value_ptr,
    bound_ptr,
    peaks_ptr,
    squares_ptr,
    outside_ptr,
    n: tl.int64,
    programs: tl.int64,
    BLOCKSIZE: tl.constexpr,
    TILE: tl.constexpr,
    ACCESS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Compares TILES tiles of a weight with its packed form.

    Pointers to tensors:
        weight_ptr: [n] float32, float16 or bfloat16.
        packed_ptr: [ceil(n / 2)] uint8.
        absmax_ptr: [ceil(n / BLOCKSIZE)] float32, or uint8 if it is nested.
        nested_code_ptr, nested_absmax_ptr, offset_ptr: [256], [ceil(blocks / 256)], [1] float32;
            read if absmax is nested.
        value_ptr, bound_ptr: [32] int32, tables.value_table and tables.bound_table.
        peaks_ptr: [2, programs] float32, written: the largest error, and that relative to absmax.
        squares_ptr: [2, programs] float64, written: of errors, and of weights.
        outside_ptr: [programs] int64, written: values beyond the format's worst case.
    """
    DTYPE: tl.constexpr = weight_ptr.dtype.element_ty
    SLOT: tl.constexpr = 4 if DTYPE == tl.float32 else 8
    SLOTS: tl.constexpr = TILE // SLOT
    BLOCKS: tl.constexpr = TILE // BLOCKSIZE
    state = (absmax_ptr, nested_code_ptr, nested_absmax_ptr, offset_ptr)
    program = tl.program_id(0)
    largest = tl.zeros((BLOCKS,), tl.float32)
    relative = tl.zeros((BLOCKS,), tl.float32)
    squared_error = tl.zeros((SLOTS, SLOT // 2), tl.float64)
    squared_weight = tl.zeros((SLOTS, SLOT // 2), tl.float64)
    outside = tl.zeros((SLOTS,), tl.int32)
    for step in range(TILES):
        tile = program.to(tl.int64) * TILES + step
        count = tl.maximum(tl.minimum(n - tile * TILE, TILE), 0).to(tl.int32)
        if count > 0:
            words = load_words(weight_ptr + tile * TILE, count, DTYPE, SLOT, SLOTS, ACCESS)
            even, odd = halves(words, DTYPE)
            codes = load_packed(packed_ptr + tile * (TILE // 2), count, SLOT, SLOTS, ACCESS)
            absmax, moved = load_absmax(state, tile * BLOCKS, count, BLOCKSIZE, BLOCKS, ACCESS, PTX)
            # of a slot: the absmax of its block, and how far nesting may have moved it
            scale = by_slot(absmax, SLOTS)
            moved = by_slot(moved, SLOTS) * _NESTED_ERROR
            peak = tl.zeros((SLOTS,), tl.float32)
            for parity in tl.static_range(2):
                shift = tl.arange(0, SLOT // 2)[None, :] * 8 + (4 - 4 * parity)
                slot_start = tl.arange(0, SLOTS)[:, None] * SLOT
                index = slot_start + tl.arange(0, SLOT // 2)[None, :] * 2 + parity
                weight = even if parity == 0 else odd
                code = codes[:, None] >> shift
                value = lookup(value_ptr, code, PTX).to(tl.float32, bitcast=True)
                half_gap = lookup(bound_ptr, code, PTX).to(tl.float32, bitcast=True)
                decoded = multiply(value, tl.broadcast_to(scale[:, None], value.shape), PTX)
                # masked elements are zeros already
                error = tl.abs(tl.where(index < count, weight - decoded, 0.0))
                bound = half_gap * (tl.abs(scale) + moved)[:, None] + tl.abs(value) * moved[:, None]
                inside = (error <= bound + _SMALLEST_NORMAL) & (error < float("inf"))
                outside += tl.sum(tl.where(inside, 0, 1), axis=1)
                peak = tl.maximum(peak, tl.max(tl.where(error != error, 0.0, error), axis=1))
                wide_error = error.to(tl.float64)
                squared_error = tl.fma(wide_error, wide_error, squared_error)
                wide_weight = weight.to(tl.float64)
                squared_weight = tl.fma(wide_weight, wide_weight, squared_weight)
            peak = tl.max(tl.reshape(peak, (BLOCKS, BLOCKSIZE // SLOT)), axis=1)
            largest = tl.maximum(largest, peak)
            relative_peak = tl.where(absmax != 0.0, tl.abs(tl.div_rn(peak, absmax)), 0.0)
            relative = tl.maximum(relative, relative_peak)
    tl.store(peaks_ptr + program, tl.max(largest, axis=0))
    tl.store(peaks_ptr + programs + program, tl.max(relative, axis=0))
    tl.store(squares_ptr + program, tl.sum(tl.sum(squared_error, axis=1), axis=0))
    tl.store(squares_ptr + programs + program, tl.sum(tl.sum(squared_weight, axis=1), axis=0))
    tl.store(outside_ptr + program, tl.sum(outside.to(tl.int64), axis=0))


_launch = Launcher(error_kernel)
