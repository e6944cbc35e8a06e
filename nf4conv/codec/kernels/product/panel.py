"""x · Wᵀ for 33 to 128 rows on Hopper: weights are decoded, scaled and rounded in registers
while the tensor cores multiply those before, `wgmma` with the weight as the left operand.

A program, two warpgroups, computes 128 · row_tiles rows of W for `columns` rows of x, over all k or
one of several parts of it. The result is that of a product with decoded weights, but for the order
of float32 sums.
"""

from dataclasses import dataclass, field, replace
from typing import Final

import torch
import triton.language as tl

import nf4conv.codec.kernels.product.panel_assembly as text
from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.codec.kernels.product.assembly import constraints, result_types
from nf4conv.codec.kernels.product.launches import (
    MOST_SPLITS,
    Product,
    prepare_order,
    prepare_sum,
    readable,
    stream_of,
)
from nf4conv.codec.kernels.tables import value_table
from nf4conv.codec.quant_state import Addresses, Form


@dataclass(eq=False)  # told apart by identity, which is faster
class Panel:
    """What a program computes at once: panel_kernel is compiled once for each.

    Attributes:
        row_tiles: rows of W of a warpgroup, divided by 64: 1 or 2.
        columns: rows of x: 64 or 128.
        nested: True if absmax is uint8 codes.
        totals: sums that a thread keeps.
        tile_bytes: of a tile of x: 64 k.
        copies: pieces of 16 bytes of it that a thread copies.
        registers: of a thread at most.
        plain: the panel for absmax in float32.
    """

    row_tiles: int
    columns: int
    nested: bool = True
    totals: int = field(init=False)
    tile_bytes: int = field(init=False)
    copies: int = field(init=False)
    registers: int = field(init=False)
    plain: "Panel" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.totals = self.row_tiles * self.columns // 2
        self.tile_bytes = 128 * self.columns
        self.copies = self.columns // 32
        # two programs on a multiprocessor, or one
        self.registers = 128 if self.totals <= 32 else 255
        self.plain = replace(self, nested=False) if self.nested else self


MOST_ROWS: Final = 128
"""Rows of x at most: decoding and the library's product are faster above."""

_NARROW: Final = Panel(1, 64)
_WIDE: Final = (Panel(1, 128), Panel(2, 128))


def choose_panel(m: int, n: int, k: int, processors: int) -> tuple[Panel, int]:
    """Return the panel and the parts of k that take least time.

    Args:
        m: rows of x.
        n: rows of the weights.
        k: columns of both.
        processors: multiprocessors of the GPU.
    """
    panels = (_NARROW,) if m <= _NARROW.columns else _WIDE
    best = (_NARROW, 1)
    least = float("inf")
    for panel in panels:
        for parts in range(1, MOST_SPLITS + 1):
            cost = _cost(panel, parts, m, n, k, processors)
            if cost < least:
                best = (panel, parts)
                least = cost
    return best


def _cost(panel: Panel, parts: int, m: int, n: int, k: int, processors: int) -> float:
    """Return about how many µs a product takes on an H200: fitted to the sweep of docs/kernels.md.

    A multiprocessor takes a step of one program, or of two at once, and the parts are written and
    read again.
    """
    programs = -(-m // panel.columns) * -(-n // (128 * panel.row_tiles)) * parts
    if panel is _NARROW:
        whole, rest = divmod(programs, 2 * processors)
        turns = whole + (rest > 0)
        step = whole * 1.27
        if rest > 0:
            step += 0.7 if rest <= processors else 1.27
        bytes_in_a_microsecond = 6e6
    else:
        turns = -(-programs // processors)
        step = turns * 0.72 * panel.row_tiles
        bytes_in_a_microsecond = 3.5e6
    cost = 2 * turns + step * _steps(k, parts)
    if parts > 1:
        cost += parts * m * n * 8 / bytes_in_a_microsecond
    return cost


def _steps(k: int, parts: int) -> int:
    """Return the blocks of 64 k of a part: an even number."""
    return -(-k // (128 * parts)) * 2


def prepare_panel(
    x_shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    n: int,
    form: Form,
    chosen: tuple[Panel, int] | None = None,
) -> Product:
    """Prepare to multiply all x of one shape with all weights of one shape.

    Args:
        x_shape: [..., k]. k is a multiple of 64.
        dtype: of x, float16 or bfloat16.
        device: a GPU with `wgmma`.
        n: rows of the weights; n · k is below launches.MOST_ELEMENTS.
        form: of the weights; the blocksize is a multiple of 64, the packed codes begin at a
            multiple of 16 bytes.
        chosen: the panel, and into how many parts k is divided; by default `choose_panel`'s.

    Returns:
        A function of x and a weight that returns x · Wᵀ, [..., n] of the dtype of x.
    """
    k = x_shape[-1]
    m = x_shape.numel() // k
    out_shape = (*x_shape[:-1], n)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    panel, parts = chosen or choose_panel(m, n, k, processors)
    if not form.nested:
        panel = panel.plain
    steps = _steps(k, parts)
    parts = -(-k // (64 * steps))
    programs = -(-m // panel.columns) * -(-n // (128 * panel.row_tiles)) * parts
    table = value_table(form.quant_type, device).data_ptr()
    behind = (table, m, n, k, steps, (form.blocksize // 64).bit_length() - 1)
    absmax = torch.uint8 if form.nested else torch.float32
    others = torch.float32
    target_dtype = torch.float32 if parts > 1 else dtype
    pointers = (dtype, target_dtype, torch.uint8, absmax, others, others, others, torch.int32)
    launch = launch_panel.prepare(
        device,
        (*pointers, *behind[1:]),
        (panel,),
        (dtype, parts > 1),
        num_warps=8,
        registers=panel.registers,
        begins_early=True,
    )
    order = prepare_order(device, dtype)
    add = prepare_sum(device, dtype, parts, early=True)
    current_stream = stream_of(device)
    space = m * k  # 16-bit elements: x in order, and the parts in float32 behind it
    if parts > 1:
        space += 2 * parts * m * n

    def multiply(x: torch.Tensor, weight: Addresses) -> torch.Tensor:
        x = readable(x)
        out = x.new_empty(out_shape)
        ordered = x.new_empty(space)
        address = ordered.data_ptr()
        target = out.data_ptr() if parts == 1 else address + 2 * m * k
        stream = current_stream()
        order(stream, x.data_ptr(), address, m * k)
        launch(programs, stream, address, target, *weight, *behind)
        if parts > 1:
            add(stream, target, out.data_ptr(), m * n)
        return out

    return multiply


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
    steps: tl.int32,
    block_shift: tl.int32,
    PANEL: tl.constexpr,
):
    """Compute one tile of one part of k.

    Programs that follow each other share their rows of W, so that these are read from L2.

    Pointers to tensors:
        x_ptr: [m, k] bfloat16 or float16, in the order of launches.order_kernel.
        out_ptr: [parts, m, n] bfloat16, float16 or float32, written.
        packed_ptr: [n · k / 2] uint8.
        absmax_ptr, code_ptr, nested_absmax_ptr, offset_ptr: Decoding.pointers().
        table_ptr: [32] int32, tables.value_table.

    Scalars:
        m, n, k: rows of x, rows of W, columns of both, a multiple of 64.
        steps: blocks of 64 k of a part, an even number.
        block_shift: a block of codes has 64 << block_shift elements.
    """
    ROWS: tl.constexpr = 128 * PANEL.row_tiles
    COLUMNS: tl.constexpr = 0 + PANEL.columns
    column_tiles = tl.cdiv(m, COLUMNS)
    row_tiles = tl.cdiv(n, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS
    row = tl.program_id(0) // column_tiles % row_tiles * ROWS
    part = tl.program_id(0) // (column_tiles * row_tiles)
    thread = tl.arange(0, 256)
    # L2 stays up to date, whatever the kernel before writes
    for turn in tl.static_range(0 + PANEL.row_tiles):
        near = tl.minimum(row + turn * 128 + thread // 2, n - 1).to(tl.int64) * (k // 2)
        near += tl.minimum(part * steps * 32 + thread % 2 * 128, k // 2 - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [packed_ptr.to(tl.int64) + near],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    # what follows must come after it: the kernel before may have written all else
    start: tl.constexpr = "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;"
    thread = tl.inline_asm_elementwise(
        start, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1
    )
    zero = thread * 0
    offset = tl.load(offset_ptr + zero) if PANEL.nested else zero.to(tl.float32)
    addresses = x_ptr.to(tl.int64) + column.to(tl.int64) * k * 2 + zero
    operands = (
        thread, packed_ptr.to(tl.int64) + zero, absmax_ptr.to(tl.int64) + zero,
        code_ptr.to(tl.int64) + zero, nested_absmax_ptr.to(tl.int64) + zero, offset,
        table_ptr.to(tl.int64) + zero, addresses, row + zero, n + zero, k + zero,
        m - column + zero, part * steps + zero, (part + 1) * steps + zero, block_shift + zero,
    )  # fmt: skip
    OUTPUTS: tl.constexpr = "f" * PANEL.totals
    LETTERS: tl.constexpr = text.LETTERS
    TEXT: tl.constexpr = text.loop_assembly(x_ptr.dtype.element_ty, PANEL)
    CONSTRAINTS: tl.constexpr = constraints(OUTPUTS, LETTERS)
    TYPES: tl.constexpr = result_types(OUTPUTS)
    totals = tl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, operands, dtype=TYPES, is_pure=False, pack=1
    )
    out_ptr += part.to(tl.int64) * m * n
    lane = thread % 32
    row += thread // 128 * (ROWS // 2) + thread // 32 % 4 * 16 + lane // 4
    column += lane % 4 * 2
    for i in tl.static_range(0 + PANEL.totals):
        to_column = column + (i % (COLUMNS // 2) // 4 * 8 + i % 2)
        to_row = row + (i // (COLUMNS // 2) * 64 + i // 2 % 2 * 8)
        mask = (to_column < m) & (to_row < n)
        to = to_column.to(tl.int64) * n + to_row
        tl.store(out_ptr + to, totals[i].to(out_ptr.dtype.element_ty), mask=mask)


launch_panel = Launcher(panel_kernel)
