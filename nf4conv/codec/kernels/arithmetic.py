"""float32 operations as bitsandbytes' CUDA library performs them: subnormal numbers flushed,
nothing contracted; and lookups in small tables.

The library is built with fast math, so a reciprocal is the hardware's approximation, and
multiplications flush subnormal operands and results to zeros of the same sign (docs/format.md).
Triton has no spelling for either; hence inline assembly, with a plain form beside it for the
interpreter.
"""

import triton
import triton.language as tl

SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)  # 2^-126, the smallest float32 not flushed
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest float32 that is finite


@triton.jit
def flush(x):
    """Replaces subnormal numbers by zeros of their sign."""
    return tl.where(tl.abs(x) < SMALLEST_NORMAL, x * 0.0, x)


@triton.jit
def multiply(a, b, PTX: tl.constexpr):
    """Multiplies tensors of one shape; operands and results are flushed."""
    if PTX:
        return tl.inline_asm_elementwise(
            "mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return flush(flush(a) * flush(b))


@triton.jit
def reciprocal(a, coefficient_ptr, PTX: tl.constexpr):
    """Returns 1 / a, float32, as the hardware approximates it; operands and results are flushed.

    With PTX the hardware does it. Otherwise this is the rule of codec/reciprocal.py, with
    coefficient_ptr: [3, 128] int32, reciprocal.coefficients.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        bits = a.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) & 0xFF
        row_ptr = coefficient_ptr + ((bits >> 16) & 0x7F)
        mantissa = tl.load(row_ptr).to(tl.int64) << 13
        mantissa -= tl.load(row_ptr + 128).to(tl.int64) * (bits & 0xFFFF)
        mantissa += tl.load(row_ptr + 256).to(tl.int64) * _truncated_square(bits & 0xFFFF)
        mantissa = ((mantissa + 2023) >> 15).to(tl.int32)
        found = (((253 - exponent) << 23) + (mantissa - 0x800000)).to(tl.float32, bitcast=True)
        found = tl.where(found >= SMALLEST_NORMAL, found, 0.0)
        found = tl.where(exponent == 0, float("inf"), found)
        of_inf_or_nan = tl.where((bits & 0x7FFFFF) == 0, 0.0, float("nan"))
        found = tl.where(exponent == 255, of_inf_or_nan, found)
        # not -found: Triton 3.6 computes it as 0 - found, where a zero loses its sign
        return tl.where(bits < 0, found * -1.0, found)


@triton.jit
def _truncated_square(t):
    """Returns t² / 2^17 of 16 bits, without the products of two bits that are below 2^17; see
    codec/reciprocal.py.
    """
    total = t * 0
    for high in tl.static_range(9, 16):
        below = (t & ((1 << high) - (1 << (16 - high)))) >> (16 - high)
        total += ((t >> high) & 1) * (below + (1 << (2 * high - 17)))
    return total


@triton.jit
def magnitude(x):
    """Returns |x|, and for NaN the lowest float32.

    A maximum over these ignores NaN, as bitsandbytes' does.
    """
    return tl.where(x != x, LOWEST, tl.abs(x))


@triton.jit
def lane_entry(table_ptr, elements):
    """Loads one entry for each lane, int32, of a table of 32 words, for shuffles to look up; in the
    shape of `elements`. Only with inline assembly: the interpreter has no lanes.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 lane;
        .reg .b64 entry;
        mov.u32 lane, %laneid;
        mad.wide.u32 entry, lane, 4, $1;
        ld.global.nc.b32 $0, [entry];
        }""",
        "=r,l",
        [tl.zeros(elements.shape, tl.int64) + table_ptr.to(tl.int64)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def lookup(table_ptr, index, PTX: tl.constexpr):
    """Returns table[index % 32] of a table of 32 words whose halves are equal.

    The index is int32, of at least one element for each lane.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 31, -1;",
            "=r,r,r",
            [lane_entry(table_ptr, index), index],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.load(table_ptr + (index & 15))


@triton.jit
def gather(table_ptr, index, PTX: tl.constexpr):
    """Returns table[index] of a table of int32 words; the index is of any shape.

    tl.load would be free to give its result another layout in the threads, and so to all that is
    computed with it.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b64 entry;
            mad.wide.s32 entry, $1, 4, $2;
            ld.global.nc.b32 $0, [entry];
            }""",
            "=r,r,l",
            [index, tl.zeros(index.shape, tl.int64) + table_ptr.to(tl.int64)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.load(table_ptr + index)
