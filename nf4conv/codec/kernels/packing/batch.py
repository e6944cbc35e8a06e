"""Encodes many weights in a fixed number of launches.

MoE checkpoints with small experts need that. A table on the device has a column for each tensor. A
program finds the tensor that its tile belongs to by bisection over the tensors' first tiles, and
then runs the same code as the kernels for one tensor. Only the engine without torch launches these
kernels (run/device/on_driver/packing.py), from what ahead/ names.
"""

import triton
import triton.language as tl

from nf4conv.codec.kernels.launch import kernel
from nf4conv.codec.kernels.packing.nested import compress_tile
from nf4conv.codec.kernels.packing.quantize import quantize_tile
from nf4conv.codec.kernels.packing.search import search_tile


@triton.jit
def _find_tile(table_ptr, tensors, TILE: tl.constexpr):
    """Finds the tile that this program works on, in a table such as quantize_batch_kernel's.

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
        code_ptr: int32, tables.bucket_table, or search_table with SEARCH.

    Constexprs:
        BLOCKSIZE: elements that share one scale.
        TILE: elements of a program, a multiple of BLOCKSIZE.
        IS_FP4: FP4, or else NF4.
        ACCESS: SLOTWISE or ELEMENTWISE of slots.py.
        PTX: True to use inline assembly; False in the interpreter.
        SEARCH: True to search the scales.
    """
    _, first, count, addresses = _find_tile(table_ptr, tensors, TILE)
    weight_ptr = addresses[0].to(example_ptr.dtype) + first
    packed_ptr = addresses[1].to(tl.pointer_type(tl.uint8)) + first // 2
    absmax_ptr = addresses[2].to(tl.pointer_type(tl.float32)) + first // BLOCKSIZE
    tile = (weight_ptr, packed_ptr, absmax_ptr, code_ptr, count)
    if SEARCH:
        search_tile(tile, BLOCKSIZE, TILE, IS_FP4, ACCESS, PTX)
    else:
        quantize_tile(tile, BLOCKSIZE, TILE, IS_FP4, ACCESS, PTX)


@kernel
def compress_batch_kernel(table_ptr, means_ptr, middle_ptr, tensors: tl.int64, PTX: tl.constexpr):
    """Encodes a nested block of one of many absmax vectors to 8 bits.

    Pointers to tensors:
        table_ptr: [5, tensors] int64: addresses of absmax (float32), of its codes (uint8, written)
            and of nested_absmax (float32, written); the number of blocks; the first tile.
        means_ptr: [tensors] float32, what is subtracted.
        middle_ptr: [20, 32] float32, tables.middle_table.
    """
    tensor, first, count, addresses = _find_tile(table_ptr, tensors, 256)
    absmax_ptr = addresses[0].to(tl.pointer_type(tl.float32)) + first
    codes_ptr = addresses[1].to(tl.pointer_type(tl.uint8)) + first
    nested_absmax_ptr = addresses[2].to(tl.pointer_type(tl.float32)) + first // 256
    compress_tile(
        absmax_ptr, means_ptr + tensor, codes_ptr, nested_absmax_ptr, middle_ptr, count, PTX
    )
