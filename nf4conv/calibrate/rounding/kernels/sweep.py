"""Improves the scale of a group, then its ranks, in one launch.

calibrate/rounding/steps.py says what is computed.
"""

import torch
import triton.language as tl

from nf4conv.calibrate.rounding.draft import Draft
from nf4conv.calibrate.rounding.kernels.columns import (
    PIECE,
    Pointers,
    dynamic_table,
    inverse_of,
    level_constants,
    load_piece,
    load_snapping,
    move_rest,
    nearest_rank,
    nearest_value,
    snap,
    subtract_products,
)
from nf4conv.codec.kernels.launch import Launcher, kernel

_ROWS = 32  # outputs of a program

_WARPS = 1


def sweep_group(
    draft: Draft, gradient: torch.Tensor, moments: torch.Tensor, change: torch.Tensor
) -> None:
    """Improves the scales of a group, then its ranks one input after the other, as in steps.py."""
    assert gradient.is_contiguous()
    assert change.is_contiguous()
    inputs, outputs = gradient.shape
    levels = draft.levels
    _launch(
        -(-outputs // _ROWS),
        (
            gradient,
            moments,
            1 / moments.diagonal(),
            levels.values,
            dynamic_table(gradient.device),
            torch.empty_like(gradient),
            change,
            Pointers.of(draft),
            inputs,
            outputs,
            moments.stride(0),
        ),
        (level_constants(levels.quant_type), draft.maxima is not None, _ROWS),
        None,
        _WARPS,
    )


@kernel
def _sweep_kernel(
    gradient_ptr,
    moments_ptr,
    reciprocal_ptr,
    values_ptr,
    dynamic_ptr,
    scratch_ptr,
    change_ptr,
    draft,
    inputs: tl.int64,
    outputs: tl.int64,
    moments_stride: tl.int64,
    LEVELS: tl.constexpr,
    NESTED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Refits the scales of ROWS outputs of a group, then moves its weights to the best levels.

    draft: Pointers, replaced; its offset and maxima are read if NESTED.

    Pointers to tensors:
        gradient_ptr: [inputs, outputs] float32.
        moments_ptr: [inputs, inputs] float32.
        reciprocal_ptr: [inputs] float32, 1 over the diagonal of moments.
        values_ptr: [16] float32, the levels.
        dynamic_ptr: [512] float32, of dynamic_table.
        scratch_ptr: [inputs, outputs] float32: H·v, then the moves of the weights.
        change_ptr: [inputs, outputs] float32, written.

    Scalars (none is a constexpr, so that nothing is unrolled but the loops over a piece):
        inputs: of the group, a multiple of PIECE.
        outputs: how many there are.
        moments_stride: elements from one row of moments to the next.
    """
    output = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = output < outputs
    before = tl.load(draft.scales + output, mask=mask, other=0.0)
    offset, maximum = load_snapping(draft, output, mask, NESTED)
    gradients = (gradient_ptr, outputs, output, mask)
    products = (scratch_ptr, outputs, output, mask)
    levels = (change_ptr, outputs, output, mask)

    # change holds the levels meanwhile
    for row in range(inputs):
        at = row * outputs + output
        rank = tl.load(draft.ranks + at, mask=mask, other=0)
        level = tl.load(values_ptr + rank.to(tl.int32))
        tl.store(change_ptr + at, level, mask=mask)
    tl.debug_barrier()

    slope = before * 0.0
    curvature = before * 0.0
    for start in range(0, inputs, PIECE):
        product = ()
        for _ in tl.static_range(PIECE):
            product = product + (before * 0.0,)
        column_ptr = moments_ptr + start
        product = subtract_products(product, levels, column_ptr, moments_stride, inputs)
        for j in tl.static_range(PIECE):
            at = (start + j) * outputs + output
            level = tl.load(change_ptr + at, mask=mask, other=0.0)
            slope = tl.fma(level, tl.load(gradient_ptr + at, mask=mask, other=0.0), slope)
            curvature = tl.fma(level, -product[j], curvature)
            tl.store(scratch_ptr + at, -product[j], mask=mask)
    tl.debug_barrier()

    is_curved = curvature > 0.0
    step = tl.where(is_curved, tl.div_rn(slope, tl.where(is_curved, curvature, 1.0)), 0.0)
    scale, code = snap(before + step, offset, maximum, dynamic_ptr, NESTED)
    tl.store(draft.scales + output, scale, mask=mask)
    tl.store(draft.scale_codes + output, code.to(tl.uint8), mask=mask)

    growth = scale - before
    inverse = inverse_of(scale)
    for start in range(0, inputs, PIECE):
        piece = load_piece(gradients, start)
        product = load_piece(products, start)
        moved = ()
        for j in tl.static_range(PIECE):
            moved = moved + (tl.fma(-growth, product[j], piece[j]),)
        piece = subtract_products(moved, products, moments_ptr + start, moments_stride, start)
        for j in tl.static_range(PIECE):
            at = (start + j) * outputs + output
            level = tl.load(change_ptr + at, mask=mask, other=0.0)
            value = level * scale
            wanted = tl.fma(piece[0], tl.load(reciprocal_ptr + start + j), value)
            quotient = wanted * inverse
            rank = nearest_rank(quotient, LEVELS).to(tl.uint8)
            tl.store(draft.ranks + at, rank, mask=mask)
            found = nearest_value(quotient, LEVELS) * scale
            move = found - value
            tl.store(scratch_ptr + at, move, mask=mask)
            tl.store(change_ptr + at, found - level * before, mask=mask)
            row_ptr = moments_ptr + (start + j) * moments_stride + start
            piece = move_rest(piece, move, row_ptr, j + 1)
        tl.debug_barrier()


_launch = Launcher(_sweep_kernel)
