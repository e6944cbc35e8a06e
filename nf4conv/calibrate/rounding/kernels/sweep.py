"""Improves the scale of a group, then its ranks, in one launch.

calibrate/rounding/steps.py says what is computed.
"""

import torch
import triton.language as tl

from nf4conv.calibrate.rounding.draft import Draft
from nf4conv.calibrate.rounding.kernels.columns import (
    PIECE,
    dynamic_table,
    inverse_of,
    level_constants,
    load_piece,
    nearest_rank,
    nearest_value,
    snap,
    snapping_tensors,
    subtract_products,
)
from nf4conv.calibrate.rounding.levels import Levels
from nf4conv.calibrate.rounding.scales import StorableScales
from nf4conv.codec.kernels.launch import Launcher, kernel

_ROWS = 32  # outputs of a program

_WARPS = 1


def sweep_group(
    draft: Draft,
    gradient: torch.Tensor,
    moments: torch.Tensor,
    storable: StorableScales,
    levels: Levels,
    change: torch.Tensor,
) -> None:
    """Improves the scales of a group, then its ranks one input after the other, as in steps.py."""
    inputs, outputs = gradient.shape
    reciprocal = 1 / moments.diagonal()
    offset, maxima = snapping_tensors(storable, reciprocal)
    _launch(
        -(-outputs // _ROWS),
        (
            gradient,
            moments,
            reciprocal,
            offset,
            maxima,
            levels.values,
            dynamic_table(gradient.device),
            torch.empty_like(gradient),
            draft.ranks,
            draft.scales,
            draft.scale_codes,
            change,
            inputs,
            outputs,
            gradient.stride(0),
            moments.stride(0),
            draft.ranks.stride(0),
            change.stride(0),
        ),
        (
            level_constants("fp4" if levels.is_symmetric else "nf4"),
            storable.maxima is not None,
            _ROWS,
        ),
        None,
        _WARPS,
    )


@kernel
def _sweep_kernel(
    gradient_ptr,
    moments_ptr,
    reciprocal_ptr,
    offset_ptr,
    maxima_ptr,
    values_ptr,
    dynamic_ptr,
    scratch_ptr,
    ranks_ptr,
    scales_ptr,
    codes_ptr,
    change_ptr,
    inputs: tl.int64,
    outputs: tl.int64,
    gradient_stride: tl.int64,
    moments_stride: tl.int64,
    ranks_stride: tl.int64,
    change_stride: tl.int64,
    LEVELS: tl.constexpr,
    NESTED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Refits the scales of ROWS outputs of a group, then moves its weights to the best levels.

    Pointers to tensors:
        gradient_ptr: [inputs, outputs] float32.
        moments_ptr: [inputs, inputs] float32.
        reciprocal_ptr: [inputs] float32, 1 over the diagonal of moments.
        offset_ptr, maxima_ptr: [outputs] float32, read if NESTED.
        values_ptr: [16] float32, the levels.
        dynamic_ptr: [512] float32, of dynamic_table.
        scratch_ptr: [inputs, outputs] float32: H·v, then the moves of the weights.
        ranks_ptr: [inputs, outputs] uint8, replaced.
        scales_ptr: [outputs] float32, replaced.
        codes_ptr: [outputs] uint8, replaced.
        change_ptr: [inputs, outputs] float32, written.

    Scalars (none is a constexpr, so that nothing is unrolled but the loops over a piece):
        inputs: of the group, a multiple of PIECE.
        outputs: how many there are.
        …_stride: elements from one input to the next.
    """
    output = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = output < outputs
    before = tl.load(scales_ptr + output, mask=mask, other=0.0)
    offset = before * 0.0
    maximum = before * 0.0
    if NESTED:
        offset = tl.load(offset_ptr + output, mask=mask, other=0.0)
        maximum = tl.load(maxima_ptr + output, mask=mask, other=0.0)

    # change holds the levels meanwhile
    for row in range(inputs):
        rank = tl.load(ranks_ptr + row * ranks_stride + output, mask=mask, other=0)
        level = tl.load(values_ptr + rank.to(tl.int32))
        tl.store(change_ptr + row * change_stride + output, level, mask=mask)
    tl.debug_barrier()

    slope = before * 0.0
    curvature = before * 0.0
    for start in range(0, inputs, PIECE):
        product = ()
        for _ in tl.static_range(PIECE):
            product = product + (before * 0.0,)
        product = subtract_products(
            product,
            change_ptr,
            change_stride,
            output,
            mask,
            moments_ptr + start,
            moments_stride,
            inputs,
        )
        for j in tl.static_range(PIECE):
            level = tl.load(change_ptr + (start + j) * change_stride + output, mask=mask, other=0.0)
            at = (start + j) * gradient_stride + output
            slope = tl.fma(level, tl.load(gradient_ptr + at, mask=mask, other=0.0), slope)
            curvature = tl.fma(level, -product[j], curvature)
            tl.store(scratch_ptr + at, -product[j], mask=mask)
    tl.debug_barrier()

    is_curved = curvature > 0.0
    step = tl.where(is_curved, tl.div_rn(slope, tl.where(is_curved, curvature, 1.0)), 0.0)
    scale, code = snap(before + step, offset, maximum, dynamic_ptr, NESTED)
    tl.store(scales_ptr + output, scale, mask=mask)
    tl.store(codes_ptr + output, code.to(tl.uint8), mask=mask)

    growth = scale - before
    inverse = inverse_of(scale)
    for start in range(0, inputs, PIECE):
        first = start * gradient_stride
        piece = load_piece(gradient_ptr + first, gradient_stride, output, mask)
        product = load_piece(scratch_ptr + first, gradient_stride, output, mask)
        moved = ()
        for j in tl.static_range(PIECE):
            moved = moved + (tl.fma(-growth, product[j], piece[j]),)
        piece = subtract_products(
            moved,
            scratch_ptr,
            gradient_stride,
            output,
            mask,
            moments_ptr + start,
            moments_stride,
            start,
        )
        for j in tl.static_range(PIECE):
            change_ptrs = change_ptr + (start + j) * change_stride + output
            level = tl.load(change_ptrs, mask=mask, other=0.0)
            value = level * scale
            wanted = tl.fma(piece[0], tl.load(reciprocal_ptr + start + j), value)
            quotient = wanted * inverse
            rank = nearest_rank(quotient, LEVELS).to(tl.uint8)
            tl.store(ranks_ptr + (start + j) * ranks_stride + output, rank, mask=mask)
            found = nearest_value(quotient, LEVELS) * scale
            move = found - value
            tl.store(scratch_ptr + (start + j) * gradient_stride + output, move, mask=mask)
            tl.store(change_ptrs, found - level * before, mask=mask)
            row_ptr = moments_ptr + (start + j) * moments_stride + start
            rest = ()
            for k in tl.static_range(j + 1, PIECE):
                rest = rest + (tl.fma(-move, tl.load(row_ptr + k), piece[k - j]),)
            piece = rest
        tl.debug_barrier()


_launch = Launcher(_sweep_kernel)
