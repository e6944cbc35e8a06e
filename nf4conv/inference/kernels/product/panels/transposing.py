"""PTX of assembly.py: exchanges bytes of codes between the four lanes of a quad.

`wgmma` takes of eight adjacent k of a row two from each lane of a quad: of each word of codes lane
t wants byte t. A lane loads 16 adjacent bytes, four words, and so has all bytes of a quarter of the
words. Two exchanges with a neighbour, of half of what a lane has each, bring every byte to its lane
(a transposition of 4 × 4 bytes for each word).
"""

import triton


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
