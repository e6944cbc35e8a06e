"""The kernel of all candidates: panel_kernel with a shorter end, and with x as the caller has it.

product/panels' arrange_kernel cuts x into tiles whose k stand in the order that a lane has them.
With "straight" a tensor map copies tiles of x with k in their own order, and lanes exchange bytes
of codes instead. That is one launch less. "scaled" also scales sums instead of weights.
"""

from typing import Any

import triton
import triton.language as tl

from benchmarks.panels.assembly import straight_loop
from benchmarks.panels.ending import WAIT_FOR_PAIR, leave, store_tile
from benchmarks.panels.scaling import scaled_loop
from nf4conv.codec.kernels.launch import kernel
from nf4conv.codec.kernels.product.assembly import constraints
from nf4conv.codec.kernels.product.panels import inputs
from nf4conv.codec.kernels.product.panels.assembly import assemble_loop


@triton.constexpr_function
def loop_of(dtype: tl.dtype, shape: Any, cluster: int, way: str) -> str:
    """Return the PTX of a program's loop over k, which leaves the sums in shared memory."""
    end = leave(shape, cluster)
    if way == "scaled":
        text: str = scaled_loop(dtype, shape, end)
    elif way == "straight":
        text = straight_loop(dtype, shape, end)
    else:
        text = assemble_loop(dtype, shape, end)
    return text


@kernel
def candidate_kernel(
    out_ptr,
    packed_ptr,
    absmax_ptr,
    code_ptr,
    nested_absmax_ptr,
    offset_ptr,
    x_address: tl.int64,
    map1: tl.int64,
    map2: tl.int64,
    map3: tl.int64,
    map4: tl.int64,
    map5: tl.int64,
    map6: tl.int64,
    map7: tl.int64,
    map8: tl.int64,
    map9: tl.int64,
    map10: tl.int64,
    map11: tl.int64,
    map12: tl.int64,
    map13: tl.int64,
    map14: tl.int64,
    map15: tl.int64,
    table_ptr,
    m: tl.int32,
    n: tl.int32,
    k: tl.int32,
    cluster: tl.int32,
    splits: tl.int32,
    block_shift: tl.int32,
    norm: tl.float32,
    PANEL: tl.constexpr,
    DTYPE: tl.constexpr,
    CLUSTER: tl.constexpr,
    WAY: tl.constexpr,
):
    """Compute one part of k of one tile, then a share of the sums of a cluster's parts.

    Pointers and scalars are as in panel_kernel. WAY is a costs.Way. x, of DTYPE, is at x_address
    in tiles, or if not "brisk" x_address to map15 are a tensor map of it. The unit that copies
    tiles wants the map at a multiple of 64. A Hopper GPU has a kernel's arguments from byte 0x210
    of a bank of constants on, so six pointers must stand before it. For "scaled" the table is
    tables.pair_table of DTYPE. CLUSTER is `cluster`.
    """
    ROWS: tl.constexpr = 0 + PANEL.rows
    COLUMNS: tl.constexpr = 0 + PANEL.columns
    rank = tl.program_id(0) % cluster
    split = tl.program_id(0) // cluster % splits
    tile = tl.program_id(0) // (cluster * splits)
    parts = cluster * splits
    part = split * cluster + rank
    column_tiles = tl.cdiv(m, COLUMNS)
    column = tile % column_tiles * COLUMNS
    row = tile // column_tiles * ROWS
    all_turns = tl.cdiv(k, 128)
    first = part * all_turns // parts
    turns = (part + 1) * all_turns // parts - first
    thread = tl.arange(0, 2 * ROWS)
    # L2 stays up to date, whatever the kernel before writes
    near = tl.minimum(row + thread // 2, n - 1).to(tl.int64) * (k // 2)
    near += tl.minimum(first * 64 + thread % 2 * 128, k // 2 - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [packed_ptr.to(tl.int64) + near],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    if WAY != "brisk":
        x = column.to(tl.int64)
    else:
        x = x_address + (column.to(tl.int64) * all_turns + first * COLUMNS) * 256
    operands = (
        thread, packed_ptr.to(tl.int64), absmax_ptr.to(tl.int64), code_ptr.to(tl.int64),
        nested_absmax_ptr.to(tl.int64), offset_ptr.to(tl.int64), table_ptr.to(tl.int64), x,
        row, n, k, first, turns, block_shift, norm,
    )  # fmt: skip
    TEXT: tl.constexpr = loop_of(DTYPE, PANEL, CLUSTER, WAY)
    LETTERS: tl.constexpr = inputs.LETTERS
    CONSTRAINTS: tl.constexpr = constraints("r", LETTERS)
    sums = tl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, operands, dtype=tl.int32, is_pure=False, pack=1
    )
    out_ptr += split.to(tl.int64) * m * n
    store_tile(out_ptr, sums, thread, rank, cluster, m, n, column, row, ROWS, COLUMNS, CLUSTER)
    if CLUSTER > 1:  # no program ends while another reads its sums
        tl.inline_asm_elementwise(
            WAIT_FOR_PAIR, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1
        )
