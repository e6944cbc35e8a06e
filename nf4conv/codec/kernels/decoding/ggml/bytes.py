"""Loads bytes and numbers out of blocks.

All functions take the address of a block, and of bytes in it the number of the first one, for each
value of a tile. `inside` is False for values that there are not.
"""

import triton
import triton.language as tl


@triton.jit
def byte(block_ptr, number, inside):
    """Returns a byte as int32."""
    return tl.load(block_ptr + number, mask=inside, other=0).to(tl.int32)


@triton.jit
def signed_byte(block_ptr, number, inside):
    """Returns an int8 as int32."""
    return (byte(block_ptr, number, inside) << 24) >> 24


@triton.jit
def word_16(block_ptr, number, inside):
    """Returns a little-endian word of 16 bits as int32."""
    return byte(block_ptr, number, inside) | (byte(block_ptr, number + 1, inside) << 8)


@triton.jit
def word_32(block_ptr, number, inside):
    """Returns a little-endian word of 32 bits as int32, whose highest bit is its sign."""
    high = word_16(block_ptr, number + 2, inside)
    return word_16(block_ptr, number, inside) | (high << 16)


@triton.jit
def half(block_ptr, number, inside):
    """Returns a number in half precision as float32."""
    return to_half(word_16(block_ptr, number, inside))


@triton.jit
def to_half(word):
    """Returns the number in half precision that has these bits, as float32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def field(block_ptr, first, number, BITS: tl.constexpr, RUN: tl.constexpr, inside):
    """Returns a field of a few bits, by its number among those that begin at byte `first`.

    A run of RUN bytes holds the lowest field of each byte first, then the second field of each
    byte, and so on; runs follow each other.
    """
    FIELDS: tl.constexpr = 8 // BITS
    run = number // (RUN * FIELDS)
    found = byte(block_ptr, first + run * RUN + number % RUN, inside)
    return (found >> (number // RUN % FIELDS * BITS)) & ((1 << BITS) - 1)


@triton.jit
def sign(bit):
    """Returns 1 for a bit that is 0, and -1 for one that is 1, in float32."""
    return (1 - 2 * bit).to(tl.float32)
