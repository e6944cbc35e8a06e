"""torch's mean of absmax vectors, to the bit: many short ones in one launch, a long one in two.

Up to TORCH_BLOCK values torch reduces with one thread block, in an order that `mean_kernel`
repeats. Beyond, it deals the vectors of 4 to several thread blocks in turn, and one block sums
their sums. codec/reduction.py describes the order, that of torch 2.10 and later, and repeats it in
numpy; codec/mean_order.py has the number of threads and of blocks.
"""

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.launch import kernel
from nf4conv.codec.kernels.slots import split_words
from nf4conv.codec.mean_order import MAX_THREADS, TORCH_BLOCK

NUM_WARPS = 4
_TORCH_BLOCK = tl.constexpr(TORCH_BLOCK)


def resident_blocks(device: torch.device) -> int:
    """Returns the thread blocks of torch's mean that a GPU holds at once, for
    mean_order.thread_blocks.
    """
    properties = torch.cuda.get_device_properties(device)
    blocks_each = properties.max_threads_per_multi_processor // MAX_THREADS
    return int(properties.multi_processor_count * blocks_each)


@triton.jit
def _dealt(values_ptr, count, first, step, threads):
    """Deals vectors of 4 values to threads: thread t adds vectors first + t, first + t + step, … to
    four sums.

    The last count % 4 values go to the first sums of the threads from vector 0 on. Returns the
    sums, [512, 4].
    """
    thread = tl.arange(0, 512)[:, None]
    part = tl.arange(0, 4)[None, :]
    whole = count // 4 * 4
    sums = tl.zeros((512, 4), tl.float32)
    for start in range(first * 4, whole, step * 4):
        index = start + thread * 4 + part
        sums += tl.load(values_ptr + index, mask=(thread < threads) & (index < whole), other=0.0)
    rest = whole + thread + 0 * part
    is_own = (first == 0) & (part == 0) & (rest < count)
    return sums + tl.load(values_ptr + rest, mask=is_own, other=0.0)


@triton.jit
def _halve(total):
    """Adds the upper half to the lower until one is left: [512] → [1]."""
    for level in tl.static_range(9):
        total = tl.sum(tl.reshape(total, (2, 256 >> level)), axis=0)
    return total


@triton.jit
def _sum_parts(sums):
    """Adds up ((s0 + s1) + s2) + s3 of each thread, then halves: [512, 4] → [1]."""
    s0, s1, s2, s3 = split_words(sums)
    return _halve(((s0 + s1) + s2) + s3)


@triton.jit
def _times_reciprocal(total, count):
    """Returns the mean of a sum, [1], as torch does: times the rounded reciprocal of the count."""
    one = tl.full((1,), 1.0, tl.float32)
    return total * tl.div_rn(one, one * count.to(tl.float32))


@kernel
def mean_kernel(table_ptr, means_ptr, tensors: tl.int64):
    """Takes the mean of a vector of at most TORCH_BLOCK values; longer ones are left alone.

    Each of `threads` threads adds every threads-th vector of 4 into 4 sums; the last count % 4
    values go to the first sums of the first threads. Below 128 values a thread adds the values at
    its own index and at index + threads.

    Pointers to tensors:
        table_ptr: [3, tensors] int64: address of the values (float32, 16-byte aligned), count,
            threads.
        means_ptr: [tensors] float32, written.
    """
    tensor = tl.program_id(0)
    values_ptr = tl.load(table_ptr + tensor).to(tl.pointer_type(tl.float32))
    count = tl.load(table_ptr + tensors + tensor)
    threads = tl.load(table_ptr + 2 * tensors + tensor)
    if count <= _TORCH_BLOCK:
        if count < 128:
            thread = tl.arange(0, 512)[:, None]
            own = thread + tl.arange(0, 4)[None, :] * threads
            sums = tl.load(values_ptr + own, mask=(thread < threads) & (own < count), other=0.0)
        else:
            sums = _dealt(values_ptr, count, 0, threads, threads)
        mean_ptr = means_ptr + tensor + tl.arange(0, 1)
        tl.store(mean_ptr, _times_reciprocal(_sum_parts(sums), count))


@kernel
def partial_kernel(values_ptr, partial_ptr, count: tl.int64, blocks: tl.int64):
    """Sums the share of one of torch's thread blocks; the last count % 4 values go to the first.

    Pointers to tensors:
        values_ptr: [count] float32, 16-byte aligned.
        partial_ptr: [blocks] float32, written.
    """
    block = tl.program_id(0).to(tl.int64)
    sums = _dealt(values_ptr, count, block * 512, blocks * 512, 512)
    tl.store(partial_ptr + block + tl.arange(0, 1), _sum_parts(sums))


@kernel
def total_kernel(partial_ptr, mean_ptr, blocks: tl.int64, count: tl.int64):
    """Sums the blocks' sums in torch's order, and multiplies by the reciprocal of the count.

    Pointers to tensors:
        partial_ptr: [blocks] float32.
        mean_ptr: [1] float32, written.
    """
    thread = tl.arange(0, 512)
    total = tl.zeros((512,), tl.float32)
    for start in range(0, blocks, 512):
        total += tl.load(partial_ptr + start + thread, mask=start + thread < blocks, other=0.0)
    tl.store(mean_ptr + tl.arange(0, 1), _times_reciprocal(_halve(total), count))
