"""Chooses the kernel that multiplies x with a packed weight, by the rows of x, and launches it.

What comes before and after the kernel is here too.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.codec.kernels.product.held import Held, launch_held
from nf4conv.codec.kernels.product.kernel import launch_product
from nf4conv.codec.kernels.product.shapes import (
    FUSED_ROWS,
    SHAPES,
    Shape,
    divide,
    is_short,
    shape_for,
)
from nf4conv.codec.kernels.product.shapes import MOST_SPLITS as MOST_SPLITS
from nf4conv.codec.kernels.tables import MULTIPLES, pair_table
from nf4conv.codec.quant_state import Addresses, Form

CAPABILITY: Final = 9
"""Major compute capability of GPUs that have `wgmma` and begin kernels early; everything was
measured on one of them.
"""

MOST_ELEMENTS: Final = 1 << 34
"""Of a weight: its pieces of 8 bytes and its blocks of 64 elements are counted in 32 bits."""

_TILE: Final = 512  # elements of a program of sum_kernel


Product = Callable[[torch.Tensor, Addresses], torch.Tensor]
"""Multiplies x, of one shape and dtype, with a weight: x, addresses → x · Wᵀ."""


def prepare_product(
    x_shape: torch.Size, dtype: torch.dtype, device: torch.device, n: int, form: Form
) -> Product:
    """Prepare to multiply all x of one shape with all weights of one shape.

    This compiles: keep the result.

    Args:
        x_shape: [..., k], up to 64 rows. k is a multiple of 32.
        dtype: of x, float16 or bfloat16.
        device: a GPU.
        n: rows of the weights; n · k is below MOST_ELEMENTS.
        form: of the weights; the packed codes begin at a multiple of 16 bytes.

    Returns:
        A function of x and a weight that returns x · Wᵀ, [..., n] of the dtype of x.
    """
    k = x_shape[-1]
    m = x_shape.numel() // k
    out_shape = (*x_shape[:-1], n)
    shape, programs = shape_and_programs(m, n, k, form, device)
    division = divide(shape, n, k, programs)
    behind: tuple[float, ...] = (pair_table(form.quant_type, dtype, device).data_ptr(), m, n, k)
    behind += (*division.arguments(), block_shift_of(k, form))
    behind += (1 / MULTIPLES[form.quant_type, dtype],)
    absmax = torch.uint8 if form.nested else torch.float32
    others = torch.float32
    shift = division.split_shift
    target_dtype = torch.float32 if shift > 0 else dtype
    launcher = launch_held if isinstance(shape, Held) else launch_product
    pointers = (dtype, target_dtype, torch.uint8, absmax, others, others, others, torch.int32)
    launch = launcher.prepare(
        device,
        (*pointers, *behind[1:]),
        (shape,),
        (dtype, shift > 0),
        shape.warps,
        shape.registers,
        begins_early=shape.early,
    )
    current_stream = stream_of(device)
    count = division.programs
    if shift == 0:

        def multiply(x: torch.Tensor, weight: Addresses) -> torch.Tensor:
            x = readable(x)
            out = x.new_empty(out_shape)
            launch(count, current_stream(), x.data_ptr(), out.data_ptr(), *weight, *behind)
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
        launch(count, stream, x.data_ptr(), target, *weight, *behind)
        add(stream, target, out.data_ptr(), m * n)
        return out

    return multiply_parts


def shape_and_programs(
    m: int, n: int, k: int, form: Form, device: torch.device
) -> tuple[Shape | Held, int]:
    """Return the shape for m rows of x and an [n, k] weight, and how many programs a GPU runs at
    once.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    shape = shape_for(m, n, k, is_short(k, form), form.nested, is_hopper(device))
    return shape, 2 * processors


def block_shift_of(k: int, form: Form) -> int:
    """Return the log2 of the sums, of 32 or 64 k, that a block has."""
    return (form.blocksize // (32 if is_short(k, form) else 64)).bit_length() - 1


def most_rows(device: torch.device) -> int:
    """Return how many rows of x the wide and the tile kernel take on a GPU."""
    return FUSED_ROWS if is_hopper(device) else SHAPES[-1].rows


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
