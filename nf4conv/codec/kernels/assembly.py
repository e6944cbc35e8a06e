"""The inline assembly of the hot loops: PTX text, made at compile time for a dtype and a data type.

The loops look values up in tables that a warp holds in its lanes, one entry each: `shfl.sync.idx`
reads the register of the lane whose number is in the low five bits of the index. A shuffle costs
one issue slot, where a table in memory costs an address computation as well, and a tree of selects
twenty-odd instructions. A shuffle needs all 32 lanes of a warp, so there is no data-dependent
branch around these loops anywhere.

A function returns the text of one asm statement; its operands are $0, $1, …, the results first.
"""

import triton
import triton.language as tl

_NF4_STEPS = "0f41740000"  # 15.25
_NF4_ROUND = "0f4B40000F"  # 1.5 · 2^23 + 15: adding it to 15.25 q leaves the bucket in the low bits
_FP4_ROUND = "0f49400000"  # 1.5 · 2^19: adding it to |q| leaves 16 |q|, rounded, in the low bits


@triton.constexpr_function
def encode_assembly(dtype: tl.dtype, is_fp4: bool) -> str:
    """Quantizes one slot.

    Operands: $0 the packed codes; $1 … $4 the slot's words; $5 the reciprocal of absmax; $6, $7
    this lane's cut and count of `tables.bucket_table`.
    """
    elements = 4 if dtype.name == "fp32" else 8
    lines = [
        ".reg .f32 x, q, m, t, d;",
        ".reg .b32 i, b, s, codes, signs;",
        ".reg .b16 l, h;",
        "mov.b32 codes, 0;",
        "mov.b32 signs, 0;",
    ]
    # bytes from the highest down, and in each the even element first, into the high nibble
    for byte in reversed(range(elements // 2)):
        lines += _encode_element(dtype, 2 * byte, is_fp4)
        lines += _encode_element(dtype, 2 * byte + 1, is_fp4)
    if is_fp4:
        lines += [
            # ranks 0 … 7 are the codes 0, 1, 6, 7, 4, 5, 2, 3
            "and.b32 s, codes, 0x22222222;",
            "shl.b32 s, s, 1;",
            "xor.b32 codes, codes, s;",
            "and.b32 signs, signs, 0x88888888;",
            "or.b32 codes, codes, signs;",
        ]
    lines += ["mov.b32 $0, codes;"]
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def _encode_element(dtype: tl.dtype, element: int, is_fp4: bool) -> list[str]:
    """Finds the code of an element, and push it into `codes`, and its sign into `signs`."""
    lines = [*_load_element(dtype, element), "mul.rn.ftz.f32 q, x, $5;"]
    if is_fp4:
        lines += ["abs.f32 m, q;", f"add.rn.f32 d, m, {_FP4_ROUND};"]
    else:
        lines += ["mov.f32 m, q;", f"fma.rn.f32 d, q, {_NF4_STEPS}, {_NF4_ROUND};"]
    lines += [
        "mov.b32 i, d;",
        "shfl.sync.idx.b32 t, $6, i, 31, -1;",
        "shfl.sync.idx.b32 b, $7, i, 31, -1;",
        # negative if and only if the quotient is above the cut; NaN is not
        "sub.rn.f32 d, t, m;",
        "mov.b32 s, d;",
        "shr.u32 s, s, 31;",
        "mad.lo.u32 codes, codes, 16, b;",
        "add.u32 codes, codes, s;",
    ]
    if is_fp4:
        lines += [
            # the top bit of q + 0 is set for negative numbers but not for -0
            "add.rn.f32 d, q, 0f00000000;",
            "mov.b32 s, d;",
            "shf.l.wrap.b32 signs, s, signs, 4;",
        ]
    return lines


@triton.constexpr_function
def _load_element(dtype: tl.dtype, element: int) -> list[str]:
    """Sets x to an element of the slot, whose words are $1 … $4."""
    if dtype.name == "fp32":
        return [f"mov.b32 x, ${1 + element};"]
    word = f"${1 + element // 2}"
    is_upper = element % 2 == 1
    if dtype.name == "bf16":
        if is_upper:
            return [f"and.b32 x, {word}, 0xffff0000;"]
        return [f"shl.b32 x, {word}, 16;"]
    half = "h" if is_upper else "l"
    return [f"mov.b32 {{l, h}}, {word};", f"cvt.f32.f16 x, {half};"]


@triton.constexpr_function
def peak_assembly(dtype: tl.dtype) -> str:
    """Finds the largest magnitude in one slot; NaN is ignored, and is the result of nothing else.

    Operands: $0 float32; $1 … $4 the slot's words.
    """
    lines = [".reg .b32 a, b, c, d;", ".reg .f32 x, y;", ".reg .b16 l, h;"]
    if dtype.name == "fp32":
        lines += ["abs.f32 x, $1;"]
        for word in ("$2", "$3", "$4"):
            lines += [f"abs.f32 y, {word};", "max.f32 x, x, y;"]
        lines += ["mov.f32 $0, x;"]
        return "\n".join(["{", *lines, "}"])
    kind = "bf16x2" if dtype.name == "bf16" else "f16x2"
    lines += [
        "and.b32 a, $1, 0x7fff7fff;",
        "and.b32 b, $2, 0x7fff7fff;",
        "and.b32 c, $3, 0x7fff7fff;",
        "and.b32 d, $4, 0x7fff7fff;",
        f"max.{kind} a, a, b;",
        f"max.{kind} c, c, d;",
        f"max.{kind} a, a, c;",
    ]
    if dtype.name == "bf16":
        lines += ["shl.b32 x, a, 16;", "and.b32 y, a, 0xffff0000;"]
    else:
        lines += ["mov.b32 {l, h}, a;", "cvt.f32.f16 x, l;", "cvt.f32.f16 y, h;"]
    lines += ["max.f32 $0, x, y;"]
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def bisect_assembly() -> str:
    """Finds the code of one nested quotient: the number of middles below it; a middle itself counts
    if its index is odd.

    Row 7 of `tables.middle_table` holds every eighth middle: five halvings on it find the group of
    eight, three more on the other rows the place in it.

    Operands: $0 the code; $1 the quotient; $2 … $9 this lane's entry in rows 0 … 7 of the table.
    """
    lines = [".reg .pred p, r;", ".reg .f32 m, n;", ".reg .b32 g, i, c;", "mov.b32 g, 0;"]
    for half in (16, 8, 4, 2, 1):
        lines += [
            f"add.u32 i, g, {half - 1};",
            "shfl.sync.idx.b32 m, $9, i, 31, -1;",
            "setp.ge.f32 p, $1, m;",
            f"@p add.u32 g, g, {half};",
        ]
    lines += [
        "shl.b32 c, g, 3;",
        # p: in the upper four of the group
        "shfl.sync.idx.b32 m, $5, g, 31, -1;",
        "setp.ge.f32 p, $1, m;",
        "@p add.u32 c, c, 4;",
        # r: in the upper two of these
        "shfl.sync.idx.b32 m, $3, g, 31, -1;",
        "shfl.sync.idx.b32 n, $7, g, 31, -1;",
        "@p mov.f32 m, n;",
        "setp.ge.f32 r, $1, m;",
        "@r add.u32 c, c, 2;",
        # the upper one of these: a middle itself does not count, its index is even
        ".reg .f32 m4, m6;",
        "shfl.sync.idx.b32 m, $2, g, 31, -1;",
        "shfl.sync.idx.b32 n, $4, g, 31, -1;",
        "shfl.sync.idx.b32 m4, $6, g, 31, -1;",
        "shfl.sync.idx.b32 m6, $8, g, 31, -1;",
        "@p mov.f32 m, m4;",
        "@p mov.f32 n, m6;",
        "@r mov.f32 m, n;",
        "setp.gt.f32 p, $1, m;",
        "@p add.u32 c, c, 1;",
        "mov.b32 $0, c;",
    ]
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def nearest_assembly() -> str:
    """Finds the least distance of two positions, float16 side by side in a word, from 0 and from
    eight levels.

    Operands: $0 the distances; $1 the positions, not negative; $2 … $9 the levels, each twice in a
    word.
    """
    lines = [".reg .b32 d, n;", "mov.b32 n, $1;"]
    for level in range(2, 10):
        lines += [f"sub.rn.f16x2 d, $1, ${level};", "abs.f16x2 d, d;", "min.f16x2 n, n, d;"]
    lines += ["mov.b32 $0, n;"]
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def look_up(element: int, word: str, value: str, target: str) -> list[str]:
    """Sets `target` to the value of one of the eight codes of a word, by a shuffle.

    Byte j of a word has elements 2 j, in the high nibble, and 2 j + 1. Bit 4 of the index may be
    anything: lanes hold the table twice. i is a register; `value` is this lane's.
    """
    shift = 8 * (element // 2) + 4 * (1 - element % 2)
    read = f"shfl.sync.idx.b32 {target}, {value}"
    if shift == 0:
        return [f"{read}, {word}, 31, -1;"]
    return [f"shr.u32 i, {word}, {shift};", f"{read}, i, 31, -1;"]


@triton.constexpr_function
def values_assembly() -> str:
    """Decodes a word to eight float32.

    Operands: $0 … $7 the elements; $8 the packed codes; $9 this lane's value; $10 absmax.
    """
    lines = [".reg .f32 v;", ".reg .b32 i;"]
    for element in range(8):
        lines += look_up(element, "$8", "$9", "v")
        lines += [f"mul.rn.ftz.f32 ${element}, v, $10;"]
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def decode_assembly(dtype: tl.dtype) -> str:
    """Dequantizes one slot.

    Operands: $0 … $3 the four output words; $4 the packed codes; $5 absmax; $6 this lane's value.
    """
    elements = 4 if dtype.name == "fp32" else 8
    lines = [".reg .f32 v<8>;", ".reg .b32 i;"]
    for element in range(elements):
        lines += look_up(element, "$4", "$6", f"v{element}")
        lines += [f"mul.rn.ftz.f32 v{element}, v{element}, $5;"]
    for word in range(4):
        if dtype.name == "fp32":
            lines += [f"mov.b32 ${word}, v{word};"]
        else:
            kind = "bf16x2" if dtype.name == "bf16" else "f16x2"
            lines += [f"cvt.rn.{kind}.f32 ${word}, v{2 * word + 1}, v{2 * word};"]
    return "\n".join(["{", *lines, "}"])
