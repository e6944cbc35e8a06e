"""Multiplies by panels: computes tiles of the result.

Some warps decode weights into registers while the tensor cores multiply those of others: `wgmma`
with the weight as the left operand.
"""

import triton.language as tl

from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.inference.kernels.product.assembly import constraints
from nf4conv.inference.kernels.product.panels import tiles
from nf4conv.inference.kernels.product.panels.loops import multiply_turns
from nf4conv.inference.kernels.product.panels.sums import WAIT_FOR_CLUSTER, leave, store_tile


@kernel
def panel_kernel(
    out_ptr,
    weight,
    x_map,
    table_ptr,
    m: tl.int32,
    n: tl.int32,
    k: tl.int32,
    splits: tl.int32,
    block_shift: tl.int32,
    norm: tl.float32,
    PANEL: tl.constexpr,
    DTYPE: tl.constexpr,
    CLUSTER: tl.constexpr,
):
    """Computes one part of k of one tile, then a share of the sums of a cluster's parts.

    The programs of a cluster compute parts of the same tile. Tiles that follow each other share
    their rows of W, so that these are read from L2.

    Records:
        weight: a PackedWeight, [n, k].
        x_map: the tensor map of x, [m, k] of DTYPE, at a multiple of 16: its address, then
            prepare.map_of. The unit that copies tiles wants the map at a multiple of 64. A Hopper
            GPU has a kernel's arguments from byte 0x210 of a bank of constants on, so six pointers
            must stand before it.

    Pointers to tensors:
        out_ptr: [splits, m, n] of DTYPE or float32, written; begins at a multiple of 16 bytes.
        table_ptr: if sums are scaled, [256] int32, tables.pair_table of DTYPE; otherwise for
            bfloat16 that of float16, and for float16 [32] int32, tables.value_table.

    Scalars:
        m, n, k: rows of x, rows of W, columns of both, a multiple of 64.
        splits: clusters that compute one tile; k is divided into CLUSTER · splits parts.
        block_shift: a block of codes has 64 << block_shift elements.
        norm: what the table's values are multiplied with.
    """
    ROWS: tl.constexpr = 0 + PANEL.rows
    COLUMNS: tl.constexpr = 0 + PANEL.columns
    rank = tl.program_id(0) % CLUSTER
    split = tl.program_id(0) // CLUSTER % splits
    tile = tl.program_id(0) // (CLUSTER * splits)
    parts = CLUSTER * splits
    part = split * CLUSTER + rank
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
        [weight.packed.to(tl.int64) + near],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    operands = (
        thread, weight.packed.to(tl.int64), weight.absmax.to(tl.int64), weight.code.to(tl.int64),
        weight.nested_absmax.to(tl.int64), weight.offset.to(tl.int64), table_ptr.to(tl.int64),
        column, row, n, k, first, turns, block_shift, norm,
    )  # fmt: skip
    TEXT: tl.constexpr = multiply_turns(DTYPE, PANEL, leave(PANEL, CLUSTER))
    LETTERS: tl.constexpr = tiles.LETTERS
    CONSTRAINTS: tl.constexpr = constraints("r", LETTERS)
    sums = tl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, operands, dtype=tl.int32, is_pure=False, pack=1
    )
    out_ptr += split.to(tl.int64) * m * n
    store_tile(out_ptr, sums, thread, m, n, column, row, ROWS, COLUMNS, CLUSTER)
    if CLUSTER > 1:  # no program ends while another reads its sums
        tl.inline_asm_elementwise(
            WAIT_FOR_CLUSTER, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1
        )


launch_panel = Launcher(panel_kernel)
