"""torch's mean of one long absmax vector, to the bit, in two launches.

Beyond TORCH_BLOCK values torch's reduction deals the vectors of 4 to several thread blocks in turn, and one block sums
their sums (codec/mean_order.py; codec/reduction.py is the same in plain torch).
"""

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.launch import Launcher

THREADS = 512
NUM_WARPS = 4


def long_mean(values: torch.Tensor, partial: torch.Tensor, mean: torch.Tensor) -> None:
    """The mean of a vector of more than mean_order.TORCH_BLOCK values.

    Args:
        values: [n] float32, 16-byte aligned.
        partial: [blocks] float32, scratch; as many blocks as torch would use.
        mean: [1] float32, written.
    """
    blocks = partial.numel()
    _launch_partial(blocks, (values, partial, values.numel(), blocks), (), None, NUM_WARPS)
    _launch_total(1, (partial, mean, blocks, values.numel()), (), None, NUM_WARPS)


@triton.jit
def _tree(total):
    """[512] → [1]: add the upper half to the lower until one is left."""
    for level in tl.static_range(9):
        total = tl.sum(tl.reshape(total, (2, 256 >> level)), axis=0)
    return total


@triton.jit(do_not_specialize=["count", "blocks"], do_not_specialize_on_alignment=["values_ptr", "partial_ptr"])
def _partial_kernel(values_ptr, partial_ptr, count: tl.int64, blocks: tl.int64):
    """Sum the share of one of torch's thread blocks; the last count % 4 values go to the first."""
    block = tl.program_id(0).to(tl.int64)
    thread = tl.arange(0, 512)[:, None]
    part = tl.arange(0, 4)[None, :]
    whole = count // 4 * 4
    sums = tl.zeros((512, 4), tl.float32)
    for start in range(block * 2048, whole, blocks * 2048):
        index = start + thread * 4 + part
        sums += tl.load(values_ptr + index, mask=index < whole, other=0.0)
    rest = whole + thread + 0 * part
    sums += tl.load(values_ptr + rest, mask=(block == 0) & (part == 0) & (rest < count), other=0.0)
    s02, s13 = tl.split(tl.reshape(sums, (512, 2, 2)))
    s0, s2 = tl.split(s02)
    s1, s3 = tl.split(s13)
    tl.store(partial_ptr + block + tl.arange(0, 1), _tree(((s0 + s1) + s2) + s3))


@triton.jit(do_not_specialize=["blocks", "count"], do_not_specialize_on_alignment=["partial_ptr", "mean_ptr"])
def _total_kernel(partial_ptr, mean_ptr, blocks: tl.int64, count: tl.int64):
    """Sum the blocks' sums in torch's order, and multiply by the rounded reciprocal of the count."""
    thread = tl.arange(0, 512)
    total = tl.zeros((512,), tl.float32)
    for start in range(0, blocks, 512):
        total += tl.load(partial_ptr + start + thread, mask=start + thread < blocks, other=0.0)
    one = tl.full((1,), 1.0, tl.float32)
    tl.store(mean_ptr + tl.arange(0, 1), _tree(total) * tl.div_rn(one, one * count.to(tl.float32)))


_launch_partial = Launcher(_partial_kernel)
_launch_total = Launcher(_total_kernel)
