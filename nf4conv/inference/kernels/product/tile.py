"""Multiplies more rows of x: programs copy x to shared memory, and their warps share it.

kernel.py says how they divide the work, and assembly.py what lanes hold. The PTX of
what a warp does with a stage of codes and tiles of x is behind the code of programs.
"""

from typing import Any

import triton
import triton.language as tl

from nf4conv.inference.kernels.product.assembly import decode_assembly, scale_assembly
from nf4conv.inference.kernels.product.common import first_row, run_assembly, store_sums


@triton.jit
def tile_stage(
    totals, operands, x_rows, first, following, tiles, parity, thread, SHAPE: tl.constexpr
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
        copy_x(x_rows, other_tile, next_k, thread, SHAPE)
        tile = tiles + parity * (SHAPE.shared_bytes // 2)
        # a name for this text would be a constexpr that is defined again in each turn
        totals = run_assembly(
            tile_assembly(x_rows[0].dtype.element_ty, SHAPE, part),
            outputs,
            inputs,
            totals + operands + (tile,),
        )
        parity = 1 - parity
    return totals


@triton.jit
def copy_x(x_rows, tiles, first, thread, SHAPE: tl.constexpr):
    """Begins to copy 64 * copied k of x to shared memory; zeros where there is none."""
    x_ptr, m, k = x_rows
    copy: tl.constexpr = "cp.async.cg.shared.global [$2], [$1], 16, $3; mov.b32 $0, 0;"
    for i in tl.static_range(SHAPE.copied * SHAPE.column_tiles * 2 // SHAPE.warps):
        index = thread + i * 32 * SHAPE.warps  # of 16 bytes
        piece = index % 8
        row = index // 8 % (8 * SHAPE.column_tiles)
        at = first + index // (64 * SHAPE.column_tiles) * 64 + piece * 8
        given = (row < m) & (at < k)
        start = tl.where(given, (row.to(tl.int64) * k + at) * 2, 0)
        source = x_ptr.to(tl.int64) + start
        target = tiles + index // 8 * 128 + ((piece ^ row) % 8 << 4)
        size = given.to(tl.int32) * 16
        run_assembly(copy, "r", "lrr", (source, target, size))


@triton.jit
def finish(totals, result, unit, split_shift, thread, SHAPE: tl.constexpr):
    """Stores the sums of a unit that is not wide, in its part of the result."""
    out_ptr, m, n, norm = result
    split = unit & ((1 << split_shift) - 1)
    out_ptr += split.to(tl.int64) * m * n
    first = first_row(unit >> split_shift, thread, SHAPE)
    for i in tl.static_range(0 + SHAPE.totals):
        column = thread % 4 * 2 + (i // 4 % SHAPE.column_tiles * 8 + i % 2)
        row = first + (i // 2 % 2 + i // (4 * SHAPE.column_tiles) * 2) * 8
        store_sums(totals[i] * norm, out_ptr, row, column, column < m, n)


@triton.constexpr_function
def tile_assembly(dtype: tl.dtype, shape: Any, part: int) -> str:
    """Multiplies a part of a stage, `copied` blocks of it, with tiles of x in shared memory: `mma`.

    A tile is 64 k of 8 * column_tiles rows of x, 128 bytes a row, whose 16-byte pieces stand in an
    order in which no two lanes meet in a bank. Lane (g, t) loads 16 k of column g, those that it
    holds of the weight, in two pieces. They serve all row tiles.

    Operands: the totals, for each row tile and column tile two of row g, two of row g + 8; the
    totals before; for each slot two words of each block; scales; 4 * lane in each byte; the address
    of the tiles. `shape` is a shapes.Shape.
    """
    tiles = _operand_of_lane(shape) + 1
    lines = [
        "{",
        ".reg .b32 b, a, l, h, y, z, v<32>, x<8>;",
        ".reg .f32 c<8>, s, s<8>;",
        "mov.u32 b, pairs;",
        f"and.b32 a, ${_operand_of_lane(shape)}, 0xff;",
        "shr.u32 l, a, 4;",
        # the place of the lane's first piece of x, 2 t, in row l = g
        "shr.u32 a, a, 1;",
        "and.b32 a, a, 6;",
        "xor.b32 a, a, l;",
        "shl.b32 a, a, 4;",
        "shl.b32 l, l, 7;",
        "add.u32 a, a, l;",
        f"add.u32 y, a, ${tiles};",
        "xor.b32 z, y, 16;",
    ]
    for block in range(shape.copied):
        lines += _mma_block(dtype, shape, part, block)
    lines += ["}"]
    return "\n".join(lines)


@triton.constexpr_function
def _mma_block(dtype: tl.dtype, shape: Any, part: int, block_of_part: int) -> list[str]:
    """Decodes a block of all row tiles, multiplies it with all column tiles, and adds the sums,
    times their scales, to the totals.
    """
    block = part * shape.copied + block_of_part
    lines = []
    for slot in range(shape.slots):
        operand = 2 * shape.totals + (slot * shape.blocks + block) * 2
        for i in range(2):
            word = f"${operand + i}"
            lines += [decode_assembly(word, _operand_of_lane(shape), 8 * slot + 4 * i)]
        lines += [
            scale_assembly(_operand_of_scales(shape), slot * shape.blocks + block),
            f"mov.f32 s{slot}, s;",
        ]
    for column_tile in range(shape.column_tiles):
        place = 1024 * (block_of_part * shape.column_tiles + column_tile)
        lines += [f"ld.shared.v4.b32 {{x0, x1, x2, x3}}, [y+{place}];"]
        lines += [f"ld.shared.v4.b32 {{x4, x5, x6, x7}}, [z+{place}];"]
        lines += _multiply(dtype, shape, column_tile, block_of_part == 0)
    return lines


@triton.constexpr_function
def _multiply(dtype: tl.dtype, shape: Any, column_tile: int, is_first: bool) -> list[str]:
    """Multiplies a block with a column tile. The first adds to the totals before."""
    kind = dtype.name.replace("fp", "f")
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    lines = []
    for row_tile in range(shape.slots // 2):
        c = 4 * row_tile
        sums = f"{{c{c}, c{c + 1}, c{c + 2}, c{c + 3}}}"
        for i in range(c, c + 4):
            lines += [f"mov.b32 c{i}, 0f00000000;"]
        for i in range(0, 8, 2):
            v = 16 * row_tile + i
            left = f"{{v{v}, v{v + 8}, v{v + 1}, v{v + 9}}}"
            lines += [f"{mma} {sums}, {left}, {{x{i}, x{i + 1}}}, {sums};"]
        for i in range(4):
            target = 4 * (row_tile * shape.column_tiles + column_tile) + i
            before = shape.totals + target if is_first else target
            scale = 2 * row_tile + i // 2
            lines += [f"fma.rn.f32 ${target}, c{c + i}, s{scale}, ${before};"]
    return lines


@triton.constexpr_function
def _operand_of_scales(shape: Any) -> int:
    """Returns the number of the first operand of `tile_assembly` that is a scale."""
    operand: int = 2 * shape.totals + shape.words
    return operand


@triton.constexpr_function
def _operand_of_lane(shape: Any) -> int:
    """Returns the number of the operand of `tile_assembly` that is 4 * lane in each byte."""
    operand: int = _operand_of_scales(shape) + shape.scales
    return operand
