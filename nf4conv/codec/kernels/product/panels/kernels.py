"""Multiplies by panels: orders x, then computes tiles of the result.

Some warps decode, scale and round weights in registers while the tensor cores multiply those of
others: `wgmma` with the weight as the left operand.
"""

from typing import Final

import triton
import triton.language as tl

from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.codec.kernels.product.assembly import constraints
from nf4conv.codec.kernels.product.panels import inputs
from nf4conv.codec.kernels.product.panels.assembly import loop_assembly
from nf4conv.codec.kernels.product.panels.sums import store_assembly, sum_assembly
from nf4conv.codec.kernels.product.sums import wait

TILE: Final = 1024
"""Words of a program of arrange_kernel."""


@kernel
def arrange_kernel(
    x_ptr, out_ptr, m: tl.int32, k: tl.int32, COLUMNS: tl.constexpr, TILE: tl.constexpr
):
    """Cuts x into tiles as `wgmma` reads them from shared memory, filled up with zeros.

    A tile has 64 k of COLUMNS rows, 32 words of two values a row. The pieces of four words are
    swizzled: piece c of row r stands at c ^ (r % 8). Two tiles hold 128 k: word t of piece c of
    tile h is the pair 16 t + 8 h + c, because lane t of a quad has pairs 16 t … 16 t + 15 of a row
    of the weight.

    Pointers to tensors:
        x_ptr: [m, k] 16-bit values.
        out_ptr: [ceil(m / COLUMNS), 2 ceil(k / 128), COLUMNS, 32] words, written.
    """
    word = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = word // 32 % COLUMNS
    piece = (word // 4 ^ row) % 8
    tile = word // (32 * COLUMNS)
    tiles = tl.cdiv(k, 128) * 2
    row += tile // tiles * COLUMNS
    tile = tile % tiles
    pair = tile // 2 * 64 + word % 4 * 16 + tile % 2 * 8 + piece
    source = row.to(tl.int64) * (k // 2) + pair + wait(word)
    mask = (row < m) & (pair < k // 2)
    values = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + source, mask=mask, other=0)
    tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + word, values)


@kernel
def panel_kernel(
    x_ptr,
    out_ptr,
    packed_ptr,
    absmax_ptr,
    code_ptr,
    nested_absmax_ptr,
    offset_ptr,
    table_ptr,
    m: tl.int32,
    n: tl.int32,
    k: tl.int32,
    cluster: tl.int32,
    splits: tl.int32,
    block_shift: tl.int32,
    norm: tl.float32,
    PANEL: tl.constexpr,
):
    """Computes one part of k of one tile, then a share of the sums of a cluster's parts.

    The programs of a cluster compute parts of the same tile. Tiles that follow each other share
    their rows of W, so that these are read from L2.

    Pointers to tensors:
        x_ptr: x of bfloat16 or float16 as arrange_kernel leaves it.
        out_ptr: [splits, m, n] of the same or float32, written; begins at a multiple of 16 bytes.
        packed_ptr: [n · k / 2] uint8.
        absmax_ptr, code_ptr, nested_absmax_ptr, offset_ptr: Decoding.pointers().
        table_ptr: for bfloat16 [256] int32, tables.pair_table of float16; for float16 [32] int32,
            tables.value_table.

    Scalars:
        m, n, k: rows of x, rows of W, columns of both, a multiple of 64.
        cluster: programs of a cluster.
        splits: clusters that compute one tile; k is divided into cluster · splits parts.
        block_shift: a block of codes has 64 << block_shift elements.
        norm: what the table's values are multiplied with.
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
    tiles = x_ptr.to(tl.int64) + (column.to(tl.int64) * all_turns + first * COLUMNS) * 256
    operands = (
        thread, packed_ptr.to(tl.int64), absmax_ptr.to(tl.int64), code_ptr.to(tl.int64),
        nested_absmax_ptr.to(tl.int64), offset_ptr.to(tl.int64), table_ptr.to(tl.int64), tiles,
        row, n, k, first, turns, block_shift, norm,
    )  # fmt: skip
    LETTERS: tl.constexpr = inputs.LETTERS
    TEXT: tl.constexpr = loop_assembly(x_ptr.dtype.element_ty, PANEL)
    CONSTRAINTS: tl.constexpr = constraints("r", LETTERS)
    sums = tl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, operands, dtype=tl.int32, is_pure=False, pack=1
    )
    out_ptr += split.to(tl.int64) * m * n
    _store_share(out_ptr, sums, thread, rank, cluster, m, n, column, row, ROWS, COLUMNS)
    # no program ends while another reads its sums
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; "
        "mov.b32 $0, $1;",
        "=r,r",
        [thread],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _store_share(
    out_ptr,
    sums,
    thread,
    rank,
    cluster,
    m,
    n,
    column,
    row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds up the sums of a cluster for a share of a tile's columns, and stores them.

    A thread does four rows of W at once. `sums` is their address in shared memory.
    """
    FOURS: tl.constexpr = ROWS // 4
    ADD: tl.constexpr = sum_assembly()
    STORE: tl.constexpr = store_assembly(out_ptr.dtype.element_ty)
    width = tl.minimum(m - column, COLUMNS)
    end = (rank + 1) * width // cluster * FOURS
    for begin in range(rank * width // cluster * FOURS, end, 2 * ROWS):
        index = begin + thread
        to_column = index // FOURS
        to_row = index % FOURS * 4
        inside = index < end
        place = tl.minimum(to_column, COLUMNS - 1) * (ROWS + 4) + to_row
        totals = tl.inline_asm_elementwise(
            ADD,
            "=&f,=&f,=&f,=&f,r,r",
            (sums + place * 4, cluster),
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )
        to_row += row
        to = out_ptr + (column + to_column).to(tl.int64) * n + to_row
        if n % 4 == 0:
            tl.inline_asm_elementwise(
                STORE,
                "=r,f,f,f,f,l,r",
                totals + (to.to(tl.int64), (inside & (to_row < n)).to(tl.int32)),
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            for i in tl.static_range(4):
                value = totals[i].to(out_ptr.dtype.element_ty)
                tl.store(to + i, value, mask=inside & (to_row + i < n))


launch_panel = Launcher(panel_kernel)


launch_arrange = Launcher(arrange_kernel)
