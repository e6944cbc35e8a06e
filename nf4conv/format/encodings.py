"""How a source may hold float tensors encoded: sources/encodings/encoded.py finds out, codec/decode
decodes.
"""

from enum import Enum


class Method(Enum):
    """How the parts of an encoded tensor become floats; the value is its name in reports.

    The roles of the parts are those that codec.decode.decode takes.
    """

    SCALED = "scaled"
    INT8_ROWS = "int8 rows"
    FP4 = "fp4"
    FP4_TRANSPOSED = "fp4 transposed"
    """A matrix, or a stack of them, stored as [out, in] and loaded as [in, out], as the experts of
    gpt-oss.
    """
    BITSANDBYTES_4BIT = "bitsandbytes 4-bit"
    BITSANDBYTES_4BIT_TRANSPOSED = "bitsandbytes 4-bit transposed"
    """Packed as [out, in] for a family that stores its weights [in, out]."""
    STRIDED = "strided"
    """Not encoded at all, but cut out of a larger tensor with steps between its elements."""
    JOINED = "joined"
    """Rows of several tensors, encoded or not, one after the other."""
    MERGED = "merged with an adapter"
    """Another tensor, encoded or not, to which something is added (sources/header.py: Delta)."""

    @property
    def is_bitsandbytes_4bit(self) -> bool:
        return self in (Method.BITSANDBYTES_4BIT, Method.BITSANDBYTES_4BIT_TRANSPOSED)
