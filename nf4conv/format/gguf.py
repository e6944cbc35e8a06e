"""Lists the types in which a GGUF file stores values, and what is done to weights before.

The numbers of the types are those of ggml_type in llama.cpp's ggml.h. A tensor is a whole number of
blocks; a block of a type that is not quantized is one value.
"""

from typing import Final, NamedTuple


class BlockType(NamedTuple):
    """A type.

    Attributes:
        name: as llama.cpp spells it.
        values: how many values a block has.
        size: bytes of a block.
    """

    name: str
    values: int
    size: int


_DTYPES: Final = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    30: BlockType("BF16", 1, 2),
}

_COMMON: Final = {
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
}

_RARE: Final = {
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
}

BLOCK_TYPES: Final = {**_DTYPES, **_COMMON, **_RARE}
"""The types of weights that are decoded; a test compares them with the package `gguf`."""

RARE: Final = tuple(block_type.name for block_type in _RARE.values())
"""Types that few files have. The package `gguf` decodes them, on a CPU."""

PLAIN: Final = ("F32", "F16", "BF16")
"""Types that are dtypes."""

BY_NAME: Final = {block_type.name: block_type for block_type in BLOCK_TYPES.values()}
"""The same types by their names."""

NUMBERS: Final = {block_type.name: number for number, block_type in BLOCK_TYPES.items()}
"""The number of each of these types by its name."""

# What llama.cpp's converter does to weights of some modules, and reading a file has to undo.

ROTARY: Final = "rotary"
"""Rows of queries and keys: the halves of each head were put side by side."""

FUSED: Final = "fused"
"""Rows of fused queries, keys and values: they were sorted by kind."""

PLUS_ONE: Final = "plus one"
"""Norms: 1 was added to them."""

TRANSPOSED: Final = "transposed"
"""Matrices that transformers stores as [in, out]."""

NEGATIVE_EXP: Final = "negative exponential"
"""Logarithms: they were replaced by -exp of them."""

TILED: Final = "tiled"
"""Columns of heads that share a key: they were sorted by their number within a key's heads."""
