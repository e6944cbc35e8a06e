"""Adds up the parts of products whose k was divided: a kernel behind the one that multiplies.

Parts are float32. A program adds up TILE elements of a result and rounds once.
"""

from collections.abc import Callable
from typing import Final

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.launch import Launcher, kernel

_TILE: Final = 512
"""Elements that a program adds up: four for each thread of its four warps."""


def prepare_sum(
    device: torch.device, dtype: torch.dtype, splits: int, early: bool
) -> Callable[[int, int, int, int], None]:
    """Prepares to add up the parts of one product at a time. `early` begins before the kernel
    before has ended.

    Returns a function of a stream, the address of the parts, that of the result, and its elements.
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


@kernel
def sum_kernel(
    parts_ptr,
    out_ptr,
    count: tl.int64,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Adds up the parts of a product. With EARLY it may begin before these are complete.

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


@triton.jit
def wait(index):
    """Waits for the kernel before, and lets the next one begin; returns zeros of the index's shape,
    int64, so that what uses them comes after this.
    """
    wait: tl.constexpr = "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b64 $0, 0;"
    return tl.inline_asm_elementwise(wait, "=l,l", [index], dtype=tl.int64, is_pure=False, pack=1)
