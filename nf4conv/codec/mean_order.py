"""Divides a vector among threads as torch's CUDA mean does.

codec/reduction.py and the mean kernels share this rule. Its source is ReduceConfig in
ATen/native/cuda/Reduce.cuh, torch 2.10 and later. This file imports no torch, because the engine
without torch needs the rule.
"""

from typing import Final

VECTOR: Final = 4  # elements that a thread loads at once: a float4
MAX_THREADS: Final = 512  # of a thread block
TORCH_BLOCK: Final = 130_560
"""The longest vector that is summed by one thread block: 255 vectors of 4 for each half of 512
threads.
"""

_MIN_PER_THREAD: Final = 16
_MAX_PER_THREAD: Final = 256


def threads(count: int) -> int:
    """Returns the threads of a block that sums so many values: a power of two."""
    most = count if count < 128 else min(count // VECTOR, MAX_THREADS)
    return 1 << (max(most, 1).bit_length() - 1)


def thread_blocks(count: int, resident: int) -> int:
    """Returns the number of thread blocks that share the sum of a vector, of which the GPU holds
    `resident` at once: multiprocessors times blocks on each.
    """
    per_thread = -(-count // threads(count))
    if per_thread < _MAX_PER_THREAD:
        return 1
    return max(min(resident, -(-per_thread // _MIN_PER_THREAD)), -(-per_thread // _MAX_PER_THREAD))
