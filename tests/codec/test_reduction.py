"""The mean in the order of torch's CUDA kernel."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from weights import spread_values

from nf4conv.codec.reduction import cuda_mean


def wide_values(count: int) -> np.ndarray:
    """Returns numbers of either sign over 24 binades: hardly any two orders give the same sum."""
    generator = np.random.default_rng(count)
    signed = generator.random(count, dtype=np.float32) - np.float32(0.5)
    return np.ldexp(signed, generator.integers(-12, 12, count, dtype=np.int32))


def lane_by_lane(values: np.ndarray) -> np.float32:
    """Adds 128 … 130 560 elements one CUDA thread after the other, in the order of Reduce.cuh."""
    count = len(values)
    threads = min(512, 2 ** int(np.log2(count // 4)))
    lanes = []
    for thread in range(threads):
        sums = [np.float32(0)] * 4
        for vector in range(thread, count // 4, threads):
            for i in range(4):
                sums[i] += values[4 * vector + i]
        if count // 4 * 4 + thread < count:
            sums[0] += values[count // 4 * 4 + thread]
        lanes.append(((sums[0] + sums[1]) + sums[2]) + sums[3])
    distance = threads // 2
    while distance:
        for thread in range(distance):
            lanes[thread] += lanes[thread + distance]
        distance //= 2
    return lanes[0]


@pytest.mark.parametrize("count", [128, 129, 255, 1000, 2047, 2051, 5003])
def test_one_thread_block_adds_lane_by_lane(count):
    values = wide_values(count)
    expected = lane_by_lane(values) * (np.float32(1) / np.float32(count))
    assert cuda_mean(torch.from_numpy(values)).item() == expected


def block_sum(values: np.ndarray, block: int, blocks: int) -> np.float32:
    """Adds what one of several thread blocks, 512 threads each, takes of over 130 560 elements."""
    lanes = np.zeros(512, dtype=np.float32)
    vectors = values[: len(values) // 4 * 4].reshape(-1, 4)
    tail = values[len(vectors) * 4 :]
    for thread in range(512):
        own = vectors[block * 512 + thread :: blocks * 512]
        sums = (
            np.add.accumulate(own, axis=0, dtype=np.float32)[-1]
            if len(own)
            else np.zeros(4, dtype=np.float32)
        )
        if block == 0 and thread < len(tail):
            sums[0] += tail[thread]
        lanes[thread] = ((sums[0] + sums[1]) + sums[2]) + sums[3]
    return halved(lanes)


def halved(lanes: np.ndarray) -> np.float32:
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


@pytest.mark.parametrize(
    ("count", "blocks"), [(130_561, 16), (131_075, 17), (1_000_003, 123), (4_400_001, 528)], ids=str
)
def test_many_thread_blocks_add_one_by_one(count, blocks):
    values = wide_values(count)
    staged = np.zeros(-(-blocks // 512) * 512, dtype=np.float32)
    staged[:blocks] = [block_sum(values, block, blocks) for block in range(blocks)]
    total = halved(np.add.accumulate(staged.reshape(-1, 512), axis=0)[-1])
    assert cuda_mean(torch.from_numpy(values)).item() == total * (np.float32(1) / np.float32(count))


@pytest.mark.parametrize("count", [1, 2, 3, 31, 33, 100, 127])
def test_few_elements_are_halved(count):
    values = wide_values(count)
    width = 2 ** int(np.log2(count))
    lanes = [
        values[i] + values[i + width] if i + width < count else values[i] for i in range(width)
    ]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    assert cuda_mean(torch.from_numpy(values)).item() == lanes[0] * (
        np.float32(1) / np.float32(count)
    )


@pytest.mark.parametrize("count", [1, 500, 130_560, 130_561, 1_000_003, 5_000_001])
def test_it_is_the_mean(count):
    values = spread_values(count)
    exact = Fraction(int((values.double() * 2**27).sum()), count * 2**27)
    assert abs(Fraction(cuda_mean(values).item()) / exact - 1) < Fraction(1, 2**20)


def test_infinity_stays():
    values = torch.ones(1000)
    values[7] = torch.inf
    assert cuda_mean(values).item() == torch.inf
