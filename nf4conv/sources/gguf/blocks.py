"""Describes tensors of GGUF files, in llama.cpp's blocks or as its converter changed them."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from nf4conv.format.gguf import BY_NAME, LAYOUTS, PLAIN, PLUS_ONE, ROTARY, TRANSPOSED
from nf4conv.sources.gguf.header import GgufTensor
from nf4conv.sources.tensors import Encoding, Kernel, TensorInfo, cut_rows

_UNDONE: Final = (None, ROTARY, PLUS_ONE)
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
    heads: int = 0  # of the rows that it moved; of tiled columns, those of the keys
    shared: int = 0  # heads that share a key, of tiled columns

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
        is_column = self.changed == ROTARY and len(values.shape) == 1
        # a block holds values of several rows of a column
        is_decoded = self.block_type in PLAIN or (self.block_type in LAYOUTS and not is_column)
        if not is_decoded or self.changed not in _UNDONE:
            return None
        rows = values.shape[0] if is_column else math.prod(values.shape[:-1])
        row_bytes = values.nbytes // max(rows, 1)
        number, _, values_of_block, size = BY_NAME[self.block_type]
        return Kernel(
            maker="ggml_decoder",
            details=(number, self.changed),
            pointers=("values",),
            shape=(rows, row_bytes // size * values_of_block),
            numbers=(row_bytes, self.heads),
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

    def matrix(self, tensor: TensorInfo, index: int) -> Encoding:
        return replace(self, values=self.values.matrix(index))


def as_stored(tensor: GgufTensor, dtype: str) -> TensorInfo:
    """Returns a tensor as it lies in the file, to be decoded to the dtype of a tag."""
    name, shape, block_type, file, start = tensor
    stop = start + tensor.nbytes
    if block_type.name in PLAIN:
        values = TensorInfo(name, block_type.name, shape, file, start, stop)
        if block_type.name == dtype:
            return values
    else:
        size = shape[-1] // block_type.values * block_type.size
        values = TensorInfo(name, "U8", (*shape[:-1], size), file, start, stop)
    return values._replace(dtype=dtype, shape=shape, encoding=GgufBlocks(values, block_type.name))


def undone(stored: TensorInfo, change: str, heads: int = 0, shared: int = 0) -> TensorInfo:
    """Returns a tensor of which a change, a word of format/gguf.py, is undone when it is read.

    `heads` and `shared` are as of GgufBlocks.
    """
    encoding = stored.encoding or GgufBlocks(stored, stored.dtype)
    assert isinstance(encoding, GgufBlocks)
    shape = stored.shape[::-1] if change == TRANSPOSED else stored.shape
    blocks = replace(encoding, changed=change, heads=heads, shared=shared)
    return stored._replace(shape=shape, encoding=blocks)


def matrix_of(stack: TensorInfo, index: int) -> TensorInfo:
    """Returns one matrix of a stack."""
    return _placed(stack.matrix(index))


def rows_of(tensor: TensorInfo, first: int, count: int) -> TensorInfo:
    """Returns some rows of a tensor; raises a ValueError if they are no whole blocks."""
    encoding = tensor.encoding
    block_type = encoding.block_type if isinstance(encoding, GgufBlocks) else "F32"
    if len(tensor.shape) == 1 and block_type not in PLAIN:
        raise ValueError(f"is a vector in blocks of {block_type}")
    return _placed(tensor.rows(first, first + count))


def _placed(cut: TensorInfo) -> TensorInfo:
    """Returns what was cut out of a tensor with the place of its own bytes."""
    if not isinstance(cut.encoding, GgufBlocks):
        return cut
    values = cut.encoding.values
    return cut._replace(start=values.start, stop=values.stop)
