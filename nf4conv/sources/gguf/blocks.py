"""Describes tensors of GGUF files, in llama.cpp's blocks or as its converter changed them."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from nf4conv.format.gguf import BY_NAME, FUSED, NUMBERS, PLAIN, PLUS_ONE, RARE, ROTARY, TRANSPOSED
from nf4conv.sources.tensors import Encoding, Kernel, TensorInfo, cut_rows

_UNDONE: Final = (None, ROTARY, FUSED, TRANSPOSED, PLUS_ONE)
"""The changes that the kernel undoes, words of format/gguf.py; None for none."""


@dataclass(frozen=True, slots=True)
class GgufBlocks(Encoding):
    """A tensor of a GGUF file: blocks of llama.cpp, or values that its converter changed."""

    is_quantization: ClassVar[bool] = True

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
    def made_from(self) -> str:
        return self.values.made_from if self.block_type in PLAIN else self.name

    @property
    def has_few_bits(self) -> bool:
        return self.block_type not in ("Q8_0", *PLAIN)

    def kernel(self, tensor: TensorInfo) -> Kernel | None:
        """Returns what decodes a tensor; each element of a bias that was moved is a row."""
        values = self.values
        is_column = self.changed in (ROTARY, FUSED) and len(values.shape) == 1
        if self.block_type in RARE or self.changed not in _UNDONE:
            return None
        if is_column and self.block_type not in PLAIN:
            return None  # a block holds values of several rows
        rows = values.shape[0] if is_column else math.prod(values.shape[:-1])
        row_bytes = values.nbytes // max(rows, 1)
        _, values_of_block, size = BY_NAME[self.block_type]
        return Kernel(
            maker="ggml_decoder",
            details=(NUMBERS[self.block_type], self.changed),
            pointers=("values",),
            shape=(rows, row_bytes // size * values_of_block),
            numbers=(row_bytes, self.heads, self.key_value_heads),
        )

    def rows_together(self, tensor: TensorInfo) -> int | None:
        if self.changed is None:
            return 1
        # rows change places in the head that they belong to
        return max(tensor.shape[0] // self.heads, 1) if self.changed == ROTARY else None

    def rows(self, tensor: TensorInfo, start: int, stop: int) -> Encoding:
        heads = self.heads
        if self.changed == ROTARY:
            heads = (stop - start) // max(tensor.shape[0] // heads, 1)
        return replace(self, values=cut_rows(self.values, start, stop), heads=heads)

    def transposed(self) -> Encoding | None:
        return replace(self, changed=None) if self.changed == TRANSPOSED else None
