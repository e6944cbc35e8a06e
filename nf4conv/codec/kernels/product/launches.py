"""Which kernel multiplies how many rows of x with a packed weight, what comes before and after it,
and the launches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.codec.kernels.product.kernel import launch_product
from nf4conv.codec.kernels.tables import MULTIPLES, pair_table
from nf4conv.codec.quant_state import Decoding

CAPABILITY: Final = (
    9  # of GPUs that have `wgmma` and begin kernels early, and the only one where this was measured
)
MOST_ELEMENTS: Final = (
    1 << 34
)  # of a weight: its pieces of 8 bytes and blocks of 64 elements are counted in 32 bits
MOST_SPLITS: Final = 8  # parts of k in different programs, each with an output of its own
_TILE: Final = 512


@dataclass(eq=False)  # told apart by identity, which is faster
class Shape:
    """What product_kernel is compiled for."""

    rows: int  # of x at most
    ranges: int  # of k that a warp works on at once: 2, 1 for up to 2, 4 rows, and 1 for more
    column_tiles: int  # rows of x by 8, or 0: wide
    warps: int  # of a program
    slots: int  # rows of W that a lane works on: 4 if wide, otherwise 2 or 4
    blocks: int  # of 64 k in a stage of a warp, for each of its ranges: 2 if wide
    copied: int  # of these, whose x is copied to shared memory at once; 0 if wide
    nested: bool = True  # whether absmax is uint8 codes

    def __post_init__(self) -> None:
        self.plain: Shape = replace(self, nested=False) if self.nested else self
        self.wide = self.column_tiles == 0
        self.apart = 8 // self.ranges  # rows of W from slot to slot
        self.unit_rows = self.apart * self.slots * (1 if self.wide else self.warps)
        self.span = (
            64 * self.blocks * self.ranges * (self.warps if self.wide else 1)
        )  # k of a stage of a program
        self.words = 2 * self.slots * self.blocks
        self.scales = -(
            -self.slots * self.blocks // 4
        )  # that a lane loads in a stage, for its quad
        self.totals = 4 if self.wide else 2 * self.column_tiles * self.slots
        self.sums = 128 // self.ranges**2  # of a wide unit, for each range of each warp
        self.held = 2 * self.ranges  # units whose sums wait in shared memory, if wide
        # of those sums; or of x, multiplied and copied meanwhile
        self.shared_bytes = (
            1024 * self.warps if self.wide else 2048 * self.column_tiles * self.copied
        )
        self.parts = self.blocks // max(self.copied, 1)
        self.registers = min(
            65536 // (64 * self.warps), 255
        )  # of a thread: a multiprocessor holds two programs

    def __repr__(self) -> str:  # by this alone Triton's cache tells what was compiled for whom
        return repr({name: value for name, value in vars(self).items() if name != "plain"})


SHAPES = (
    Shape(2, 2, 0, 8, 4, 2, 0),
    Shape(4, 1, 0, 8, 4, 2, 0),
    Shape(8, 1, 1, 8, 2, 4, 4),
    Shape(16, 1, 2, 8, 2, 4, 4),
    Shape(32, 1, 4, 4, 4, 2, 2),
    Shape(64, 1, 8, 4, 4, 2, 1),
)
"""By rows of x, the fastest of the sweep in docs/kernels.md."""


def prepare_product(
    x: torch.Tensor, n: int, packed: torch.Tensor, decoding: Decoding
) -> Callable[..., torch.Tensor]:
    """What multiplies all that look like x with a weight; to be kept, since it takes as long as a
    launch to make it.

    It is a function of x, [..., k], 16 bits, up to 64 rows, that returns [..., n]. n * k is below
    MOST_ELEMENTS, k and blocksize are multiples of 64; packed, [n * k / 2], is at a multiple of 16
    bytes.
    """
    k, out_shape = x.shape[-1], (*x.shape[:-1], n)
    m = x.numel() // k
    shape = next(
        one if decoding.state2 is not None else one.plain for one in SHAPES if m <= one.rows
    )
    programs = 2 * torch.cuda.get_device_properties(packed.device).multi_processor_count
    sizes, shift, programs = plan(shape, m, n, k, programs)
    weight = packed, *decoding.pointers(), pair_table(decoding.quant_type, x.dtype, packed.device)
    scaling = (
        (decoding.blocksize // 64).bit_length() - 1,
        1 / MULTIPLES[decoding.quant_type, x.dtype],
    )
    options = (shape,), (x.dtype, shift > 0), shape.warps, shape.registers, True
    launch = launch_product.fixed(programs, (*weight, *sizes, shift, *scaling), *options)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        x = x.clone() if x.data_ptr() % 16 else x
        out = x.new_empty(out_shape)
        parts = out.new_empty((1 << shift, m, n), dtype=torch.float32) if shift else out
        if not shape.wide:
            pairs, x = x, torch.empty_like(x)
            _launch_order(
                -(-m * k // 2 // _TILE), (pairs, x, m * k // 2), (_TILE,), None, 4, None, True
            )
        launch(x, parts)
        if shift:
            _launch_sum(
                -(-m * n // _TILE), (parts, out, m * n), (1 << shift, _TILE), x.dtype, 4, None, True
            )
        return out

    return run


def plan(shape: Shape, m: int, n: int, k: int, programs: int) -> tuple[tuple[int, ...], int, int]:
    """(m, n, k, steps, share) of a launch, log2 of the parts of k, as many as keep the programs
    busy, and programs.

    The share is product_kernel's: all units, or where it is wide the rows of a program.
    """
    if shape.wide:
        half = shape.unit_rows // 2
        share = max(-(-n // (half * programs)), 2) * half
        return (m, n, k, -(-k // shape.span), share), 0, -(-n // share)
    tiles, shift = -(-n // shape.unit_rows), 0
    while 2 << shift <= min(MOST_SPLITS, programs // tiles, k // shape.span):
        shift += 1
    return (
        (m, n, k, -(-k // (shape.span << shift)), tiles << shift),
        shift,
        min(tiles << shift, programs),
    )


@triton.jit
def _wait(index):
    """Wait for the kernel before; [index] int64 zeros."""
    text: tl.constexpr = "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b64 $0, 0;"
    return tl.inline_asm_elementwise(text, "=l,l", [index], dtype=tl.int64, is_pure=False, pack=1)


@kernel
def order_kernel(x_ptr, out_ptr, count: tl.int64, TILE: tl.constexpr):
    """[count] pairs of k in the order in which the pieces of a tile hold them: p + 8 t of 32 to 4 p
    + t.
    """
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    index += _wait(index)
    source = index // 32 * 32 + index % 4 * 8 + index % 32 // 4
    pair = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + source, mask=index < count)
    tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + index, pair, mask=index < count)


@kernel
def sum_kernel(parts_ptr, out_ptr, count: tl.int64, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """[SPLITS, count] float32 → [count], the sums."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    index += _wait(index)
    total = tl.load(parts_ptr + index, mask=index < count)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(parts_ptr + part * count + index, mask=index < count)
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=index < count)


_launch_order = Launcher(order_kernel)
_launch_sum = Launcher(sum_kernel)
