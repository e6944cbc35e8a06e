"""Chooses the kernel that multiplies x with a packed weight, by the rows of x, and launches it.

What comes before and after the kernel is here too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.codec.kernels.product.kernel import launch_product
from nf4conv.codec.kernels.tables import MULTIPLES, pair_table
from nf4conv.codec.quant_state import Addresses, Form

CAPABILITY: Final = 9
"""Major compute capability of GPUs that have `wgmma` and begin kernels early; everything was
measured on one of them.
"""

MOST_ELEMENTS: Final = 1 << 34
"""Of a weight: its pieces of 8 bytes and its blocks of 64 elements are counted in 32 bits."""

MOST_SPLITS: Final = 8
"""Parts of k in different programs, each with an output of its own."""

_TILE: Final = 512  # elements of a program of sum_kernel


@dataclass(eq=False)  # told apart by identity, which is faster
class Shape:
    """The shape of a product: product_kernel is compiled once for each.

    Triton's cache on disk tells by repr() alone for which shape a kernel was compiled, so repr has
    all attributes that the kernel reads, those that are worked out too.

    Attributes:
        rows: rows of x at most.
        ranges: ranges of k that a warp works on at once: 2 or 1 if wide, for up to 2 or 4 rows; 1
            otherwise.
        column_tiles: rows of x, divided by 8; 0 for a wide kernel.
        warps: of a program.
        slots: rows of W that a lane works on: 4 if wide, otherwise 2 or 4.
        blocks: of 64 k in a stage of a warp, for each of its ranges: 2 if wide.
        copied: blocks whose x is copied to shared memory at once; 0 if wide.
        nested: True if absmax is uint8 codes.
        early: True to begin before the kernel before has ended.
        wide: True for the wide kernel, False for the tile kernel.
        apart: rows of W from slot to slot.
        unit_rows: rows of W of a unit.
        span: k of a stage of a program.
        words: 32-bit words of codes that a lane loads in a stage.
        scales: scales that a lane loads in a stage, for its quad.
        totals: sums that a lane keeps.
        sums: sums of a wide unit, for each range of each warp.
        held: wide units whose sums wait in shared memory.
        shared_bytes: of the sums of a wide kernel; otherwise of two tiles of x, of which one is
            multiplied while the other is copied.
        parts: parts of a stage, each with a tile of x.
        registers: of a thread at most: a multiprocessor holds two programs.
        plain: the shape for absmax in float32.
    """

    rows: int
    ranges: int
    column_tiles: int
    warps: int
    slots: int
    blocks: int
    copied: int
    nested: bool = True
    early: bool = True
    wide: bool = field(init=False)
    apart: int = field(init=False)
    unit_rows: int = field(init=False)
    span: int = field(init=False)
    words: int = field(init=False)
    scales: int = field(init=False)
    totals: int = field(init=False)
    sums: int = field(init=False)
    held: int = field(init=False)
    shared_bytes: int = field(init=False)
    parts: int = field(init=False)
    registers: int = field(init=False)
    plain: "Shape" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.wide = self.column_tiles == 0
        self.apart = 8 // self.ranges
        self.unit_rows = self.apart * self.slots
        self.span = 64 * self.blocks * self.ranges
        if self.wide:  # all warps share the rows, and divide k
            self.span *= self.warps
            self.totals = 4
            self.shared_bytes = 1024 * self.warps
        else:
            self.unit_rows *= self.warps
            self.totals = 2 * self.column_tiles * self.slots
            self.shared_bytes = 2048 * self.column_tiles * self.copied
        self.words = 2 * self.slots * self.blocks
        self.scales = -(-self.slots * self.blocks // 4)
        self.sums = 128 // self.ranges**2
        self.held = 2 * self.ranges
        self.parts = self.blocks // max(self.copied, 1)
        self.registers = min(65536 // (64 * self.warps), 255)
        self.plain = replace(self, nested=False) if self.nested else self


def _wide(rows: int, ranges: int) -> Shape:
    """Return the shape of a wide kernel."""
    return Shape(rows, ranges, column_tiles=0, warps=8, slots=4, blocks=2, copied=0)


SHAPES = (
    _wide(rows=2, ranges=2),
    _wide(rows=4, ranges=1),
    Shape(rows=8, ranges=1, column_tiles=1, warps=8, slots=2, blocks=4, copied=4),
    Shape(rows=16, ranges=1, column_tiles=2, warps=8, slots=2, blocks=4, copied=4),
    Shape(rows=32, ranges=1, column_tiles=4, warps=4, slots=4, blocks=2, copied=2),
    Shape(rows=64, ranges=1, column_tiles=8, warps=4, slots=4, blocks=2, copied=1),
)
"""By rows of x, the fastest of the sweep in docs/kernels.md."""

HOPPER_SHAPES = SHAPES[:-1]
"""The same on Hopper, which has panel.py for more rows."""

OTHER_SHAPES = tuple(replace(one, early=False) for one in SHAPES)
"""The same on other GPUs."""


Product = Callable[[torch.Tensor, Addresses], torch.Tensor]
"""Multiplies x, of one shape and dtype, with a weight: x, addresses → x · Wᵀ."""


def prepare_product(
    x_shape: torch.Size, dtype: torch.dtype, device: torch.device, n: int, form: Form
) -> Product:
    """Prepare to multiply all x of one shape with all weights of one shape.

    This compiles: keep the result.

    Args:
        x_shape: [..., k], up to 64 rows. k is a multiple of 64.
        dtype: of x, float16 or bfloat16.
        device: a GPU.
        n: rows of the weights; n · k is below MOST_ELEMENTS.
        form: of the weights; the blocksize is a multiple of 64, the packed codes begin at a
            multiple of 16 bytes.

    Returns:
        A function of x and a weight that returns x · Wᵀ, [..., n] of the dtype of x.
    """
    k = x_shape[-1]
    m = x_shape.numel() // k
    out_shape = (*x_shape[:-1], n)
    shape = shape_of(m, device)
    if not form.nested:
        shape = shape.plain
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    division = divide(shape, n, k, programs=2 * processors)
    programs = division.programs
    shift = division.split_shift
    target_dtype = torch.float32 if shift > 0 else dtype
    behind = (
        pair_table(form.quant_type, dtype, device).data_ptr(),
        m,
        n,
        k,
        division.steps,
        division.share,
        shift,
        (form.blocksize // 64).bit_length() - 1,
        1 / MULTIPLES[form.quant_type, dtype],
    )
    absmax = torch.uint8 if form.nested else torch.float32
    weight_dtypes = (torch.uint8, absmax, torch.float32, torch.float32, torch.float32)
    if not form.nested:
        weight_dtypes = (torch.uint8, absmax, absmax, absmax, absmax)
    launch = launch_product.prepare(
        device,
        (dtype, target_dtype, *weight_dtypes, torch.int32, *behind[1:]),
        (shape,),
        (dtype, shift > 0),
        shape.warps,
        shape.registers,
        begins_early=shape.early,
    )
    current_stream = stream_of(device)
    if shift == 0:

        def multiply(x: torch.Tensor, weight: Addresses) -> torch.Tensor:
            x = readable(x)
            out = x.new_empty(out_shape)
            launch(programs, current_stream(), x.data_ptr(), out.data_ptr(), *weight, *behind)
            return out

        return multiply

    add = prepare_sum(device, dtype, 1 << shift, shape.early)
    parts_size = (2 * m * n) << shift  # float32, in 16-bit elements

    def multiply_parts(x: torch.Tensor, weight: Addresses) -> torch.Tensor:
        x = readable(x)
        out = x.new_empty(out_shape)
        parts = x.new_empty(parts_size)
        target = parts.data_ptr()
        stream = current_stream()
        launch(programs, stream, x.data_ptr(), target, *weight, *behind)
        add(stream, target, out.data_ptr(), m * n)
        return out

    return multiply_parts


def shape_of(rows: int, device: torch.device) -> Shape:
    """Return the shape for so many rows of x."""
    return next(one for one in shapes_of(device) if rows <= one.rows)


def shapes_of(device: torch.device) -> tuple[Shape, ...]:
    """Return the shapes for a GPU."""
    return HOPPER_SHAPES if is_hopper(device) else OTHER_SHAPES


def is_hopper(device: torch.device) -> bool:
    """Return True for a GPU that has `wgmma` and begins kernels early."""
    return torch.cuda.get_device_capability(device)[0] == CAPABILITY


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy that is contiguous and begins at a multiple of 16 bytes."""
    if not x.is_contiguous():
        x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    return x


def stream_of(device: torch.device) -> Callable[[], int]:
    """Return a function that returns the device's current stream."""
    return partial(driver.active.get_current_stream, device.index)


def prepare_sum(
    device: torch.device, dtype: torch.dtype, splits: int, early: bool
) -> Callable[[int, int, int, int], None]:
    """Prepare to add up the parts of products.

    Returns:
        A function of a stream, the address of the parts, that of the result, and its elements.
    """
    launch = _launch_sum.prepare(
        device,
        (torch.float32, dtype, 1),
        (splits, _TILE, early),
        dtype,
        num_warps=4,
        begins_early=early,
    )

    def add(stream: int, parts: int, out: int, count: int) -> None:
        launch(-(-count // _TILE), stream, parts, out, count)

    return add


class Division(NamedTuple):
    """A product's work, divided among programs; see product_kernel.

    Attributes:
        steps: stages of a unit.
        share: rows of W of a wide program; otherwise units of all programs.
        split_shift: log2 of the parts of k.
        programs: the number of programs.
    """

    steps: int
    share: int
    split_shift: int
    programs: int


def divide(shape: Shape, n: int, k: int, programs: int) -> Division:
    """Divide the product with an [n, k] weight among up to `programs` programs.

    k is divided into as many parts as keep the programs busy.
    """
    if shape.wide:
        half = shape.unit_rows // 2
        share = max(-(-n // (half * programs)), 2) * half
        return Division(-(-k // shape.span), share, 0, -(-n // share))
    tiles = -(-n // shape.unit_rows)
    most = min(MOST_SPLITS, programs // tiles, k // shape.span)
    shift = 0
    while 2 << shift <= most:
        shift += 1
    units = tiles << shift
    return Division(-(-k // (shape.span << shift)), units, shift, min(units, programs))


@triton.jit
def wait(index):
    """Wait for the kernel before, and let the next one begin; return zeros of the index's shape,
    int64, so that what uses them comes after this.
    """
    wait: tl.constexpr = "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b64 $0, 0;"
    return tl.inline_asm_elementwise(wait, "=l,l", [index], dtype=tl.int64, is_pure=False, pack=1)


@kernel
def sum_kernel(
    parts_ptr,
    out_ptr,
    count: tl.int64,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Add up the parts of a product. With EARLY it may begin before these are complete.

    Pointers to tensors:
        parts_ptr: [SPLITS, count] float32.
        out_ptr: [count] float16 or bfloat16, written.
    """
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    if EARLY:
        index += wait(index)
    total = tl.load(parts_ptr + index, mask=index < count)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(parts_ptr + part * count + index, mask=index < count)
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=index < count)


_launch_sum = Launcher(sum_kernel)
