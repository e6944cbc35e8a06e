"""x · Wᵀ for two or three weights in one launch: projections of the same x, such as q, k and v.

Each program works for one of the weights, and does what it would do if that were alone. Together
they fill the GPU better than one after the other.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.codec.kernels.tables import MULTIPLES, pair_table
from nf4conv.codec.quant_state import Addresses, Form
from nf4conv.inference.kernels.product.dividing import Division
from nf4conv.inference.kernels.product.held import multiply_held
from nf4conv.inference.kernels.product.kernel import multiply_units
from nf4conv.inference.kernels.product.launches import (
    block_shift_of,
    plan_for,
    readable,
    stream_of,
    types_of_weight,
)
from nf4conv.inference.kernels.product.shapes import Held, Shape
from nf4conv.inference.kernels.product.sums import MOST_RESULTS, prepare_group_sum

MOST_WEIGHTS: Final = MOST_RESULTS
"""The largest group that one launch multiplies."""

ProductOfGroup = Callable[[torch.Tensor, Sequence[Addresses]], list[torch.Tensor]]
"""Multiplies x, of one shape and dtype, with weights: x, their addresses → x · Wᵀ of each."""


def prepare_group(
    x_shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    rows: tuple[int, ...],
    form: Form,
    chosen: tuple[Shape | Held, list[Division]] | None = None,
) -> ProductOfGroup:
    """Prepares to multiply all x of one shape with all groups of weights of some shapes.

    Args:
        x_shape: [..., k], up to 32 rows.
        dtype: of x, float16 or bfloat16.
        device: a GPU.
        rows: of two or three weights, which have k columns.
        form: of the weights; the packed codes begin at a multiple of 16 bytes.
        chosen: which kernel, and how the work is divided; by default what plan_rows says.

    Returns:
        A function of x and the weights that returns x · Wᵀ of each, [..., its rows].
    """
    k = x_shape[-1]
    m = x_shape.numel() // k
    shape, divisions = chosen or plan_for(m, rows, k, form, device)
    shift = divisions[0].split_shift
    behind: list[float] = [pair_table(form.quant_type, dtype, device).data_ptr(), m, k]
    behind += _work_of_each(rows, divisions)
    behind += [divisions[0].steps, shift, block_shift_of(k, form)]
    behind += [1 / MULTIPLES[form.quant_type, dtype]]
    pointers = (dtype, *types_of_weight(dtype, form, shift > 0) * MOST_WEIGHTS, torch.int32)
    launch = launch_group.prepare(
        device,
        (*pointers, *behind[1:]),
        (shape,),
        (dtype, shift > 0),
        shape.warps,
        shape.registers,
        begins_early=shape.early,
    )
    count = sum(one.programs for one in divisions)
    current_stream = stream_of(device)
    out_shapes = [(*x_shape[:-1], n) for n in rows]
    missing = MOST_WEIGHTS - len(rows)

    def launch_all(
        stream: int, x: torch.Tensor, targets: Sequence[int], weights: Sequence[Addresses]
    ) -> None:
        addresses: list[int] = []
        for target, weight in zip(targets, weights, strict=True):
            addresses += [target, *weight]
        addresses += addresses[-6:] * missing
        launch(count, stream, x.data_ptr(), *addresses, *behind)

    if shift == 0:

        def multiply(x: torch.Tensor, weights: Sequence[Addresses]) -> list[torch.Tensor]:
            x = readable(x)
            results = [x.new_empty(one) for one in out_shapes]
            launch_all(current_stream(), x, [one.data_ptr() for one in results], weights)
            return results

        return multiply

    add = prepare_group_sum(device, dtype, 1 << shift, shape.early, [m * n for n in rows])
    parts_size = (2 * m * sum(rows)) << shift  # float32, in 16-bit elements
    places = [(4 * m * before) << shift for before in accumulate(rows[:-1], initial=0)]

    def multiply_parts(x: torch.Tensor, weights: Sequence[Addresses]) -> list[torch.Tensor]:
        x = readable(x)
        results = [x.new_empty(one) for one in out_shapes]
        parts = x.new_empty(parts_size)
        first = parts.data_ptr()
        stream = current_stream()
        launch_all(stream, x, [first + place for place in places], weights)
        add(stream, first, [one.data_ptr() for one in results])
        return results

    return multiply_parts


def _work_of_each(rows: tuple[int, ...], divisions: list[Division]) -> list[int]:
    """Returns for each weight the numbers that group_kernel takes: first, n, share and longer.

    A weight that is not there has those of the last one, but no programs: its first program is the
    number of all.
    """
    work: list[int] = []
    first = 0
    for n, one in zip(rows, divisions, strict=True):
        work += [first, n, one.share, one.longer]
        first += one.programs
    for _ in range(MOST_WEIGHTS - len(rows)):
        work += [first, *work[-3:]]
    return work


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
    """Computes for each of three weights what product_kernel or held_kernel computes for one.

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
    """Returns what the weight has for which a program works; a weight's first program is its
    seventh.
    """
    own = ()
    for i in tl.static_range(10):
        of_two = tl.where(program >= two[6], two[i], one[i])
        own = own + (tl.where(program >= three[6], three[i], of_two),)
    return own
