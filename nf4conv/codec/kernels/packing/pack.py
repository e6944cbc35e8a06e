"""Weight → packed codes and scales: kernels for one weight, and for many in one launch.

MoE checkpoints with small experts need the latter. A table on the device has a column for each
tensor. Only the engine without torch launches it (run/device/on_driver/packing.py), from what
ahead.py names.
"""

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.codec.kernels.packing.quantize import CONFIGURATIONS as PACKING
from nf4conv.codec.kernels.packing.quantize import quantize_tile
from nf4conv.codec.kernels.packing.search import CONFIGURATIONS as SEARCHING
from nf4conv.codec.kernels.packing.search import search_tile
from nf4conv.codec.kernels.slots import access, configuration
from nf4conv.codec.kernels.tables import bucket_table, search_table


def quantize_blocks(
    weight: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    quant_type: str,
    blocksize: int,
    searches: bool = False,
) -> None:
    """Quantizes a weight in blocks, as `reference.quantize_blocks` does."""
    n = weight.numel()
    if n == 0:
        return
    tile, num_warps = packing(weight.dtype, blocksize, searches)
    arguments = (weight, packed, scales, packing_table(quant_type, weight.device, searches), n)
    constants = (
        blocksize,
        tile,
        quant_type == "fp4",
        access(n, weight.dtype, tile, weight.data_ptr(), packed.data_ptr()),
        weight.is_cuda,
        searches,
    )
    _launch(-(-n // tile), arguments, constants, weight.dtype, num_warps)


def packing(dtype: torch.dtype, blocksize: int, searches: bool) -> tuple[int, int]:
    """Returns the elements and the warps of a program that encodes, by absmax or with a search."""
    return configuration(dtype, blocksize, SEARCHING if searches else PACKING)


def packing_table(quant_type: str, device: torch.device, searches: bool) -> torch.Tensor:
    """Returns the table that a kernel reads to encode, with absmax or with a search."""
    if searches:
        return search_table(quant_type, device)
    return bucket_table(quant_type, device)


@kernel
def quantize_kernel(
    weight_ptr,
    packed_ptr,
    scales_ptr,
    table_ptr,
    n: tl.int64,
    BLOCKSIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_FP4: tl.constexpr,
    ACCESS: tl.constexpr,
    PTX: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Encodes a tile of TILE elements.

    Pointers to tensors:
        weight_ptr: [n] float32, float16 or bfloat16.
        packed_ptr: [ceil(n / 2)] uint8, written.
        scales_ptr: [ceil(n / BLOCKSIZE)] float32, written: absmax, or with SEARCH the scales found.
        table_ptr: int32, tables.bucket_table, or with SEARCH tables.search_table.

    Constexprs:
        BLOCKSIZE: elements that share one scale.
        TILE: elements of a program, a multiple of BLOCKSIZE.
        IS_FP4: FP4, or else NF4.
        ACCESS: FULL, SLOTWISE or ELEMENTWISE of slots.py.
        PTX: True to use inline assembly; False in the interpreter.
        SEARCH: True to search the scales.
    """
    first = tl.program_id(0).to(tl.int64) * TILE
    count = tl.minimum(n - first, TILE).to(tl.int32)
    tile = (
        weight_ptr + first,
        packed_ptr + first // 2,
        scales_ptr + first // BLOCKSIZE,
        table_ptr,
        count,
    )
    _encode(tile, BLOCKSIZE, TILE, IS_FP4, ACCESS, PTX, SEARCH)


_launch = Launcher(quantize_kernel)


@kernel
def quantize_batch_kernel(
    table_ptr,
    example_ptr,
    code_ptr,
    tensors: tl.int64,
    BLOCKSIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_FP4: tl.constexpr,
    ACCESS: tl.constexpr,
    PTX: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Encodes a tile of one of many weights.

    Pointers to tensors:
        table_ptr: [5, tensors] int64: addresses of the weight, of its packed codes (uint8, written)
            and of its absmax (float32, written); its size; its first tile.
        example_ptr: any pointer of the weights' dtype.
        code_ptr, constexprs: as of quantize_kernel; ACCESS is not FULL.
    """
    _, first, count, addresses = find_tile(table_ptr, tensors, TILE)
    weight_ptr = addresses[0].to(example_ptr.dtype) + first
    packed_ptr = addresses[1].to(tl.pointer_type(tl.uint8)) + first // 2
    absmax_ptr = addresses[2].to(tl.pointer_type(tl.float32)) + first // BLOCKSIZE
    tile = (weight_ptr, packed_ptr, absmax_ptr, code_ptr, count)
    _encode(tile, BLOCKSIZE, TILE, IS_FP4, ACCESS, PTX, SEARCH)


@triton.jit
def _encode(
    tile,
    BLOCKSIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_FP4: tl.constexpr,
    ACCESS: tl.constexpr,
    PTX: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Encodes a tile; `tile` and the others are as of quantize_tile."""
    if SEARCH:
        search_tile(tile, BLOCKSIZE, TILE, IS_FP4, ACCESS, PTX)
    else:
        quantize_tile(tile, BLOCKSIZE, TILE, IS_FP4, ACCESS, PTX)


@triton.jit
def find_tile(table_ptr, tensors, TILE: tl.constexpr):
    """Finds the tile that this program works on, in a table such as quantize_batch_kernel's, by
    bisection.

    Its tensor is the last one whose first tile is at or before the program's number. Empty tensors
    share their first tile with the next tensor and are skipped.

    Returns the tensor's number, the first element of the tile, the number of elements of the tile,
    and the three addresses of the tensor.
    """
    tile = tl.program_id(0).to(tl.int64)
    low = tile * 0
    high = low + tensors
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(table_ptr + 4 * tensors + middle) <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    first_tile = tl.load(table_ptr + 4 * tensors + low)
    first = (tile - first_tile) * TILE
    size = tl.load(table_ptr + 3 * tensors + low)
    count = tl.minimum(size - first, TILE).to(tl.int32)
    addresses = (
        tl.load(table_ptr + low),
        tl.load(table_ptr + tensors + low),
        tl.load(table_ptr + 2 * tensors + low),
    )
    return low, first, count, addresses
