"""Many tensors in a fixed number of launches: what MoE checkpoints with thousands of small experts need.

A table on the device has a column for each tensor; a program finds the tensor that its tile belongs to by bisection
over the tensors' first tiles, and then runs the same code as the kernels for one tensor. These kernels are launched
without torch only (pipeline/without_torch/pack.py), from what ahead.py has compiled.
"""

import triton
import triton.language as tl

from nf4conv.codec.kernels.nested import compress_tile
from nf4conv.codec.kernels.quantize import quantize_tile
from nf4conv.codec.kernels.search import search_tile


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


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["table_ptr", "example_ptr", "code_ptr"])
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
    """Encode a tile of one of many weights.

    Pointers to tensors:
        table_ptr: [5, tensors] int64: addresses of the weight, of its packed codes (uint8, written) and of its absmax
            (float32, written); its size; its first tile.
        example_ptr: any pointer of the weights' dtype.
        code_ptr: int32, tables.bucket_table, or search_table with SEARCH.

    Constexprs:
        BLOCKSIZE, TILE, IS_FP4, ACCESS, PTX: as of quantize_tile; ACCESS is 1 or 2.
        SEARCH: whether scales are searched, by search_tile.
    """
    tile = tl.program_id(0).to(tl.int64)
    tensor = _find_tensor(table_ptr + 4 * tensors, tensors, tile)
    first = (tile - tl.load(table_ptr + 4 * tensors + tensor)) * TILE
    count = tl.minimum(tl.load(table_ptr + 3 * tensors + tensor) - first, TILE).to(tl.int32)
    weight_ptr = tl.load(table_ptr + tensor).to(example_ptr.dtype)
    packed_ptr = tl.load(table_ptr + tensors + tensor).to(tl.pointer_type(tl.uint8))
    absmax_ptr = tl.load(table_ptr + 2 * tensors + tensor).to(tl.pointer_type(tl.float32))
    weight_ptr += first
    packed_ptr += first // 2
    absmax_ptr += first // BLOCKSIZE
    if SEARCH:
        search_tile(weight_ptr, packed_ptr, absmax_ptr, code_ptr, count, BLOCKSIZE, TILE, IS_FP4, ACCESS, PTX)
    else:
        quantize_tile(weight_ptr, packed_ptr, absmax_ptr, code_ptr, count, BLOCKSIZE, TILE, IS_FP4, ACCESS, PTX)


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["table_ptr", "means_ptr", "middle_ptr"])
def compress_batch_kernel(table_ptr, means_ptr, middle_ptr, tensors: tl.int64, ROWS: tl.constexpr, PTX: tl.constexpr):
    """Encode a tile of one of many absmax vectors to 8 bits.

    Pointers to tensors:
        table_ptr: [5, tensors] int64: addresses of absmax (float32), of its codes (uint8, written) and of nested_absmax
            (float32, written); the number of blocks; the first tile.
        means_ptr: [tensors] float32, what is subtracted.
        middle_ptr: [20, 32] float32, tables.middle_table.

    Constexprs:
        ROWS, PTX: as of compress_tile.
    """
    tile = tl.program_id(0).to(tl.int64)
    tensor = _find_tensor(table_ptr + 4 * tensors, tensors, tile)
    block = (tile - tl.load(table_ptr + 4 * tensors + tensor)) * ROWS
    first = block * 256
    count = tl.minimum(tl.load(table_ptr + 3 * tensors + tensor) - first, ROWS * 256).to(tl.int32)
    absmax_ptr = tl.load(table_ptr + tensor).to(tl.pointer_type(tl.float32))
    codes_ptr = tl.load(table_ptr + tensors + tensor).to(tl.pointer_type(tl.uint8))
    nested_absmax_ptr = tl.load(table_ptr + 2 * tensors + tensor).to(tl.pointer_type(tl.float32))
    absmax_ptr += first
    codes_ptr += first
    nested_absmax_ptr += block
    compress_tile(absmax_ptr, means_ptr + tensor, codes_ptr, nested_absmax_ptr, middle_ptr, count, ROWS, PTX)
