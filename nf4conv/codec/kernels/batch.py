"""Many tensors in a fixed number of launches: what MoE checkpoints with thousands of small experts need.

A table on the device has a column for each tensor; a program finds the tensor that its tile belongs to by bisection
over the tensors' first tiles, and then runs the same code as the kernels for one tensor. The mean of each absmax vector
is torch's to the bit: up to TORCH_BLOCK values torch reduces with one thread block in an order that `_mean_kernel`
repeats, checked once for each device against torch itself; longer vectors go to torch, one by one.
"""

import functools

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from nf4conv.codec.codebook import NESTED_BLOCKSIZE
from nf4conv.codec.kernels.launch import Launcher
from nf4conv.codec.kernels.nested import NUM_WARPS, ROWS, compress_tile
from nf4conv.codec.kernels.quantize import ELEMENTWISE, SLOTWISE, configuration, quantize_tile
from nf4conv.codec.kernels.tables import bucket_table, middle_table

TORCH_BLOCK = 130_560
"""The longest vector that torch's mean reduces in one thread block: 255 vectors for each of 512 threads."""

Integers = npt.NDArray[np.int64]


def quantize_blocks_batch(
    weights: Integers,
    sizes: Integers,
    packed: torch.Tensor,
    packed_offsets: Integers,
    absmax: torch.Tensor,
    absmax_offsets: Integers,
    *,
    dtype: torch.dtype,
    quant_type: str,
    blocksize: int,
) -> None:
    """Encode many weights of one dtype; at most two launches.

    Args:
        weights: [tensors] device addresses of contiguous weights. Fast where they are multiples of 16 and sizes of 8.
        sizes: [tensors] numbers of elements.
        packed: one flat uint8 buffer, written.
        packed_offsets: [tensors] where each tensor's ceil(size / 2) bytes begin. Fast where they are multiples of 4.
        absmax: one flat float32 buffer, written.
        absmax_offsets: [tensors] elements of `absmax` before each tensor's ceil(size / blocksize).
        dtype: of the weights.
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one absmax.
    """
    slot = 16 // dtype.itemsize
    tile, num_warps = configuration(dtype, blocksize)
    targets = packed.data_ptr() + packed_offsets
    aligned = (sizes % slot == 0) & (weights % 16 == 0) & (targets % 4 == 0)
    columns = np.stack([weights, targets, absmax.data_ptr() + 4 * absmax_offsets, sizes])
    for chosen, access in ((aligned, SLOTWISE), (~aligned, ELEMENTWISE)):
        if not sizes[chosen].any():
            continue
        table, tiles = _tile_table(columns[:, chosen], tile, packed.device)
        example = torch.empty(0, dtype=dtype, device=packed.device)
        _launch_quantize(
            tiles,
            (table, example, bucket_table(quant_type, packed.device), table.shape[1]),
            (blocksize, tile, quant_type == "fp4", access, packed.is_cuda),
            dtype,
            num_warps,
        )


def compress_absmax_batch(
    absmax: torch.Tensor,
    absmax_offsets: Integers,
    counts: Integers,
    codes: torch.Tensor,
    codes_offsets: Integers,
    nested_absmax: torch.Tensor,
    nested_offsets: Integers,
) -> torch.Tensor:
    """Quantize many absmax vectors to 8 bits, each with its own mean; two launches, and one for each long vector.

    Args:
        absmax: one flat float32 buffer.
        absmax_offsets: [tensors] elements before each vector: multiples of 4, so that torch's mean of a long one is
            the mean of a vector of its own.
        counts: [tensors] lengths of the vectors.
        codes: one flat uint8 buffer, written.
        codes_offsets: [tensors] where each vector's codes begin.
        nested_absmax: one flat float32 buffer, written.
        nested_offsets: [tensors] elements before each tensor's ceil(count / 256).

    Returns:
        [tensors] float32 on the device: the offsets.
    """
    means = batch_means(absmax, absmax_offsets, counts)
    columns = np.stack(
        [
            absmax.data_ptr() + 4 * absmax_offsets,
            codes.data_ptr() + codes_offsets,
            nested_absmax.data_ptr() + 4 * nested_offsets,
            counts,
        ]
    )
    table, tiles = _tile_table(columns, ROWS * NESTED_BLOCKSIZE, absmax.device)
    if not tiles:
        return means
    _launch_compress(
        tiles,
        (table, means, middle_table(absmax.device), table.shape[1]),
        (ROWS, absmax.is_cuda),
        None,
        NUM_WARPS,
    )
    return means


def batch_means(absmax: torch.Tensor, offsets: Integers, counts: Integers) -> torch.Tensor:
    """[tensors] float32: of each vector what `torch.mean` gives for it, to the bit; arguments as above."""
    means = torch.empty(len(counts), dtype=torch.float32, device=absmax.device)
    long = counts > TORCH_BLOCK if repeats_torch(absmax.device) else np.ones(len(counts), dtype=bool)
    if not long.all():
        replicate_means(absmax, offsets, counts, means)
    for index in np.flatnonzero(long).tolist():
        start = int(offsets[index])
        means[index] = absmax[start : start + int(counts[index])].mean()
    return means


def replicate_means(absmax: torch.Tensor, offsets: Integers, counts: Integers, means: torch.Tensor) -> None:
    """The means of vectors of at most TORCH_BLOCK values in torch's order of summation; longer ones are not written."""
    threads = np.where(counts < 128, counts, np.minimum(counts // 4, 512))
    threads = 1 << np.log2(np.maximum(threads, 1)).astype(np.int64)
    columns = np.stack([absmax.data_ptr() + 4 * offsets, counts, threads])
    table = torch.from_numpy(columns).to(absmax.device, non_blocking=True)
    _launch_mean(len(counts), (table, means, len(counts)), (TORCH_BLOCK,), None, 4)


@functools.cache
def repeats_torch(device: torch.device) -> bool:
    """Whether `replicate_means` gives torch's bits on this device: the order belongs to torch's release."""
    if device.type != "cuda":
        return False
    counts = np.array([1, 2, 5, 31, 33, 64, 100, 127, 128, 129, 131, 1000, 2047, 2048, 4099, 65536, 130_557, 130_560])
    offsets = np.concatenate([[0], np.cumsum(-(-counts // 4) * 4)[:-1]])
    generator = torch.Generator(device).manual_seed(0)
    values = torch.rand(int(offsets[-1] + counts[-1]), generator=generator, device=device)
    means = torch.empty(len(counts), device=device)
    replicate_means(values, offsets, counts, means)
    expected = [values[o : o + c].mean() for o, c in zip(offsets.tolist(), counts.tolist(), strict=True)]
    return torch.equal(means, torch.stack(expected))


def _tile_table(columns: Integers, tile: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """[5, tensors] int64 on the device: three addresses, the size, each tensor's first tile; the number of tiles."""
    sizes = columns[3]
    last_tiles = np.cumsum(-(-sizes // tile))
    first_tiles = np.concatenate([[0], last_tiles[:-1]])
    table = torch.from_numpy(np.ascontiguousarray(np.concatenate([columns, first_tiles[None]])))
    return table.to(device, non_blocking=True), int(last_tiles[-1])


@triton.jit
def _find_tensor(first_tile_ptr, tensors, tile):
    """The last tensor whose first tile is not behind `tile`; an empty one shares its with its successor, and loses."""
    low = tile * 0
    high = low + tensors
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(first_tile_ptr + middle) <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["table_ptr", "example_ptr", "bucket_ptr"])
def _quantize_batch_kernel(
    table_ptr,
    example_ptr,
    bucket_ptr,
    tensors: tl.int64,
    BLOCKSIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_FP4: tl.constexpr,
    ACCESS: tl.constexpr,
    PTX: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    tensor = _find_tensor(table_ptr + 4 * tensors, tensors, tile)
    first = (tile - tl.load(table_ptr + 4 * tensors + tensor)) * TILE
    count = tl.minimum(tl.load(table_ptr + 3 * tensors + tensor) - first, TILE).to(tl.int32)
    weight_ptr = tl.load(table_ptr + tensor).to(example_ptr.dtype)
    packed_ptr = tl.load(table_ptr + tensors + tensor).to(tl.pointer_type(tl.uint8))
    absmax_ptr = tl.load(table_ptr + 2 * tensors + tensor).to(tl.pointer_type(tl.float32))
    quantize_tile(
        weight_ptr + first,
        packed_ptr + first // 2,
        absmax_ptr + first // BLOCKSIZE,
        bucket_ptr,
        count,
        BLOCKSIZE,
        TILE,
        IS_FP4,
        ACCESS,
        PTX,
    )


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["table_ptr", "means_ptr", "middle_ptr"])
def _compress_batch_kernel(table_ptr, means_ptr, middle_ptr, tensors: tl.int64, ROWS: tl.constexpr, PTX: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    tensor = _find_tensor(table_ptr + 4 * tensors, tensors, tile)
    block = (tile - tl.load(table_ptr + 4 * tensors + tensor)) * ROWS
    first = block * 256
    count = tl.minimum(tl.load(table_ptr + 3 * tensors + tensor) - first, ROWS * 256).to(tl.int32)
    absmax_ptr = tl.load(table_ptr + tensor).to(tl.pointer_type(tl.float32))
    codes_ptr = tl.load(table_ptr + tensors + tensor).to(tl.pointer_type(tl.uint8))
    nested_absmax_ptr = tl.load(table_ptr + 2 * tensors + tensor).to(tl.pointer_type(tl.float32))
    compress_tile(
        absmax_ptr + first,
        means_ptr + tensor,
        codes_ptr + first,
        nested_absmax_ptr + block,
        middle_ptr,
        count,
        ROWS,
        PTX,
    )


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["table_ptr", "means_ptr"])
def _mean_kernel(table_ptr, means_ptr, tensors: tl.int64, LONGEST: tl.constexpr):
    """Repeat torch's order: `threads` threads add every threads-th vector of 4 into 4 sums each, the last count % 4
    values go to the first sum of the first threads, then ((s0 + s1) + s2) + s3 and a halving tree. Below 128 values a
    thread adds the values at its own index and at index + threads.
    """
    tensor = tl.program_id(0)
    values_ptr = tl.load(table_ptr + tensor).to(tl.pointer_type(tl.float32))
    count = tl.load(table_ptr + tensors + tensor)
    threads = tl.load(table_ptr + 2 * tensors + tensor)
    if count <= LONGEST:
        thread = tl.arange(0, 512)[:, None]
        part = tl.arange(0, 4)[None, :]
        active = thread < threads
        if count < 128:
            own = thread + part * threads
            sums = tl.load(values_ptr + own, mask=active & (own < count), other=0.0)
        else:
            sums = tl.zeros((512, 4), tl.float32)
            whole = count // 4 * 4
            for start in range(0, whole, threads * 4):
                index = start + thread * 4 + part
                sums += tl.load(values_ptr + index, mask=active & (index < whole), other=0.0)
            rest = whole + thread + 0 * part
            sums += tl.load(values_ptr + rest, mask=(part == 0) & (rest < count), other=0.0)
        s02, s13 = tl.split(tl.reshape(sums, (512, 2, 2)))
        s0, s2 = tl.split(s02)
        s1, s3 = tl.split(s13)
        total = ((s0 + s1) + s2) + s3
        for level in tl.static_range(9):
            total = tl.sum(tl.reshape(total, (2, 256 >> level)), axis=0)
        one = tl.full((1,), 1.0, tl.float32)
        tl.store(means_ptr + tensor + tl.arange(0, 1), total * tl.div_rn(one, one * count.to(tl.float32)))


_launch_quantize = Launcher(_quantize_batch_kernel)
_launch_compress = Launcher(_compress_batch_kernel)
_launch_mean = Launcher(_mean_kernel)
