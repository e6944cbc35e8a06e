"""Adds up the parts of products whose k was divided: a kernel behind the one that multiplies.

Parts are float32. A program adds up TILE elements of a result and rounds once.
"""

from collections.abc import Callable
from typing import Final

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.launch import Launcher, kernel

MOST_RESULTS: Final = 3
"""Products whose parts one launch adds up at most: those of q, k and v."""

_TILE: Final = 512
"""Elements that a program adds up: four for each thread of its four warps."""


def prepare_sum(
    device: torch.device, dtype: torch.dtype, splits: int, early: bool
) -> Callable[[int, int, int, int], None]:
    """Prepares to add up the parts of one product at a time.

    Args:
        device: a GPU.
        dtype: of the result, float16 or bfloat16.
        splits: parts of a product.
        early: True to begin before the kernel before has ended.

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


def prepare_group_sum(
    device: torch.device, dtype: torch.dtype, splits: int, early: bool, counts: list[int]
) -> Callable[[int, int, list[int]], None]:
    """Prepares to add up the parts of several products in one launch.

    Args:
        device: a GPU.
        dtype: of the results, float16 or bfloat16.
        splits: parts of each product.
        early: True to begin before the kernel before has ended.
        counts: elements of each result; MOST_RESULTS of them at most.

    Returns:
        A function of a stream, the address of all parts, and those of the results.
    """
    missing = MOST_RESULTS - len(counts)
    firsts = [0]
    for count in counts:
        firsts.append(firsts[-1] - (-count // _TILE))
    programs = firsts[-1]
    firsts += [programs]
    behind = [*counts, *counts[-1:] * missing, *firsts[1:MOST_RESULTS]]
    pointers = (torch.float32, dtype, dtype, dtype)
    launch = _launch_group_sum.prepare(
        device,
        (*pointers, *behind),
        (splits, _TILE, early),
        dtype,
        num_warps=4,
        begins_early=early,
    )

    def add(stream: int, parts: int, results: list[int]) -> None:
        launch(programs, stream, parts, *results, *results[-1:] * missing, *behind)

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
    _add_parts(parts_ptr, 0, out_ptr, count, tl.program_id(0), SPLITS, TILE, EARLY)


_launch_sum = Launcher(sum_kernel)


@kernel
def sum_group_kernel(
    parts_ptr,
    out_ptr,
    second_out_ptr,
    third_out_ptr,
    count: tl.int64,
    second_count: tl.int64,
    third_count: tl.int64,
    second_first: tl.int32,
    third_first: tl.int32,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Adds up the parts of products. With EARLY it may begin before these are complete.

    Pointers to tensors:
        parts_ptr: float32, for each product [SPLITS, its count].
        out_ptr, second_out_ptr, third_out_ptr: float16 or bfloat16, of so many, written.

    Scalars:
        count, second_count, third_count: elements of a result.
        second_first, third_first: the first programs of the second and the third.
    """
    program = tl.program_id(0)
    is_second = program >= second_first
    is_third = program >= third_first
    before = tl.where(is_third, count + second_count, tl.where(is_second, count, 0))
    own = tl.where(is_third, third_count, tl.where(is_second, second_count, count))
    to_ptr = tl.where(is_third, third_out_ptr, tl.where(is_second, second_out_ptr, out_ptr))
    program -= tl.where(is_third, third_first, tl.where(is_second, second_first, 0))
    _add_parts(parts_ptr, before * SPLITS, to_ptr, own, program, SPLITS, TILE, EARLY)


_launch_group_sum = Launcher(sum_group_kernel)


@triton.jit
def _add_parts(
    parts_ptr,
    first,
    out_ptr,
    count,
    tile,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Adds up one tile of a product's parts, [SPLITS, count] from element `first` on; stores it."""
    index = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    if EARLY:
        index += wait(index)
    from_ptr = parts_ptr + first
    total = tl.load(from_ptr + index, mask=index < count)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(from_ptr + part * count + index, mask=index < count)
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=index < count)


@triton.jit
def wait(index):
    """Waits for the kernel before, and lets the next one begin; returns zeros of the index's shape,
    int64, so that what uses them comes after this.
    """
    wait: tl.constexpr = "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b64 $0, 0;"
    return tl.inline_asm_elementwise(wait, "=l,l", [index], dtype=tl.int64, is_pure=False, pack=1)
