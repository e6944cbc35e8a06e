"""The launches that encode: one weight, or many in a fixed number, which MoE checkpoints with small
experts need.

For many, a table on the device has a column for each tensor; a program finds the tensor that its
tile belongs to by bisection over the tensors' first tiles, and then runs the same code as the
kernels for one tensor. These kernels are launched without torch only (run/without_torch/pack.py),
from what ahead.py has compiled; and so is the one that looks for NaN and infinity before anything
is packed.
"""

from functools import partial

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.codec.kernels.nested import compress_tile
from nf4conv.codec.kernels.quantize import CONFIGURATIONS as PACKING
from nf4conv.codec.kernels.quantize import access, configuration, quantize_tile
from nf4conv.codec.kernels.search import CONFIGURATIONS as SEARCHING
from nf4conv.codec.kernels.search import search_tile
from nf4conv.codec.kernels.tables import bucket_table, search_table

FINITE_TILE = tl.constexpr(8192)  # words that a program of non_finite_kernel looks at
FINITE_NUM_WARPS = 4


def encode_blocks(
    searches: bool,
    weight: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    quant_type: str,
    blocksize: int,
) -> None:
    """Encode blocks of a weight; arguments as `reference.quantize_blocks`, or with a search
    `search_blocks`.
    """
    n = weight.numel()
    if n == 0:
        return
    tile, num_warps = packing(weight.dtype, blocksize, searches)
    constants = (
        blocksize,
        tile,
        quant_type == "fp4",
        access(weight, packed, n, tile),
        weight.is_cuda,
        searches,
    )
    arguments = (weight, packed, scales, packing_table(quant_type, weight.device, searches), n)
    _launch(-(-n // tile), arguments, constants, weight.dtype, num_warps)


quantize_blocks, search_blocks = (partial(encode_blocks, searches) for searches in (False, True))


def packing(dtype: torch.dtype, blocksize: int, searches: bool) -> tuple[int, int]:
    """Elements and warps of a program that encodes."""
    return configuration(dtype, blocksize, SEARCHING if searches else PACKING)


def packing_table(quant_type: str, device: torch.device, searches: bool) -> torch.Tensor:
    """What kernels that encode read."""
    return search_table(quant_type, device) if searches else bucket_table(quant_type, device)


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
    """Encode a tile of TILE elements.

    Pointers to tensors:
        weight_ptr: [n] float32, float16 or bfloat16.
        packed_ptr: [ceil(n / 2)] uint8, written.
        scales_ptr: [ceil(n / BLOCKSIZE)] float32, written: absmax, or what is found with SEARCH.
        table_ptr: int32, tables.bucket_table, or search_table with SEARCH.

    Constexprs:
        ACCESS: FULL, SLOTWISE or ELEMENTWISE.
        PTX: whether inline assembly may be used.
        SEARCH: whether scales are searched, by search_tile.
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
    if SEARCH:
        search_tile(tile, BLOCKSIZE, TILE, IS_FP4, ACCESS, PTX)
    else:
        quantize_tile(tile, BLOCKSIZE, TILE, IS_FP4, ACCESS, PTX)


_launch = Launcher(quantize_kernel)


@triton.jit
def _find_tile(table_ptr, tensors, TILE: tl.constexpr):
    """What is the program's to do, by a table as of quantize_batch_kernel.

    Its tensor, the last whose first tile is not behind the program: an empty one shares its with
    its successor, and loses. In this tensor the first element of a tile, and how many there are
    from there. The three addresses.
    """
    tile = tl.program_id(0).to(tl.int64)
    low = tile * 0
    high = low + tensors
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(table_ptr + 4 * tensors + middle) <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    first = (tile - tl.load(table_ptr + 4 * tensors + low)) * TILE
    count = tl.minimum(tl.load(table_ptr + 3 * tensors + low) - first, TILE).to(tl.int32)
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
    """Encode a tile of one of many weights.

    Pointers to tensors:
        table_ptr: [5, tensors] int64: addresses of the weight, of its packed codes (uint8, written)
            and of its absmax (float32, written); its size; its first tile.
        example_ptr: any pointer of the weights' dtype.
        code_ptr: int32, tables.bucket_table, or search_table with SEARCH.

    Constexprs: as of quantize_kernel; ACCESS is 1 or 2.
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
    """Encode a nested block of one of many absmax vectors to 8 bits.

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


def exponent_mask(dtype: torch.dtype) -> int:
    """The exponent bits of a value, which are all set in NaN and infinity."""
    return {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}[dtype]


@kernel
def non_finite_kernel(
    values_ptr, found_ptr, words: tl.int64, EXPONENT: tl.constexpr, HALVES: tl.constexpr
):
    """Set *found_ptr to 1 if a value's exponent bits are all set.

    Pointers to tensors:
        values_ptr: [words] int32, each one float32 or two half-precision values.
        found_ptr: [1] int32, written only if there is one.

    Constexprs:
        EXPONENT: mask of the exponent bits of one value.
        HALVES: whether a word holds two values.
    """
    index = tl.program_id(0).to(tl.int64) * FINITE_TILE + tl.arange(0, FINITE_TILE)
    word = tl.load(values_ptr + index, mask=index < words, other=0)
    found = (word & EXPONENT) == EXPONENT
    if HALVES:
        found = found | (((word >> 16) & EXPONENT) == EXPONENT)
    if tl.max(found.to(tl.int32), axis=0) != 0:
        tl.store(found_ptr, 1)
