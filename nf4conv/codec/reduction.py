"""torch's CUDA mean, reproduced on any device: the offset of double quantization, to the bit.

bitsandbytes takes the offset with `absmax.mean()` on the GPU. A float32 sum depends on its order,
so the order of torch's reduction kernel is part of the format. Its source is ATen/native/cuda/
Reduce.cuh, of torch 2.10 and later:

thread block  T threads, a power of two, at most 512. Thread t owns the float4 vectors t, t + T,
              t + 2T, … and sums each of the four components apart; the last 0–3 elements go to
              threads 0–2.
thread        ((c0 + c1) + c2) + c3
tree          Halves: thread t adds thread t + T/2, then t + T/4, … down to thread 0.
many blocks   From 256 elements a thread on, the vectors are dealt to C blocks in turn; the C sums
              are then summed by one block in the same way.

The mean is the sum times the rounded reciprocal of the length, not a quotient. Fewer than 128
elements are not read as vectors. The number of blocks depends on the GPU only for more than 8192
elements for each block that it can hold at once: 130 560 elements are summed alike by all GPUs,
655 360 by a T4 and anything wider, and for more the GPU meant here is an H100 or H200.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from nf4conv.codec.mean_order import MAX_THREADS, VECTOR, thread_blocks, threads

# H100 and H200: 132 multiprocessors of 2048 threads
_RESIDENT_BLOCKS: Final = 132 * (2048 // MAX_THREADS)

_Floats = npt.NDArray[np.float32]


def cuda_mean(values: torch.Tensor) -> torch.Tensor:
    """Returns the mean of [n] float32 as torch computes it on an H100, on the device of the values.
    The host computes it here. On the GPU they would start at a multiple of 16 bytes.
    """
    with np.errstate(all="ignore"):
        reciprocal = np.float32(1) / np.float32(values.numel())
        mean = _cuda_sum(values.cpu().numpy()) * reciprocal
    return torch.from_numpy(mean).to(values.device)[0]


def _cuda_sum(values: _Floats) -> _Floats:
    """Returns the sum, [1] float32."""
    count = values.size
    width = threads(count)
    if count < 128:
        return _halve(_deal(values, width))
    blocks = thread_blocks(count, _RESIDENT_BLOCKS)
    body = count - count % VECTOR
    of_components = _deal(values[:body].reshape(-1, VECTOR), blocks * width)
    of_components[: count - body, 0] += values[body:]
    c0, c1, c2, c3 = of_components.T
    of_threads = ((c0 + c1) + c2) + c3
    of_blocks = _halve(of_threads.reshape(blocks, width))[:, 0]
    if blocks == 1:
        return of_blocks
    return _halve(_deal(of_blocks, width))


def _deal(rows: _Floats, lanes: int) -> _Floats:
    """Deals rows, [n, …], to `lanes` accumulators in turn, each of which adds its own in order;
    returns their sums, [lanes, …].
    """
    totals = np.zeros((lanes, *rows.shape[1:]), dtype=np.float32)
    for start in range(0, rows.shape[0], lanes):
        dealt = rows[start : start + lanes]
        totals[: dealt.shape[0]] += dealt
    return totals


def _halve(lanes: _Floats) -> _Floats:
    """Adds the upper half of the last dimension to the lower one until one element is left.

    The dimension is a power of two.
    """
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes
