"""x · Wᵀ for two or three weights in one launch: projections of the same x, such as q, k and v.

Each program works for one of the weights, and does what it would do if that were alone. Together
they fill the GPU better than one after the other.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.codec.kernels.product.held import multiply_held
from nf4conv.codec.kernels.product.kernel import multiply_units
from nf4conv.codec.kernels.product.launches import (
    block_shift_of,
    is_hopper,
    readable,
    shape_and_programs,
    stream_of,
    wait,
)
from nf4conv.codec.kernels.product.shapes import divide_group
from nf4conv.codec.kernels.tables import MULTIPLES, pair_table
from nf4conv.codec.quant_state import Addresses, Form

MOST_WEIGHTS: Final = 3
"""The largest group that one launch multiplies."""

_TILE: Final = 512  # elements of a program of sum_group_kernel

ProductOfGroup = Callable[[torch.Tensor, Sequence[Addresses]], list[torch.Tensor]]
"""Multiplies x, of one shape and dtype, with weights: x, their addresses → x · Wᵀ of each."""


def prepare_group(
    x_shape: torch.Size, dtype: torch.dtype, device: torch.device, rows: tuple[int, ...], form: Form
) -> ProductOfGroup:
    """Prepare to multiply all x of one shape with all groups of weights of some shapes.

    Args:
        x_shape: [..., k], up to 32 rows.
        dtype: of x, float16 or bfloat16.
        device: a GPU.
        rows: of two or three weights, which have k columns.
        form: of the weights; the packed codes begin at a multiple of 16 bytes.
    """
    k = x_shape[-1]
    m = x_shape.numel() // k
    shape, programs = shape_and_programs(m, sum(rows), k, form, device)
    divisions = divide_group(shape, rows, k, programs)
    shift = divisions[0].split_shift
    filled = [*rows, *rows[-1:] * (MOST_WEIGHTS - len(rows))]
    each = [*divisions, *divisions[-1:] * (MOST_WEIGHTS - len(rows))]
    firsts = [0]
    for one in divisions:
        firsts.append(firsts[-1] + one.programs)
    count = firsts[-1]
    firsts += [count]
    behind: list[float] = [pair_table(form.quant_type, dtype, device).data_ptr(), m, k]
    for first, n, one in zip(firsts, filled, each, strict=False):
        behind += [first, n, one.share, one.longer]
    behind += [divisions[0].steps, shift, block_shift_of(k, form)]
    behind += [1 / MULTIPLES[form.quant_type, dtype]]
    absmax = torch.uint8 if form.nested else torch.float32
    target = torch.float32 if shift > 0 else dtype
    others = (torch.float32,) * 3
    pointers = (target, torch.uint8, absmax, *others) * MOST_WEIGHTS
    launch = launch_group.prepare(
        device,
        (dtype, *pointers, torch.int32, *behind[1:]),
        (shape,),
        (dtype, shift > 0),
        shape.warps,
        shape.registers,
        begins_early=shape.early,
    )
    current_stream = stream_of(device)
    add = _prepare_sum(device, dtype, 1 << shift, [m * n for n in rows])
    out_shapes = [(*x_shape[:-1], n) for n in rows]
    parts_size = (2 * m * sum(rows)) << shift if shift > 0 else 0  # float32, in 16-bit elements
    part_sizes = [(4 * m * n) << shift for n in rows]
    missing = MOST_WEIGHTS - len(rows)

    def multiply(x: torch.Tensor, weights: Sequence[Addresses]) -> list[torch.Tensor]:
        x = readable(x)
        results = [x.new_empty(one) for one in out_shapes]
        targets = [one.data_ptr() for one in results]
        parts = x.new_empty(parts_size)
        if shift > 0:
            targets = [parts.data_ptr()]
            for size in part_sizes[:-1]:
                targets.append(targets[-1] + size)
        addresses: list[int] = []
        for target, weight in zip(targets, weights, strict=True):
            addresses += [target, *weight]
        addresses += addresses[-6:] * missing
        stream = current_stream()
        launch(count, stream, x.data_ptr(), *addresses, *behind)
        if shift > 0:
            add(stream, parts.data_ptr(), [one.data_ptr() for one in results])
        return results

    return multiply


def _prepare_sum(
    device: torch.device, dtype: torch.dtype, splits: int, counts: list[int]
) -> Callable[[int, int, list[int]], None]:
    """Prepare to add up the parts of a group's products.

    Returns:
        A function of a stream, the address of the parts, and those of the results.
    """
    if splits == 1:
        return lambda *_: None
    early = is_hopper(device)
    missing = MOST_WEIGHTS - len(counts)
    firsts = [0]
    for count in counts:
        firsts.append(firsts[-1] - (-count // _TILE))
    programs = firsts[-1]
    firsts += [programs]
    behind = [*counts, *counts[-1:] * missing, *firsts[1:MOST_WEIGHTS]]
    launch = _launch_sum_group.prepare(
        device,
        (torch.float32, dtype, dtype, dtype, *behind),
        (splits, _TILE, early),
        dtype,
        num_warps=4,
        begins_early=early,
    )

    def add(stream: int, parts: int, results: list[int]) -> None:
        launch(programs, stream, parts, *results, *results[-1:] * missing, *behind)

    return add


@kernel
def group_kernel(
    x_ptr,
    out_ptr,
    packed_ptr,
    absmax_ptr,
    code_ptr,
    nested_absmax_ptr,
    offset_ptr,
    second_out_ptr,
    second_packed_ptr,
    second_absmax_ptr,
    second_code_ptr,
    second_nested_absmax_ptr,
    second_offset_ptr,
    third_out_ptr,
    third_packed_ptr,
    third_absmax_ptr,
    third_code_ptr,
    third_nested_absmax_ptr,
    third_offset_ptr,
    pair_ptr,
    m: tl.int32,
    k: tl.int32,
    first: tl.int32,
    n: tl.int32,
    share: tl.int32,
    longer: tl.int32,
    second_first: tl.int32,
    second_n: tl.int32,
    second_share: tl.int32,
    second_longer: tl.int32,
    third_first: tl.int32,
    third_n: tl.int32,
    third_share: tl.int32,
    third_longer: tl.int32,
    steps: tl.int32,
    split_shift: tl.int32,
    block_shift: tl.int32,
    norm: tl.float32,
    SHAPE: tl.constexpr,
):
    """Compute for each of three weights what product_kernel or held_kernel computes for one.

    Pointers and scalars are theirs, for each weight; a weight's programs begin with its `first`,
    and `longer` is the number of its programs where product_kernel asks for that.
    """
    one = (out_ptr, packed_ptr, absmax_ptr, code_ptr, nested_absmax_ptr, offset_ptr)
    one = one + (first, n, share, longer)
    two = (second_out_ptr, second_packed_ptr, second_absmax_ptr, second_code_ptr)
    two = two + (second_nested_absmax_ptr, second_offset_ptr)
    two = two + (second_first, second_n, second_share, second_longer)
    three = (third_out_ptr, third_packed_ptr, third_absmax_ptr, third_code_ptr)
    three = three + (third_nested_absmax_ptr, third_offset_ptr)
    three = three + (third_first, third_n, third_share, third_longer)
    program = tl.program_id(0)
    own = _chosen(program, one, two, three)
    pointers = own[1:6] + (pair_ptr,)
    program -= own[6]
    if SHAPE.holds_x:
        work = (m, own[7], k, own[8], own[9], block_shift, norm)
        multiply_held(x_ptr, own[0], pointers, work, program, SHAPE)
    else:
        work = (m, own[7], k, steps, own[8], own[9], split_shift, block_shift, norm)
        multiply_units(x_ptr, own[0], pointers, work, program, SHAPE)


launch_group = Launcher(group_kernel)


@triton.jit
def _chosen(program, one, two, three):
    """Return what the weight has for which a program works; a weight's first program is its
    seventh.
    """
    own = ()
    for i in tl.static_range(10):
        of_two = tl.where(program >= two[6], two[i], one[i])
        own = own + (tl.where(program >= three[6], three[i], of_two),)
    return own


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
    """Add up the parts of products. With EARLY it may begin before these are complete.

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
    index = program.to(tl.int64) * TILE + tl.arange(0, TILE)
    if EARLY:
        index += wait(index)
    from_ptr = parts_ptr + before * SPLITS
    total = tl.load(from_ptr + index, mask=index < own)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(from_ptr + part * own + index, mask=index < own)
    tl.store(to_ptr + index, total.to(to_ptr.dtype.element_ty), mask=index < own)


_launch_sum_group = Launcher(sum_group_kernel)
