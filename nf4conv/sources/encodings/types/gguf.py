"""Describes tensors of GGUF files, in llama.cpp's blocks or as its converter changed them."""

from dataclasses import dataclass

from nf4conv.sources.tensors import Encoding, Parts, TensorInfo


@dataclass(frozen=True, slots=True)
class GgufBlocks(Encoding):
    """A tensor of a GGUF file: blocks of llama.cpp, or values that its converter changed."""

    values: TensorInfo  # [..., bytes] U8: the blocks of each row; or [...] in its dtype
    block_type: (
        str  # as llama.cpp spells it; "F32", "F16" or "BF16" if the values are stored as such
    )
    changed: str | None = None  # what the converter did, a word of format/gguf.py
    heads: int = 0  # of the rows that it moved
    key_value_heads: int = 0

    @property
    def name(self) -> str:
        return f"GGUF {self.block_type}"

    @property
    def parts(self) -> Parts:
        return (("values", self.values),)

    def decodes_like(self, other: "Encoding") -> bool:
        return (
            isinstance(other, GgufBlocks)
            and self.block_type == other.block_type
            and self.changed == other.changed
            and self.heads == other.heads
            and self.key_value_heads == other.key_value_heads
        )
