"""Encodes a tile of a weight with searched scales: the definition of codec/search.py, every element
read once.

A *group* is up to 64 elements of a block, whose sums of integers float32 holds exactly, so a
reduction may add them in any order; the sums of a block's groups are added as 32-bit integers. A
program takes whole blocks, [groups, group].

search  for each factor the distance of a position's magnitude from the nearest level above 0, and
        from that below it: two positions a word, a subtraction and a minimum for each level. Both
        signs of the factor need just these.
step    the level nearest to each position, from a table that the first-level cache holds
encode  twice, for the scale found and for absmax, each with its cost

Arithmetic is what limits it (docs/kernels.md).
"""

import triton
import triton.language as tl

from nf4conv.codec import search
from nf4conv.codec.kernels.arithmetic import flush, gather, magnitude, multiply, reciprocal
from nf4conv.codec.kernels.assembly import nearest_assembly
from nf4conv.codec.kernels.packing.quantize import plain_code
from nf4conv.codec.kernels.slots import FULL, SLOTWISE, by_slot
from nf4conv.codec.kernels.tables import (
    SEARCH_CANDIDATES,
    SEARCH_LEVELS,
    SEARCH_NEAREST,
    SEARCH_VALUES,
)

CONFIGURATIONS = {2: (256, 4), 4: (512, 4)}
"""By bytes of an element, slots and warps of a program: the fastest of the sweep in
docs/kernels.md.
"""


_FACTORS = tl.constexpr(len(search.FACTORS))
_GROUP = tl.constexpr(search.GROUP)
_UNIT = tl.constexpr(search.UNIT)
_ROUND = tl.constexpr(search.ROUND)
_COST_UNITS = tl.constexpr(search.COST_UNITS)
_LEAST_ABSMAX = tl.constexpr(search.LEAST_ABSMAX)
_LARGEST_ABSMAX = tl.constexpr(search.LARGEST_ABSMAX)
_LEAST_FACTOR = tl.constexpr(search.LEAST_FACTOR)
_LARGEST_FACTOR = tl.constexpr(search.LARGEST_FACTOR)
_EXPONENT_BITS = tl.constexpr(0x7F800000)  # of a float32
_ONE_EXPONENT = tl.constexpr(127 << 23)  # that of 1.0

# where the parts of tables.search_table begin
_COEFFICIENTS = tl.constexpr(64)
_VALUES = tl.constexpr(SEARCH_VALUES)
_LEVELS = tl.constexpr(SEARCH_LEVELS)
_CANDIDATES = tl.constexpr(SEARCH_CANDIDATES)
_NEAREST = tl.constexpr(SEARCH_NEAREST)


@triton.jit
def search_tile(
    tile,
    BLOCKSIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_FP4: tl.constexpr,
    ACCESS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Encodes a tile with searched scales.

    `tile` has the pointers of quantize_kernel, at the tile, and its number of elements, `count` ≤
    TILE. TILE is a multiple of BLOCKSIZE.
    """
    weight_ptr, packed_ptr, scales_ptr, table_ptr, count = tile
    GROUP: tl.constexpr = min(_GROUP, BLOCKSIZE)
    GROUPS: tl.constexpr = TILE // GROUP
    BLOCKS: tl.constexpr = TILE // BLOCKSIZE
    index = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    weight = _load(weight_ptr, index, count, ACCESS).to(tl.float32)
    peak = tl.max(magnitude(flush(weight)), axis=1)
    absmax = tl.max(tl.reshape(peak, (BLOCKS, BLOCKSIZE // GROUP)), axis=1)
    searched = (absmax >= _LEAST_ABSMAX) & (absmax <= _LARGEST_ABSMAX)
    bits = absmax.to(tl.int32, bitcast=True)
    exponent = tl.where(searched, bits & _EXPONENT_BITS, _ONE_EXPONENT)
    power = exponent.to(tl.float32, bitcast=True)
    inverse = ((254 << 23) - exponent).to(tl.float32, bitcast=True)  # 1 / power
    normalized_absmax = absmax * inverse
    normalized = multiply(weight, _by_element(inverse, weight), PTX)
    # NaN, and blocks that are not searched, must not reach the sums of integers
    is_number = normalized == normalized
    is_searched = _by_element(searched.to(tl.int32), weight) != 0
    known = tl.where(is_number & is_searched, normalized, 0.0)

    searched_absmax = tl.where(searched, normalized_absmax, 1.0)
    found = _least_squares(known, searched_absmax, table_ptr, IS_FP4, PTX)
    codes, cost = _encode(normalized, known, found, table_ptr, IS_FP4, PTX)
    codes_of_absmax, cost_of_absmax = _encode(
        normalized, known, normalized_absmax, table_ptr, IS_FP4, PTX
    )
    better = searched & (cost + 2 * BLOCKSIZE <= cost_of_absmax)

    block = tl.arange(0, BLOCKS)
    scale_ptr = scales_ptr + block
    scale = tl.where(better, found, normalized_absmax) * power
    tl.store(scale_ptr, scale, mask=block * BLOCKSIZE < count)
    is_better = _by_element(better.to(tl.int32), weight) != 0
    codes = tl.where(is_better, codes, codes_of_absmax)
    even, odd = tl.split(tl.reshape(codes, (GROUPS, GROUP // 2, 2)))
    byte = tl.arange(0, GROUPS)[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    tl.store(packed_ptr + byte, ((even << 4) | odd).to(tl.uint8), mask=byte * 2 < count)


@triton.jit
def _load(weight_ptr, index, count, ACCESS: tl.constexpr):
    """Loads the weight's elements at an index, zeros behind its end."""
    DTYPE: tl.constexpr = weight_ptr.dtype.element_ty
    BITS: tl.constexpr = tl.int32 if DTYPE == tl.float32 else tl.int16
    SLOT: tl.constexpr = 4 if DTYPE == tl.float32 else 8
    bits_ptr = weight_ptr.to(tl.pointer_type(BITS))
    if ACCESS == FULL:
        bits = tl.load(tl.multiple_of(bits_ptr, 16) + index, eviction_policy="evict_first")
    elif ACCESS == SLOTWISE:
        mask = index // SLOT * SLOT < count  # a slot is there as a whole or not at all
        bits = tl.load(tl.multiple_of(bits_ptr, 16) + index, mask=mask, other=0)
    else:
        bits = tl.load(bits_ptr + index, mask=index < count, other=0)
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def _by_element(of_block, elements):
    """Repeats the values of blocks, [blocks], for their elements: the shape of `elements`, [groups,
    group].
    """
    GROUPS: tl.constexpr = elements.shape[0]
    of_group = by_slot(of_block, GROUPS)
    return tl.broadcast_to(of_group[:, None], elements.shape)


@triton.jit
def _block_sums(integers, BLOCKS: tl.constexpr):
    """Adds up the integers of each block: [groups, group] float32 → [BLOCKS] int32."""
    sums = tl.sum(integers, axis=1).to(tl.int32)
    return tl.sum(tl.reshape(sums, (BLOCKS, integers.shape[0] // BLOCKS)), axis=1)


@triton.jit
def _rounded(x):
    """Rounds float32 below 2^22 in magnitude to an integer, ties to even."""
    return (x + _ROUND) - _ROUND


@triton.jit
def _least_squares(known, absmax, table_ptr, IS_FP4: tl.constexpr, PTX: tl.constexpr):
    """Tries every factor, then makes one step of least squares from the best.

    known: [groups, group] float32, no NaN. absmax: [blocks] float32, of these blocks: from 1 to 2.
    Returns the scales, [blocks] float32.
    """
    BLOCKS: tl.constexpr = absmax.shape[0]
    units = tl.div_rn(tl.zeros_like(absmax) + _UNIT, absmax)
    position = _rounded(known * _by_element(units, known))
    distance = tl.abs(position).to(tl.float16)  # which holds the integers up to 2048
    least = tl.full((BLOCKS,), 0x7FFFFFFF, tl.int32)
    best = tl.zeros((BLOCKS,), tl.int32)
    for factor in range(_FACTORS):
        level_ptr = (table_ptr + _LEVELS + factor * 8).to(tl.pointer_type(tl.float16))
        above = _nearest(distance, level_ptr + 8, PTX)
        if IS_FP4:
            cost = _block_sums(above * above, BLOCKS)
            best = tl.where(cost < least, factor, best)
            least = tl.minimum(least, cost)
        else:
            below = _nearest(distance, level_ptr, PTX)
            for negative in tl.static_range(2):
                nearest = tl.where((position < 0.0) == (negative == 1), above, below)
                cost = _block_sums(nearest * nearest, BLOCKS)
                best = tl.where(cost < least, 2 * factor + negative, best)
                least = tl.minimum(least, cost)
    row = _by_element(best * (2 * _UNIT + 1), known)
    level = gather(table_ptr, _NEAREST + _UNIT + row + position.to(tl.int32), PTX).to(tl.float32)
    shift = _block_sums((position - level) * level, BLOCKS).to(tl.float32)
    # in 16ths, whose sums float32 holds
    square = _block_sums(tl.floor(level * level * 0.0625), BLOCKS).to(tl.float32)
    candidate = gather(table_ptr, _CANDIDATES + best, PTX).to(tl.float32, bitcast=True)
    # a block that is not searched has no squares
    stepped = tl.abs(candidate) * (1.0 + tl.div_rn(shift, tl.maximum(square, 1.0)) * 0.0625)
    stepped = tl.minimum(tl.maximum(stepped, _LEAST_FACTOR), _LARGEST_FACTOR)
    return absmax * tl.where(candidate < 0.0, -stepped, stepped)


@triton.jit
def _nearest(distance, level_ptr, PTX: tl.constexpr):
    """Returns how far positions are from the nearest of 0 and 8 levels, as float32.

    Positions and levels are float16, and not negative.
    """
    if PTX:
        levels = ()  # a tuple that grows, which the compiler unrolls
        for level in tl.static_range(8):
            levels = levels + (tl.load(level_ptr + level),)  # type: ignore[assignment]
        nearest = tl.inline_asm_elementwise(
            nearest_assembly(),
            "=r,r,r,r,r,r,r,r,r,r",
            (distance,) + levels,
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        nearest = distance
        for level in tl.static_range(8):
            nearest = tl.minimum(nearest, tl.abs(distance - tl.load(level_ptr + level)))
    return nearest.to(tl.float32)


@triton.jit
def _encode(normalized, known, scale, table_ptr, IS_FP4: tl.constexpr, PTX: tl.constexpr):
    """Encodes values by the scales of their blocks, [blocks] float32.

    Returns the codes, [groups, group] int32, and their costs, [blocks] int32.
    """
    inverse = reciprocal(scale, table_ptr + _COEFFICIENTS, PTX)
    quotient = multiply(normalized, _by_element(inverse, normalized), PTX)
    quotient = tl.where(quotient > 1.0, 1.0, tl.where(quotient < -1.0, -1.0, quotient))  # NaN stays
    code = plain_code(quotient, table_ptr, IS_FP4, PTX)
    value = gather(table_ptr, _VALUES + code, PTX).to(tl.float32, bitcast=True)
    error = known - value * _by_element(scale, known)
    cost = _block_sums(_rounded(error * error * _COST_UNITS), scale.shape[0])
    return code, cost
