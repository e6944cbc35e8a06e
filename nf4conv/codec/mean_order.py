"""How torch's CUDA mean divides a vector among threads: the rule that codec/reduction.py and the
mean kernels share.

From ReduceConfig in ATen/native/cuda/Reduce.cuh, torch 2.10 and later. No torch here.
"""

from typing import Final

VECTOR: Final = 4
MAX_THREADS: Final = 512
TORCH_BLOCK: Final = 130_560
"""The longest vector that is summed by one thread block: 255 vectors of 4 for each half of 512
threads.
"""

_MIN_PER_THREAD: Final = 16
_MAX_PER_THREAD: Final = 256


def threads(count: int) -> int:
    """Threads of a block: a power of two."""
    lanes = count if count < 128 else min(count // VECTOR, MAX_THREADS)
    return 1 << (max(lanes, 1).bit_length() - 1)


def thread_blocks(count: int, resident: int) -> int:
    """How many thread blocks share the sum of so many values.

    `resident` are the blocks of that many threads that the card holds at once: multiprocessors
    times blocks on each.
    """
    per_thread = -(-count // threads(count))
    if per_thread < _MAX_PER_THREAD:
        return 1
    return max(min(resident, -(-per_thread // _MIN_PER_THREAD)), -(-per_thread // _MAX_PER_THREAD))
