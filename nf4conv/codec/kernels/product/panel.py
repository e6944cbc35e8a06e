"""x · Wᵀ for 33 to 512 rows on Hopper: some warps decode, scale and round weights in registers
while the tensor cores multiply those of others, `wgmma` with the weight as the left operand.

A program computes 128 or 256 rows of W for `columns` rows of x, over all k or one of several parts
of it. In float16 the result is that of a product with decoded weights, but for the order of float32
sums. In bfloat16 the 16 values are rounded to float16 before they are scaled: as decoded weights
are rounded to a grid eight times as coarse, this adds 0.4 % to their error.
"""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

import nf4conv.codec.kernels.product.panel_assembly as text
from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.codec.kernels.product.assembly import constraints
from nf4conv.codec.kernels.product.launches import (
    MOST_SPLITS,
    Product,
    prepare_sum,
    readable,
    stream_of,
    wait,
)
from nf4conv.codec.kernels.tables import MULTIPLES, pair_table, value_table
from nf4conv.codec.quant_state import Addresses, Form


@dataclass(eq=False)  # told apart by identity, which is faster
class Panel:
    """Says what a program computes at once: panel_kernel is compiled once for each.

    Attributes:
        groups: warpgroups, 64 rows of W each: 2 or 4.
        columns: rows of x, a multiple of 16 up to 256.
        stages: turns of x in shared memory, 3 or more.
        sets: units of decoded weights that a warpgroup holds: with 2 it decodes one while the other
            is multiplied.
        nested: True if absmax is uint8 codes.
        rows: rows of W.
        totals: sums that a thread keeps.
        turn_bytes: of x for a turn, 128 k.
        shared_bytes: of tables and the tiles of all turns, or of sums in their place, with what
            they may be moved to begin at a multiple of 1024.
        registers: of a thread at most: a multiprocessor has 65,536.
        plain: the panel for absmax in float32.
    """

    groups: int
    columns: int
    stages: int
    sets: int
    nested: bool = True
    rows: int = field(init=False)
    totals: int = field(init=False)
    turn_bytes: int = field(init=False)
    shared_bytes: int = field(init=False)
    registers: int = field(init=False)
    plain: "Panel" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.rows = 64 * self.groups
        self.totals = self.columns // 2
        self.turn_bytes = 256 * self.columns
        sums = 4 * self.columns * (self.rows + 4)
        self.shared_bytes = 34816 + max(self.stages * self.turn_bytes, sums)
        self.registers = 128 if self.groups == 4 or self.totals <= 32 else 255
        self.plain = replace(self, nested=False) if self.nested else self


MOST_ROWS: Final = 512
"""Rows of x at most: nothing above was measured."""

TILE: Final = 1024
"""Words of a program of arrange_kernel."""

NARROW: Final = Panel(groups=2, columns=64, stages=4, sets=2)
"""Two programs fit on a multiprocessor."""

TALL: Final = Panel(groups=4, columns=128, stages=4, sets=1)

PANELS: Final = (
    NARROW,
    Panel(groups=2, columns=96, stages=4, sets=2),
    Panel(groups=2, columns=128, stages=4, sets=2),
    TALL,
    Panel(groups=2, columns=160, stages=3, sets=2),
    Panel(groups=2, columns=176, stages=3, sets=2),
    Panel(groups=2, columns=192, stages=3, sets=2),
    Panel(groups=2, columns=224, stages=3, sets=2),
    Panel(groups=2, columns=256, stages=3, sets=2),
)


class Plan(NamedTuple):
    """Says how a product is divided.

    Attributes:
        panel: what a program computes.
        cluster: programs that share a tile and add up in shared memory: 1 or 2. Larger clusters
            leave multiprocessors idle: they must lie in one of the GPU's groups of 14 to 18.
        splits: clusters that share a tile, whose sums another kernel adds up.
    """

    panel: Panel
    cluster: int
    splits: int


def choose_plan(m: int, n: int, k: int, processors: int) -> Plan:
    """Return the plan that takes least time.

    Args:
        m: rows of x.
        n: rows of the weights.
        k: columns of both.
        processors: multiprocessors of the GPU.
    """
    turns = -(-k // 128)
    best = Plan(NARROW, 1, 1)
    least = float("inf")
    for panel, cluster, splits in product(PANELS, (1, 2), range(1, MOST_SPLITS + 1)):
        plan = Plan(panel, cluster, splits)
        cost = _cost(plan, m, n, k, processors)
        if cluster * splits <= turns and cost < least:
            best = plan
            least = cost
    return best


def is_faster(m: int, n: int, k: int, processors: int) -> bool:
    """Return whether panels are faster than decoding and the library's product."""
    if m > MOST_ROWS:
        return False
    decoded = 1.5 + n * k * 2.53 / 3.9e6 + max(2 * m * n * k / 7e8, n * k * 2 / 4.2e6)
    return _cost(choose_plan(m, n, k, processors), m, n, k, processors) < decoded


def _cost(plan: Plan, m: int, n: int, k: int, processors: int) -> float:
    """Return about how many µs a product takes on an H200.

    Fitted to the sweep of docs/kernels.md, 6 % root mean square: what a program takes to begin and
    to end, its turns, the order of x, and the sums of parts.
    """
    panel, cluster, splits = plan
    programs = -(-m // panel.columns) * -(-n // panel.rows) * cluster * splits
    turns = -(-k // (128 * cluster * splits))
    begin_and_end = 2.5
    if panel is NARROW:
        whole, rest = divmod(programs, 2 * processors)
        two = begin_and_end + 1 + turns * 1.36
        cost = whole * two
        if rest > processors:
            cost += two
        elif rest > 0:
            cost += begin_and_end + turns * 0.8
    else:
        turn = 1.755 if panel is TALL else 0.55 + 0.0032 * panel.columns
        cost = -(-programs // processors) * (begin_and_end + turns * turn)
    if splits > 1:
        cost += 1 + splits * m * n * 8 / 4.1e6
    if cluster > 1:
        cost += 3
    return 0.4 + cost + m * k * 4 / 2.4e6


def prepare_panel(
    x_shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    n: int,
    form: Form,
    chosen: Plan | None = None,
) -> Product:
    """Prepare to multiply all x of one shape with all weights of one shape.

    Args:
        x_shape: [..., k]. k is a multiple of 64.
        dtype: of x, float16 or bfloat16.
        device: a GPU with `wgmma`.
        n: rows of the weights; n · k is below launches.MOST_ELEMENTS.
        form: of the weights; the blocksize is a multiple of 64, the packed codes begin at a
            multiple of 16 bytes.
        chosen: by default `choose_plan`'s.

    Returns:
        A function of x and a weight that returns x · Wᵀ, [..., n] of the dtype of x.
    """
    k = x_shape[-1]
    m = x_shape.numel() // k
    out_shape = (*x_shape[:-1], n)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    panel, cluster, splits = chosen or choose_plan(m, n, k, processors)
    if not form.nested:
        panel = panel.plain
    turns = -(-k // 128)
    column_tiles = -(-m // panel.columns)
    clusters = column_tiles * -(-n // panel.rows) * splits
    in_pairs = dtype == torch.bfloat16
    norm = 1.0
    if in_pairs:
        table = pair_table(form.quant_type, torch.float16, device)
        norm /= MULTIPLES[form.quant_type, torch.float16]
    else:
        table = value_table(form.quant_type, device)
    shift = (form.blocksize // 64).bit_length() - 1
    behind = (table.data_ptr(), m, n, k, cluster, splits, shift, norm)
    absmax = torch.uint8 if form.nested else torch.float32
    others = torch.float32
    target_dtype = torch.float32 if splits > 1 else dtype
    pointers = (dtype, target_dtype, torch.uint8, absmax, others, others, others, torch.int32)
    launch = launch_panel.prepare(
        device,
        (*pointers, *behind[1:]),
        (panel,),
        (dtype, splits > 1),
        num_warps=4 * panel.groups,
        registers=panel.registers,
        begins_early=True,
        shared_bytes=panel.shared_bytes,
        cluster=cluster,
    )
    arrange = launch_arrange.prepare(
        device, (dtype, dtype, m, k), (panel.columns, TILE), dtype, num_warps=4, begins_early=True
    )
    words = column_tiles * turns * panel.columns * 64  # of x in tiles, 32 bits each
    space = 2 * words  # 16-bit elements: x in tiles, and the splits in float32 behind it
    add = None
    if splits > 1:
        space += 2 * splits * m * n
        add = prepare_sum(device, dtype, splits, early=True)
    current_stream = stream_of(device)

    def multiply(x: torch.Tensor, weight: Addresses) -> torch.Tensor:
        x = readable(x)
        out = x.new_empty(out_shape)
        arranged = x.new_empty(space)
        address = arranged.data_ptr()
        target = out.data_ptr() if splits == 1 else address + 4 * words
        stream = current_stream()
        arrange(words // TILE, stream, x.data_ptr(), address, m, k)
        launch(clusters, stream, address, target, *weight, *behind)
        if add is not None:
            add(stream, target, out.data_ptr(), m * n)
        return out

    return multiply


@kernel
def arrange_kernel(
    x_ptr, out_ptr, m: tl.int32, k: tl.int32, COLUMNS: tl.constexpr, TILE: tl.constexpr
):
    """Cut x into tiles as `wgmma` reads them from shared memory, filled up with zeros.

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
    """Compute one part of k of one tile, then a share of the sums of a cluster's parts.

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
    LETTERS: tl.constexpr = text.LETTERS
    TEXT: tl.constexpr = text.loop_assembly(x_ptr.dtype.element_ty, PANEL)
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
    """Add up the sums of a cluster for a share of a tile's columns, and store them.

    A thread does four rows of W at once. `sums` is their address in shared memory.
    """
    FOURS: tl.constexpr = ROWS // 4
    ADD: tl.constexpr = text.sum_assembly()
    STORE: tl.constexpr = text.store_assembly(out_ptr.dtype.element_ty)
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
