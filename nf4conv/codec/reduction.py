"""torch's CUDA mean, reproduced on any device: the offset of double quantization, to the bit.

bitsandbytes takes the offset with `absmax.mean()` on the GPU. A float32 sum depends on its order,
so the order of torch's reduction kernel (ATen/native/cuda/Reduce.cuh, CUDA, torch 2.10 and later)
is part of the format:

    thread block    T threads, a power of two, at most 512; thread t owns the float4 vectors t, t + T, t + 2T, …
                    and sums each of the four components apart; the last 0–3 elements go to threads
                    0–2
    thread          ((c0 + c1) + c2) + c3
    tree            halves: thread t adds thread t + T/2, then t + T/4, … down to thread 0
    many blocks     from 256 elements a thread on, the vectors are dealt to C blocks in turn; the C sums are then
                    summed by one block in the same way

and the mean is the sum times the rounded reciprocal of the length, not a quotient. Fewer than 128
elements are not read as vectors. How many blocks there are depends on the GPU, if only for more
than 8192 elements a block that it can hold at once: 130 560 elements are summed alike by all, 655
360 by a T4 and anything wider, and for more the card meant here is an H100 or H200.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from nf4conv.codec.mean_order import MAX_THREADS, VECTOR, thread_blocks, threads

_RESIDENT_BLOCKS: Final = 132 * (
    2048 // MAX_THREADS
)  # H100 and H200: 132 multiprocessors of 2048 threads

_Floats = npt.NDArray[np.float32]


def cuda_mean(values: torch.Tensor) -> torch.Tensor:
    """0-d float32: the mean of [n] float32 as torch computes it on an H100. Computed on the host.

    The values are contiguous, and on the GPU they would start at a multiple of 16 bytes.
    """
    with np.errstate(all="ignore"):
        mean = _cuda_sum(values.cpu().numpy()) * (np.float32(1) / np.float32(values.numel()))
    return torch.from_numpy(mean).to(values.device)[0]


def _cuda_sum(values: _Floats) -> _Floats:
    """[1], the sum."""
    count = values.size
    if count < 128:
        return _halve(_deal(values, threads(count)))
    width, blocks = threads(count), thread_blocks(count, _RESIDENT_BLOCKS)
    body = count - count % VECTOR
    lanes = _deal(values[:body].reshape(-1, VECTOR), blocks * width)
    lanes[: count - body, 0] += values[body:]
    sums = ((lanes[:, 0] + lanes[:, 1]) + lanes[:, 2]) + lanes[:, 3]
    staged = _halve(sums.reshape(blocks, width))[:, 0]
    return staged if blocks == 1 else _halve(_deal(staged, width))


def _deal(rows: _Floats, lanes: int) -> _Floats:
    """Deal rows to `lanes` accumulators in turn, each adding its own in order: [n, …] → [lanes, …]."""
    totals = np.zeros((lanes, *rows.shape[1:]), dtype=np.float32)
    for start in range(0, rows.shape[0], lanes):
        dealt = rows[start : start + lanes]
        totals[: dealt.shape[0]] += dealt
    return totals


def _halve(lanes: _Floats) -> _Floats:
    """Add the upper half of the last dimension, a power of two, to the lower one until one element
    is left.
    """
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes
