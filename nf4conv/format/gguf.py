"""Lists the types in which a GGUF file stores values, and what is done to weights before.

The numbers of the types are those of ggml_type in llama.cpp's ggml.h. A tensor is a whole number of
blocks; a block of a type that is not quantized is one value.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple


class BlockType(NamedTuple):
    """A type.

    Attributes:
        number: of ggml_type.
        name: as llama.cpp spells it.
        values: how many values a block has.
        size: bytes of a block.
    """

    number: int
    name: str
    values: int
    size: int


_COMMON: Final = (
    BlockType(0, "F32", 1, 4),
    BlockType(1, "F16", 1, 2),
    BlockType(30, "BF16", 1, 2),
    BlockType(2, "Q4_0", 32, 18),
    BlockType(3, "Q4_1", 32, 20),
    BlockType(6, "Q5_0", 32, 22),
    BlockType(7, "Q5_1", 32, 24),
    BlockType(8, "Q8_0", 32, 34),
    BlockType(10, "Q2_K", 256, 84),
    BlockType(11, "Q3_K", 256, 110),
    BlockType(12, "Q4_K", 256, 144),
    BlockType(13, "Q5_K", 256, 176),
    BlockType(14, "Q6_K", 256, 210),
)

_RARE: Final = (
    BlockType(16, "IQ2_XXS", 256, 66),
    BlockType(17, "IQ2_XS", 256, 74),
    BlockType(18, "IQ3_XXS", 256, 98),
    BlockType(19, "IQ1_S", 256, 50),
    BlockType(20, "IQ4_NL", 32, 18),
    BlockType(21, "IQ3_S", 256, 110),
    BlockType(22, "IQ2_S", 256, 82),
    BlockType(23, "IQ4_XS", 256, 136),
    BlockType(29, "IQ1_M", 256, 56),
    BlockType(34, "TQ1_0", 256, 54),
    BlockType(35, "TQ2_0", 256, 66),
    BlockType(39, "MXFP4", 32, 17),
    BlockType(40, "NVFP4", 64, 36),
)

_TYPES: Final = (*_COMMON, *_RARE)

BLOCK_TYPES: Final = {block_type.number: block_type for block_type in _TYPES}
"""The types of weights that are decoded; a test compares them with the package `gguf`."""

BY_NAME: Final = {block_type.name: block_type for block_type in _TYPES}
"""The same types by their names."""

PLAIN: Final = ("F32", "F16", "BF16")
"""Types that are dtypes."""


@dataclass(frozen=True)
class Fields:
    """Says where fields of a few bits are.

    A run of bytes holds the lowest field of each byte first, then the second field of each byte,
    and so on; runs follow each other.

    Attributes:
        first: the byte of the block where they begin.
        bits: of a field: 1, 2, 4 or 8; 0 if there are none.
        run: bytes of a run.
    """

    first: int
    bits: int
    run: int


# How the scales of groups are stored.
NIBBLES: Final = "nibbles"  # the scale in the low one of a byte, the minimum in the high one
SPLIT: Final = "split"  # 6 bits less 32: 16 times 4 bits, then 16 times 2 bits above them
PACKED: Final = "packed"  # 8 scales and 8 minimums of 6 bits in 12 bytes
SIGNED: Final = "signed"  # bytes


@dataclass(frozen=True)
class Layout:  # no tuple, which Triton would take apart
    """Says how a block holds values: scale · (code - center) + minimum, or where groups of values
    have scales of their own, scale · group's · (code - center) - minimum · group's.

    Attributes:
        scale: the byte of the scale, in half precision.
        low: the lower bits of codes; 8 bits are signed.
        high: the bits above them.
        center: what is subtracted from codes.
        has_minimum: True if a minimum in half precision stands behind the scale.
        kind: how the scales of groups are stored; empty if there are no groups.
        first: the byte where these begin.
        group: values of a group.
    """

    scale: int
    low: Fields
    high: Fields = Fields(0, 0, 1)
    center: int = 0
    has_minimum: bool = False
    kind: str = ""
    first: int = 0
    group: int = 0


_WITHOUT_GROUPS: Final = {
    "Q4_0": Layout(0, Fields(2, 4, 16), center=8),
    "Q4_1": Layout(0, Fields(4, 4, 16), has_minimum=True),
    "Q5_0": Layout(0, Fields(6, 4, 16), Fields(2, 1, 1), center=16),
    "Q5_1": Layout(0, Fields(8, 4, 16), Fields(4, 1, 1), has_minimum=True),
    "Q8_0": Layout(0, Fields(2, 8, 32)),
}

_WITH_GROUPS: Final = {
    "Q2_K": Layout(80, Fields(16, 2, 32), has_minimum=True, kind=NIBBLES, first=0, group=16),
    "Q3_K": Layout(
        108, Fields(32, 2, 32), Fields(0, 1, 32), center=4, kind=SPLIT, first=96, group=16
    ),
    "Q4_K": Layout(0, Fields(16, 4, 32), has_minimum=True, kind=PACKED, first=4, group=32),
    "Q5_K": Layout(
        0, Fields(48, 4, 32), Fields(16, 1, 32), has_minimum=True, kind=PACKED, first=4, group=32
    ),
    "Q6_K": Layout(
        208, Fields(0, 4, 64), Fields(128, 2, 32), center=32, kind=SIGNED, first=192, group=16
    ),
}

LAYOUTS: Final = {**_WITHOUT_GROUPS, **_WITH_GROUPS}
"""The layouts of the types that nf4conv decodes itself, by ggml-common.h and ggml-quants.c in
llama.cpp. The package `gguf` decodes the others, which few files have, on a CPU.
"""

# What llama.cpp's converter does to weights of some modules, and reading a file has to undo.

ROTARY: Final = "rotary"
"""Rows of queries and keys: the halves of each head were put side by side."""

PLUS_ONE: Final = "plus one"
"""Norms: 1 was added to them."""

TRANSPOSED: Final = "transposed"
"""Matrices that transformers stores as [in, out]."""

NEGATIVE_EXP: Final = "negative exponential"
"""Logarithms: they were replaced by -exp of them."""

TILED: Final = "tiled"
"""Columns of heads that share a key: they were sorted by their number within a key's heads."""
