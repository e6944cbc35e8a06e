"""PTX of the loops over k: loads codes and scales of a turn, and decodes them into registers."""

from typing import Any

import triton
import triton.language as tl

from nf4conv.inference.kernels.product.assembly import find_pair, split_word
from nf4conv.inference.kernels.product.panels.tiles import operand


@triton.constexpr_function
def in_pairs(dtype: tl.dtype, shape: Any) -> bool:
    """Returns True if both codes of a byte are looked up at once.

    Where weights are scaled, the table's values are rounded to float16. That is 1/8 of bfloat16's
    rounding, but as much as float16's own.
    """
    pairs: bool = shape.scales_sums or dtype.name == "bf16"
    return pairs


@triton.constexpr_function
def fill_pairs(shape: Any) -> list[str]:
    """Fills the table of pairs: the word of byte b, once for each of 32 banks, at 256 (b % 128) +
    128 (b // 128).
    """
    lines = []
    for turn in range(16 // shape.groups):
        lines += [
            # eight threads write the copies of a byte
            f"add.u32 a, {operand('thread')}, {turn * 128 * shape.groups};",
            "and.b32 h, a, 7;",
            "shr.u32 b, a, 3;",
            f"mad.wide.u32 o, b, 4, {operand('table')};",
            "ld.global.nc.b32 l, [o];",
            "and.b32 a, b, 127;",
            "mad.lo.u32 a, a, 256, pairs;",
            "mad.lo.u32 a, h, 16, a;",
            "shr.u32 b, b, 7;",
            "mad.lo.u32 a, b, 128, a;",
            "st.shared.v4.b32 [a], {l, l, l, l};",
        ]
    return lines


@triton.constexpr_function
def load_words(to: str) -> list[str]:
    """Loads a lane's words of the turn that `mine` belongs to, and goes on to the next."""
    lines = ["setp.lt.u32 p, mine, blocks;"]
    for slot in range(2):
        words = ", ".join(f"{to}{4 * slot + i}" for i in range(4))
        lines += [
            f"@p ld.global.L1::no_allocate.L2::128B.v4.b32 {{{words}}}, [r{slot}];",
            f"add.s64 r{slot}, r{slot}, 64;",
        ]
    return lines


@triton.constexpr_function
def load_scale(shape: Any, ahead: int) -> list[str]:
    """Loads a scale of `ahead` blocks behind `mine` as it is stored: code and nnested, or nnested
    alone.
    """
    lines = [
        f"add.u32 a, mine, {ahead};",
        "sub.u32 b, blocks, 1;",
        "min.u32 a, a, b;",
        "add.u32 a, a, sbase;",
        f"shr.u32 a, a, {operand('shift')};",
    ]
    if not shape.nested:
        return [
            *lines,
            f"mad.wide.u32 o, a, 4, {operand('absmax')};",
            "ld.global.f32 nnested, [o];",
        ]
    return [
        *lines,
        "cvt.u64.u32 o, a;",
        f"add.s64 o, o, {operand('absmax')};",
        "ld.global.u8 code, [o];",
        "shr.u32 a, a, 8;",
        f"mad.wide.u32 o, a, 4, {operand('nested')};",
        "ld.global.f32 nnested, [o];",
    ]


@triton.constexpr_function
def look_scale_up(shape: Any) -> list[str]:
    """Begins to decode what `load_scale` has loaded: found and nested."""
    lines = ["mov.f32 nested, nnested;"]
    if shape.nested:
        lines += [
            "mad.lo.u32 a, code, 4, codes;",
            "ld.shared.f32 found, [a];",
        ]
    return lines


@triton.constexpr_function
def lane_scale(shape: Any) -> list[str]:
    """Decodes a lane's scale of this turn: s, of slot t % 2 in block t // 2."""
    lines = ["mov.f32 s, nested;"]
    if shape.nested:
        lines = ["mul.rn.ftz.f32 s, found, nested;", "add.rn.f32 s, s, offset;"]
    return [*lines, f"mul.rn.f32 s, s, {operand('norm')};"]


@triton.constexpr_function
def take_scales(to: str, half: int) -> list[str]:
    """Takes the scales of a lane's two rows in this half, to registers `to`, from the lanes of its
    quad that have them.
    """
    lines = []
    for slot in range(2):
        lines += [f"shfl.sync.idx.b32 {to}{slot}, s, {2 * half + slot}, 0x1c1f, -1;"]
    return lines


@triton.constexpr_function
def decode_unit(dtype: tl.dtype, shape: Any, half: int) -> list[str]:
    """Decodes a unit, 16 registers."""
    decode = _decode_pairs if in_pairs(dtype, shape) else _decode
    lines = []
    for slot in range(2):
        for word, target in _words_of(shape, half, slot):
            lines += decode(dtype, word, f"s{slot}", target)
    return lines


@triton.constexpr_function
def look_unit_up(shape: Any, half: int) -> list[str]:
    """Looks a unit up in the table of pairs, 16 registers."""
    lines = []
    for slot in range(2):
        for word, target in _words_of(shape, half, slot):
            lines += split_word(word, "value")
            for byte in range(4):
                lines += [*find_pair(byte, "pairs"), f"ld.shared.b32 v{target + byte}, [a];"]
    return lines


@triton.constexpr_function
def _words_of(shape: Any, half: int, slot: int) -> list[tuple[str, int]]:
    """Returns the two words that a slot has in a unit, and the first register of each."""
    words = []
    for word in range(2):
        target = 16 * (half % shape.sets) + 8 * slot + 4 * word
        words += [(f"w{4 * slot + 2 * half + word}", target)]
    return words


@triton.constexpr_function
def _decode(dtype: tl.dtype, word: str, scale: str, target: int) -> list[str]:
    """Decodes a word to four registers of two values, by shuffles: exactly."""
    kind = "bf16x2" if dtype.name == "bf16" else "f16x2"
    lines = []
    for byte in range(4):
        lines += [
            f"shr.u32 a, {word}, {8 * byte + 4};",
            "shfl.sync.idx.b32 e, value, a, 31, -1;",
            f"shr.u32 b, {word}, {8 * byte};",
            "shfl.sync.idx.b32 f, value, b, 31, -1;",
            f"mul.rn.ftz.f32 e, e, {scale};",
            f"mul.rn.ftz.f32 f, f, {scale};",
            f"cvt.rn.{kind}.f32 v{target + byte}, f, e;",
        ]
    return lines


@triton.constexpr_function
def _decode_pairs(dtype: tl.dtype, word: str, scale: str, target: int) -> list[str]:
    """Decodes a word to four registers of two values, by the table of pairs."""
    kind = "bf16x2" if dtype.name == "bf16" else "f16x2"
    lines: list[str] = split_word(word, "value")
    for byte in range(4):
        lines += [
            *find_pair(byte, "pairs"),
            "ld.shared.b32 b, [a];",
            "mov.b32 {x0, x1}, b;",
            "cvt.f32.f16 e, x0;",
            "cvt.f32.f16 f, x1;",
            f"mul.rn.ftz.f32 e, e, {scale};",
            f"mul.rn.ftz.f32 f, f, {scale};",
            f"cvt.rn.{kind}.f32 v{target + byte}, f, e;",
        ]
    return lines


@triton.constexpr_function
def declare_exchange() -> list[str]:
    """Declares registers."""
    return [
        ".reg .pred upper;",
        ".reg .b32 kept, sent, got, even, odds, keep0, send0, keep1, send1;",
    ]


@triton.constexpr_function
def prepare_exchange() -> list[str]:
    """Finds which bytes a lane keeps and sends: `prmt` numbers those of its two operands 0 … 7.

    First with lane t ^ 1, of two words: bytes 0 and 2 of each, or 1 and 3. Then with lane t ^ 2.
    """
    return [
        "setp.ge.u32 upper, t, 2;",
        "selp.b32 keep0, 0x7531, 0x6420, odd;",
        "selp.b32 send0, 0x6420, 0x7531, odd;",
        "selp.b32 a, 0x3715, 0x7351, odd;",
        "selp.b32 b, 0x2604, 0x6240, odd;",
        "selp.b32 keep1, a, b, upper;",
        "selp.b32 send1, b, a, upper;",
    ]


@triton.constexpr_function
def exchange() -> list[str]:
    """Brings words n of a turn to words w as a lane decodes them.

    Words 2 i and 2 i + 1 of a slot become one word for each half of the turn, of two chunks of
    eight k each: chunks 2 i, 2 i + 4, 2 i + 1, 2 i + 5 of the half.
    """
    lines = []
    for slot in range(2):
        for pair in range(2):
            first, second = (f"n{4 * slot + 2 * pair + i}" for i in range(2))
            low, high = (f"w{4 * slot + 2 * half + pair}" for half in range(2))
            lines += [
                f"prmt.b32 sent, {first}, {second}, send0;",
                f"prmt.b32 kept, {first}, {second}, keep0;",
                "shfl.sync.bfly.b32 got, sent, 1, 31, -1;",
                "prmt.b32 sent, kept, got, send1;",
                "prmt.b32 even, kept, got, keep1;",
                "shfl.sync.bfly.b32 odds, sent, 2, 31, -1;",
                f"selp.b32 {low}, odds, even, upper;",
                f"selp.b32 {high}, even, odds, upper;",
            ]
    return lines


@triton.constexpr_function
def register_of(chunk: int) -> int:
    """Returns where the values of a chunk of eight k are, among the eight registers that a slot has
    in a half of a turn.
    """
    word = chunk % 4 // 2
    byte = 2 * (chunk % 2) + chunk // 4
    return 4 * word + byte
