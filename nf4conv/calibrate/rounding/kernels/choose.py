"""Chooses the scales of a group together with the ranks of its weights, in one launch.
calibrate/rounding/steps.py says what is computed.
"""

import functools

import torch
import triton
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
from nf4conv.calibrate.rounding.levels import FINER, Levels, first_candidates
from nf4conv.calibrate.rounding.scales import StorableScales
from nf4conv.codec.kernels.launch import Launcher, kernel

_ROWS = 32  # outputs of a program

_LANES = tl.constexpr(8)  # candidates that a program tries at once

_TURNS = 3  # two for the first 16 candidates, and one for the finer ones

_WARPS = 8

_SCRATCH = 1 << 26  # floats that the errors of candidates may take


def round_group(
    target: torch.Tensor,
    upper: torch.Tensor,
    storable: StorableScales,
    levels: Levels,
    draft: Draft,
    errors: torch.Tensor,
) -> None:
    """Chooses the scales of a group together with the ranks of its weights, as in steps.py."""
    inputs, outputs = target.shape
    device = target.device
    per_program = inputs * _LANES.value * _ROWS
    programs = -(-outputs // _ROWS)
    at_once = min(programs, max(1, _SCRATCH // per_program))
    scratch = target.new_empty(at_once * per_program)
    reciprocal = 1 / upper.diagonal()
    offset, maxima = snapping_tensors(storable, reciprocal)
    for first in range(0, programs, at_once):
        _launch(
            min(at_once, programs - first),
            (
                target,
                upper,
                reciprocal,
                offset,
                maxima,
                candidate_table(levels.is_symmetric, device),
                dynamic_table(device),
                scratch,
                draft.ranks,
                errors,
                draft.scales,
                draft.scale_codes,
                inputs,
                _TURNS,
                first * _ROWS,
                outputs,
                target.stride(0),
                upper.stride(0),
                draft.ranks.stride(0),
                errors.stride(0),
            ),
            (
                level_constants("fp4" if levels.is_symmetric else "nf4"),
                storable.maxima is not None,
                _ROWS,
            ),
            None,
            _WARPS,
        )


@functools.cache
def candidate_table(is_symmetric: bool, device: torch.device) -> torch.Tensor:
    """Returns the factors of scales: 16 of the absmax, then 6 of the best of them, and 2 to fill a
    row: [24] float32.
    """
    factors = (*first_candidates(is_symmetric), *FINER, FINER[-1], FINER[-1])
    return torch.tensor(factors, dtype=torch.float32, device=device)


@kernel
def _choose_kernel(
    target_ptr,
    upper_ptr,
    reciprocal_ptr,
    offset_ptr,
    maxima_ptr,
    candidates_ptr,
    dynamic_ptr,
    scratch_ptr,
    ranks_ptr,
    errors_ptr,
    scales_ptr,
    codes_ptr,
    inputs: tl.int64,
    turns: tl.int64,
    first_output: tl.int64,
    count_outputs: tl.int64,
    target_stride: tl.int64,
    upper_stride: tl.int64,
    ranks_stride: tl.int64,
    errors_stride: tl.int64,
    LEVELS: tl.constexpr,
    NESTED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rounds ROWS outputs of a group with every candidate, then with the best.

    Pointers to tensors:
        target_ptr: [inputs, outputs] float32.
        upper_ptr: [inputs, inputs] float32.
        reciprocal_ptr: [inputs] float32, 1 over the diagonal of upper.
        offset_ptr, maxima_ptr: [outputs] float32, read if NESTED.
        candidates_ptr: [24] float32, of candidate_table.
        dynamic_ptr: [512] float32, of dynamic_table.
        scratch_ptr: [programs, inputs, lanes · ROWS] float32, the errors of candidates.
        ranks_ptr: [inputs, outputs] uint8, written.
        errors_ptr: [inputs, outputs] float32, written.
        scales_ptr: [outputs] float32, written.
        codes_ptr: [outputs] uint8, written.

    Scalars (none is a constexpr, so that nothing is unrolled but the loops over a piece):
        inputs: of the group, a multiple of PIECE.
        turns: 3.
        first_output: of the first program.
        count_outputs: how many there are.
        …_stride: elements from one input to the next.
    """
    program = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, _LANES)
    output = first_output + program * ROWS + row
    mask = output < count_outputs
    places = lane[:, None] * ROWS + row[None, :]
    lane_outputs = output[None, :] + tl.zeros((_LANES, 1), tl.int64)
    lane_mask = lane_outputs < count_outputs
    scratch_ptr += program * inputs * (_LANES * ROWS)

    offset = tl.zeros((ROWS,), tl.float32)
    maximum = tl.zeros((ROWS,), tl.float32)
    if NESTED:
        offset = tl.load(offset_ptr + output, mask=mask, other=0.0)
        maximum = tl.load(maxima_ptr + output, mask=mask, other=0.0)
    base = tl.zeros((ROWS,), tl.float32)
    for j in range(inputs):
        weight = tl.load(target_ptr + j * target_stride + output, mask=mask, other=0.0)
        base = tl.maximum(base, tl.abs(weight))

    best_cost = tl.full((ROWS,), float("inf"), tl.float32)
    best_scale = tl.zeros((ROWS,), tl.float32)
    best_code = tl.zeros((ROWS,), tl.int32)
    for turn in range(turns):
        base = tl.where(turn == turns - 1, best_scale, base)
        factor = tl.load(candidates_ptr + turn * _LANES + lane)
        wanted = factor[:, None] * base[None, :]
        scale, code = snap(wanted, offset[None, :], maximum[None, :], dynamic_ptr, NESTED)
        cost = tl.zeros((_LANES, ROWS), tl.float32)
        for start in range(0, inputs, PIECE):
            cost += _round_piece(
                target_ptr,
                target_stride,
                lane_outputs,
                lane_mask,
                scale,
                upper_ptr,
                upper_stride,
                reciprocal_ptr,
                ranks_ptr,
                ranks_stride,
                scratch_ptr,
                _LANES * ROWS,
                places,
                places >= 0,
                start,
                LEVELS,
                False,
            )
            tl.debug_barrier()
        least = tl.min(cost, axis=0)
        # of equals the first
        winner = tl.min(tl.where(cost == least[None, :], lane[:, None], _LANES), axis=0)
        is_winner = lane[:, None] == winner[None, :]
        is_better = least < best_cost
        found_scale = tl.sum(tl.where(is_winner, scale, 0.0), axis=0)
        found_code = tl.sum(tl.where(is_winner, code, 0), axis=0)
        best_scale = tl.where(is_better, found_scale, best_scale)
        best_code = tl.where(is_better, found_code, best_code)
        best_cost = tl.where(is_better, least, best_cost)

    tl.store(scales_ptr + output, best_scale, mask=mask)
    tl.store(codes_ptr + output, best_code.to(tl.uint8), mask=mask)
    for start in range(0, inputs, PIECE):
        _round_piece(
            target_ptr,
            target_stride,
            output,
            mask,
            best_scale,
            upper_ptr,
            upper_stride,
            reciprocal_ptr,
            ranks_ptr,
            ranks_stride,
            errors_ptr,
            errors_stride,
            output,
            mask,
            start,
            LEVELS,
            True,
        )
        tl.debug_barrier()


_launch = Launcher(_choose_kernel)


@triton.jit
def _round_piece(
    target_ptr,
    target_stride,
    outputs,
    mask,
    scale,
    upper_ptr,
    upper_stride,
    reciprocal_ptr,
    ranks_ptr,
    ranks_stride,
    errors_ptr,
    errors_stride,
    places,
    place_mask,
    start,
    LEVELS: tl.constexpr,
    WRITES: tl.constexpr,
):
    """Rounds PIECE inputs from `start` on, one after the other; each error moves those that follow.

    Args:
        target_ptr: [inputs, …] float32, the group.
        target_stride: elements from one input to the next.
        outputs: where the outputs stand in the target and the ranks.
        mask: of outputs that exist.
        scale: of each output.
        upper_ptr: [inputs, inputs] float32.
        upper_stride: elements from one row to the next.
        reciprocal_ptr: [inputs] float32.
        ranks_ptr: [inputs, …] uint8, written if WRITES.
        ranks_stride: elements from one input to the next.
        errors_ptr: [inputs, …] float32: read before `start`, written from there.
        errors_stride: elements from one input to the next.
        places: where the outputs stand in the errors.
        place_mask: of those that are written.
        start: the first input.
        LEVELS: of level_constants.
        WRITES: store ranks.

    Returns:
        The sum of the squared errors of the piece.
    """
    piece = load_piece(target_ptr + start * target_stride, target_stride, outputs, mask)
    piece = subtract_products(
        piece, errors_ptr, errors_stride, places, place_mask, upper_ptr + start, upper_stride, start
    )
    inverse = inverse_of(scale)
    cost = scale * 0.0
    for j in tl.static_range(PIECE):
        quotient = piece[0] * inverse
        value = nearest_value(quotient, LEVELS) * scale
        error = (piece[0] - value) * tl.load(reciprocal_ptr + start + j)
        cost = tl.fma(error, error, cost)
        if WRITES:
            rank = nearest_rank(quotient, LEVELS).to(tl.uint8)
            tl.store(ranks_ptr + (start + j) * ranks_stride + outputs, rank, mask=mask)
        error_ptrs = errors_ptr + (start + j) * errors_stride + places
        tl.store(error_ptrs, error, mask=place_mask)
        row_ptr = upper_ptr + (start + j) * upper_stride + start
        rest = ()
        for k in tl.static_range(j + 1, PIECE):
            rest = rest + (tl.fma(-error, tl.load(row_ptr + k), piece[k - j]),)
        piece = rest
    return cost
