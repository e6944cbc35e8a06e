"""Multiplies more rows of x: programs copy x to shared memory, and their warps share it.

kernel.py says how they divide the work.
"""

import triton
import triton.language as tl

from nf4conv.codec.kernels.product.common import first_row, run_assembly, store_sums
from nf4conv.codec.kernels.product.tile_assembly import tile_assembly


@triton.jit
def tile_stage(
    totals, operands, x_ptr, m, k, first, following, tiles, parity, thread, SHAPE: tl.constexpr
):
    """Adds a stage to the totals, and returns them: per row and column tile two of row g, then two
    of row g + 8.

    Two tiles of x take turns. The next part of x is copied while one is worked on; behind the last
    part of this stage comes the first of the next, which begins at k = following.
    """
    wait: tl.constexpr = "cp.async.wait_all; bar.sync 0; mov.b32 $0, $1;"
    outputs: tl.constexpr = "f" * SHAPE.totals
    inputs: tl.constexpr = outputs + "r" * SHAPE.words + "f" * SHAPE.scales + "rr"
    for part in tl.static_range(0 + SHAPE.parts):
        run_assembly(wait, "r", "r", (thread,))
        next_k = first + (part + 1) * 64 * SHAPE.copied if part < SHAPE.parts - 1 else following
        other_tile = tiles + (1 - parity) * (SHAPE.shared_bytes // 2)
        copy_x(x_ptr, other_tile, next_k, m, k, thread, SHAPE)
        tile = tiles + parity * (SHAPE.shared_bytes // 2)
        # a name for this text would be a constexpr that is defined again in each turn
        totals = run_assembly(
            tile_assembly(x_ptr.dtype.element_ty, SHAPE, part),
            outputs,
            inputs,
            totals + operands + (tile,),
        )
        parity = 1 - parity
    return totals


@triton.jit
def copy_x(x_ptr, tiles, first, m, k, thread, SHAPE: tl.constexpr):
    """Begins to copy 64 * copied k of x to shared memory; zeros where there is none."""
    copy: tl.constexpr = "cp.async.cg.shared.global [$2], [$1], 16, $3; mov.b32 $0, 0;"
    for i in tl.static_range(SHAPE.copied * SHAPE.column_tiles * 2 // SHAPE.warps):
        index = thread + i * 32 * SHAPE.warps  # of 16 bytes
        piece = index % 8
        row = index // 8 % (8 * SHAPE.column_tiles)
        at = first + index // (64 * SHAPE.column_tiles) * 64 + piece * 8
        given = (row < m) & (at < k)
        start = tl.where(given, (row.to(tl.int64) * k + at) * 2, 0)
        source = x_ptr.to(tl.int64) + start
        swapped = row % 2 * 4 + row // 2 % 4 if SHAPE.short else row
        target = tiles + index // 8 * 128 + ((piece ^ swapped) % 8 << 4)
        size = given.to(tl.int32) * 16
        run_assembly(copy, "r", "lrr", (source, target, size))


@triton.jit
def finish(totals, out_ptr, m, n, norm, tile, thread, SHAPE: tl.constexpr):
    """Stores the sums of a unit that is not wide."""
    first = first_row(tile, thread, SHAPE)
    for i in tl.static_range(0 + SHAPE.totals):
        column = thread % 4 * 2 + (i // 4 % SHAPE.column_tiles * 8 + i % 2)
        row = first + (i // 2 % 2 + i // (4 * SHAPE.column_tiles) * 2) * 8
        store_sums(totals[i] * norm, out_ptr, row, column, column < m, n)
