"""The kernels for many tensors, launched as the engine without torch launches them
(run/device/on_driver/packing.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from nf4conv.codec.kernels.launch import Launcher
from nf4conv.codec.kernels.packing import mean
from nf4conv.codec.kernels.packing.nested import NUM_WARPS, compress_batch_kernel
from nf4conv.codec.kernels.packing.pack import packing, packing_table, quantize_batch_kernel
from nf4conv.codec.kernels.slots import ELEMENTWISE, SLOTWISE
from nf4conv.codec.kernels.tables import middle_table
from nf4conv.codec.mean_order import TORCH_BLOCK, thread_blocks, threads

_launch_quantize = Launcher(quantize_batch_kernel)
_launch_compress = Launcher(compress_batch_kernel)
_mean_launchers = {
    "mean": Launcher(mean.mean_kernel),
    "mean_part": Launcher(mean.partial_kernel),
    "mean_total": Launcher(mean.total_kernel),
}


class Encoded(NamedTuple):
    packed: torch.Tensor
    absmax: torch.Tensor
    codes: torch.Tensor
    nested_absmax: torch.Tensor
    offset: torch.Tensor


def starts_of(counts: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns where vectors begin in one buffer, at multiples of 16, and the size of the buffer."""
    ends = np.cumsum(-(-counts // 16) * 16)
    return np.concatenate([[0], ends[:-1]]), int(ends[-1])


def tile_table(columns: np.ndarray, tile: int, device: torch.device) -> tuple[torch.Tensor, int]:
    last_tiles = np.cumsum(-(-columns[3] // tile))
    first_tiles = np.concatenate([[0], last_tiles[:-1]])
    return torch.from_numpy(np.ascontiguousarray(np.vstack([columns, first_tiles]))).to(
        device
    ), int(last_tiles[-1])


def launch_mean(name: str, programs: int, arguments: tuple) -> None:
    _mean_launchers[name](programs, arguments, (), None, mean.NUM_WARPS)


def means_of(values: torch.Tensor, offsets: np.ndarray, counts: np.ndarray) -> torch.Tensor:
    """[vectors]: short ones by one launch, long ones by two each."""
    means = torch.full((len(counts),), torch.nan, device=values.device)
    addresses = values.data_ptr() + 4 * offsets
    threads_of = np.array([threads(count) for count in counts.tolist()], dtype=np.int64)
    table = torch.from_numpy(np.stack([addresses, counts, threads_of])).to(values.device)
    launch_mean("mean", len(counts), (table, means, len(counts)))
    for index in np.flatnonzero(counts > TORCH_BLOCK).tolist():
        count = int(counts[index])
        vector = values[int(offsets[index]) :][:count]
        blocks = thread_blocks(count, mean.resident_blocks(values.device))
        partial = torch.empty(blocks, device=values.device)
        launch_mean("mean_part", blocks, (vector, partial, count, blocks))
        launch_mean("mean_total", 1, (partial, means[index : index + 1], blocks, count))
    return means


def quantize_batch(
    weights: Sequence[torch.Tensor], quant_type: str, blocksize: int, *, search: bool = False
) -> list[Encoded]:
    """Encode weights of one dtype, the nested step included, in a few launches for all."""
    dtype, device = weights[0].dtype, weights[0].device
    sizes = np.array([weight.numel() for weight in weights])
    blocks = -(-sizes // blocksize)
    packed_starts, packed_size = starts_of(-(-sizes // 2))
    starts, size = starts_of(blocks)
    nested_starts, nested_size = starts_of(-(-blocks // 256))
    packed = torch.zeros(packed_size, dtype=torch.uint8, device=device)
    absmax, nested_absmax = (
        torch.zeros(size, device=device),
        torch.zeros(nested_size, device=device),
    )
    codes = torch.zeros(size, dtype=torch.uint8, device=device)
    addresses = np.array([weight.data_ptr() for weight in weights])
    tile, num_warps = packing(dtype, blocksize, search)
    targets = packed.data_ptr() + packed_starts
    aligned = (sizes % (16 // dtype.itemsize) == 0) & (addresses % 16 == 0) & (targets % 4 == 0)
    columns = np.stack([addresses, targets, absmax.data_ptr() + 4 * starts, sizes])
    for chosen, access in ((aligned, SLOTWISE.value), (~aligned, ELEMENTWISE.value)):
        if sizes[chosen].any():
            table, tiles = tile_table(columns[:, chosen], tile, device)
            example = torch.empty(0, dtype=dtype, device=device)
            arguments = (table, example, packing_table(quant_type, device, search), table.shape[1])
            constants = (blocksize, tile, quant_type == "fp4", access, packed.is_cuda, search)
            _launch_quantize(tiles, arguments, constants, dtype, num_warps)
    means = means_of(absmax, starts, blocks)
    targets = nested_absmax.data_ptr() + 4 * nested_starts
    columns = np.stack([absmax.data_ptr() + 4 * starts, codes.data_ptr() + starts, targets, blocks])
    table, tiles = tile_table(columns, 256, device)
    arguments = (table, means, middle_table(device), table.shape[1])
    _launch_compress(tiles, arguments, (absmax.is_cuda,), None, NUM_WARPS)
    return [
        Encoded(
            packed[packed_starts[i] :][: -(-size // 2)],
            absmax[starts[i] :][: blocks[i]],
            codes[starts[i] :][: blocks[i]],
            nested_absmax[nested_starts[i] :][: -(-blocks[i] // 256)],
            means[i],
        )
        for i, size in enumerate(sizes.tolist())
    ]
