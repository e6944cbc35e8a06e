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
from nf4conv.calibrate.rounding.levels import FINER, first_candidates
from nf4conv.codec.kernels.launch import Launcher, kernel

_ROWS = 32  # outputs of a program

_LANES = tl.constexpr(8)  # candidates that a program tries at once

_TURNS = 3  # two for the first 16 candidates, and one for the finer ones

_WARPS = 8

_SCRATCH = 1 << 26  # floats that the errors of candidates may take


def round_group(
    draft: Draft, target: torch.Tensor, upper: torch.Tensor, errors: torch.Tensor
) -> None:
    """Chooses the scales of a group together with the ranks of its weights, as in steps.py."""
    assert target.is_contiguous()
    assert errors.is_contiguous()
    inputs, outputs = target.shape
    device = target.device
    per_program = inputs * _LANES.value * _ROWS
    programs = -(-outputs // _ROWS)
    at_once = min(programs, max(1, _SCRATCH // per_program))
    scratch = target.new_empty(at_once * per_program)
    quant_type = draft.levels.quant_type
    for first in range(0, programs, at_once):
        _launch(
            min(at_once, programs - first),
            (
                target,
                upper,
                1 / upper.diagonal(),
                candidate_table(quant_type, device),
                dynamic_table(device),
                scratch,
                errors,
                Pointers.of(draft),
                inputs,
                _TURNS,
                first * _ROWS,
                outputs,
                upper.stride(0),
            ),
            (level_constants(quant_type), draft.maxima is not None, _ROWS),
            None,
            _WARPS,
        )


@functools.cache
def candidate_table(quant_type: str, device: torch.device) -> torch.Tensor:
    """Returns the factors of scales: 16 of the absmax, then 6 of the best of them, and 2 to fill a
    row: [24] float32.
    """
    factors = (*first_candidates(quant_type), *FINER, FINER[-1], FINER[-1])
    return torch.tensor(factors, dtype=torch.float32, device=device)


@kernel
def _choose_kernel(
    target_ptr,
    upper_ptr,
    reciprocal_ptr,
    candidates_ptr,
    dynamic_ptr,
    scratch_ptr,
    errors_ptr,
    draft,
    inputs: tl.int64,
    turns: tl.int64,
    first_output: tl.int64,
    outputs: tl.int64,
    upper_stride: tl.int64,
    LEVELS: tl.constexpr,
    NESTED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rounds ROWS outputs of a group with every candidate, then with the best.

    draft: Pointers, written; its offset and maxima are read if NESTED.

    Pointers to tensors:
        target_ptr: [inputs, outputs] float32.
        upper_ptr: [inputs, inputs] float32.
        reciprocal_ptr: [inputs] float32, 1 over the diagonal of upper.
        candidates_ptr: [24] float32, of candidate_table.
        dynamic_ptr: [512] float32, of dynamic_table.
        scratch_ptr: [programs, inputs, lanes · ROWS] float32, the errors of candidates.
        errors_ptr: [inputs, outputs] float32, written.

    Scalars (none is a constexpr, so that nothing is unrolled but the loops over a piece):
        inputs: of the group, a multiple of PIECE.
        turns: 3.
        first_output: of the first program.
        outputs: how many there are.
        upper_stride: elements from one row of upper to the next.
    """
    program = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, _LANES)
    output = first_output + program * ROWS + row
    mask = output < outputs
    places = lane[:, None] * ROWS + row[None, :]
    lane_outputs = output[None, :] + tl.zeros((_LANES, 1), tl.int64)
    scratch_ptr += program * inputs * (_LANES * ROWS)
    of_lanes = (target_ptr, outputs, lane_outputs, lane_outputs < outputs)
    errors_of_lanes = (scratch_ptr, _LANES * ROWS, places, places >= 0)
    matrix = (upper_ptr, upper_stride, reciprocal_ptr)

    offset, maximum = load_snapping(draft, output, mask, NESTED)
    base = tl.zeros((ROWS,), tl.float32)
    for j in range(inputs):
        weight = tl.load(target_ptr + j * outputs + output, mask=mask, other=0.0)
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
                of_lanes, matrix, scale, errors_of_lanes, draft.ranks, start, LEVELS, False
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

    tl.store(draft.scales + output, best_scale, mask=mask)
    tl.store(draft.scale_codes + output, best_code.to(tl.uint8), mask=mask)
    of_best = (target_ptr, outputs, output, mask)
    errors_of_best = (errors_ptr, outputs, output, mask)
    for start in range(0, inputs, PIECE):
        _round_piece(of_best, matrix, best_scale, errors_of_best, draft.ranks, start, LEVELS, True)
        tl.debug_barrier()


_launch = Launcher(_choose_kernel)


@triton.jit
def _round_piece(
    targets,
    matrix,
    scale,
    errors,
    ranks_ptr,
    start,
    LEVELS: tl.constexpr,
    WRITES: tl.constexpr,
):
    """Rounds PIECE inputs from `start` on, one after the other; each error moves those that follow.

    Args:
        targets: where the group is in memory, as for `load_piece`.
        matrix: a pointer to upper, elements from one row to the next, and a pointer to 1 over its
            diagonal.
        scale: of each output.
        errors: where errors are in memory: they are read before `start`, and written from there.
        ranks_ptr: [inputs, …] uint8, written if WRITES; its outputs stand as in the targets.
        start: the first input.
        LEVELS: of level_constants.
        WRITES: store ranks.

    Returns:
        The sum of the squared errors of the piece.
    """
    _, stride, outputs, mask = targets
    upper_ptr, upper_stride, reciprocal_ptr = matrix
    errors_ptr, errors_stride, places, place_mask = errors
    piece = load_piece(targets, start)
    piece = subtract_products(piece, errors, upper_ptr + start, upper_stride, start)
    inverse = inverse_of(scale)
    cost = scale * 0.0
    for j in tl.static_range(PIECE):
        quotient = piece[0] * inverse
        value = nearest_value(quotient, LEVELS) * scale
        error = (piece[0] - value) * tl.load(reciprocal_ptr + start + j)
        cost = tl.fma(error, error, cost)
        if WRITES:
            rank = nearest_rank(quotient, LEVELS).to(tl.uint8)
            tl.store(ranks_ptr + (start + j) * stride + outputs, rank, mask=mask)
        error_ptrs = errors_ptr + (start + j) * errors_stride + places
        tl.store(error_ptrs, error, mask=place_mask)
        row_ptr = upper_ptr + (start + j) * upper_stride + start
        piece = move_rest(piece, error, row_ptr, j + 1)
    return cost
