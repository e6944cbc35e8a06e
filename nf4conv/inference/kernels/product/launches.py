"""Prepares products with the kernels of kernel.py and held.py, and launches them.

Other modules that launch products find here which GPU it is, and x as kernels read it.
"""

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from nf4conv.codec.kernels.internals import stream_of
from nf4conv.codec.kernels.tables import MULTIPLES, pair_table
from nf4conv.codec.quant_state import Addresses, Form
from nf4conv.inference.kernels.product.balancing import Division, plan_rows
from nf4conv.inference.kernels.product.held import launch_held
from nf4conv.inference.kernels.product.kernel import launch_product
from nf4conv.inference.kernels.product.shapes import (
    FUSED_ROWS,
    SHAPES,
    Held,
    Shape,
)
from nf4conv.inference.kernels.product.sums import prepare_sum

MOST_ELEMENTS: Final = 1 << 34
"""Of a weight: its pieces of 8 bytes and its blocks of 64 elements are counted in 32 bits."""

Product = Callable[[torch.Tensor, Addresses], torch.Tensor]
"""Multiplies x, of one shape and dtype, with a weight: x, addresses → x · Wᵀ."""


def prepare_product(
    x_shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    n: int,
    form: Form,
    chosen: tuple[Shape | Held, Division] | None = None,
) -> Product:
    """Prepares to multiply all x of one shape, [..., k] with up to 64 rows, with all weights of one
    shape and form, of n rows. This compiles: keep the result.

    k is a multiple of 64, and n · k below MOST_ELEMENTS; blocks have more than 32 elements; packed
    codes begin at a multiple of 16 bytes. `chosen` says which kernel, and how the work is divided;
    plan_rows does by default.
    """
    k = x_shape[-1]
    m = x_shape.numel() // k
    out_shape = (*x_shape[:-1], n)
    if chosen is None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        chosen = plan_rows(m, n, k, form, processors, is_hopper(device))
    shape, division = chosen
    shift = division.split_shift
    behind: tuple[float, ...] = (pair_table(form.quant_type, dtype, device).data_ptr(), m, n, k)
    behind += (*division.arguments(), block_shift_of(form))
    behind += (1 / MULTIPLES[form.quant_type, dtype],)
    pointers = (dtype, *types_of_weight(dtype, form, shift > 0), torch.int32)
    launcher = launch_held if isinstance(shape, Held) else launch_product
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
    add = prepare_sum(device, dtype, 1 << shift, shape.early) if shift > 0 else None
    parts_size = (2 * m * n) << shift  # float32, in 16-bit elements

    def multiply(x: torch.Tensor, weight: Addresses) -> torch.Tensor:
        x = readable(x)
        out = x.new_empty(out_shape)
        stream = current_stream()
        if add is None:
            launch(count, stream, x.data_ptr(), out.data_ptr(), weight, *behind)
            return out
        parts = x.new_empty(parts_size)
        target = parts.data_ptr()
        launch(count, stream, x.data_ptr(), target, weight, *behind)
        add(stream, target, out.data_ptr(), m * n)
        return out

    return multiply


class PackedWeight(NamedTuple):
    """Says of the tensors of a weight, for which Addresses are given, what kernels call them.

    Without double quantization, absmax stands in the place of the last three.
    """

    packed: Any
    absmax: Any
    code: Any
    nested_absmax: Any
    offset: Any


def types_of_weight(
    dtype: torch.dtype, form: Form, in_parts: bool
) -> tuple[torch.dtype, PackedWeight]:
    """Returns the dtypes of the result, or of its parts, and of a weight."""
    target = torch.float32 if in_parts else dtype
    absmax = torch.uint8 if form.nested else torch.float32
    others = torch.float32
    return target, PackedWeight(torch.uint8, absmax, others, others, others)


def block_shift_of(form: Form) -> int:
    """Returns the log2 of the sums of 64 k that a block has."""
    return (form.blocksize // 64).bit_length() - 1


def most_rows(device: torch.device) -> int:
    """Returns how many rows of x the wide and the tile kernel take on a GPU."""
    return FUSED_ROWS if is_hopper(device) else SHAPES[-1].rows


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Returns True for a GPU that has `wgmma` and begins kernels early: all was measured on one."""
    return torch.cuda.get_device_capability(device)[0] == 9


def readable(x: torch.Tensor) -> torch.Tensor:
    """Returns x, or a copy that is contiguous and begins at a multiple of 16 bytes."""
    if not x.is_contiguous():
        x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    return x
