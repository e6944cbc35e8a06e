"""Tensors of GGUF files decoded on the GPU, and their rows put back in order."""

import math
from collections.abc import Mapping
from typing import Final

from nf4conv.format.gguf import BY_NAME, FUSED, NUMBERS, PLAIN, PLUS_ONE, RARE, ROTARY, TRANSPOSED
from nf4conv.run.device.on_driver.batch.buffers import Launch
from nf4conv.run.device.on_driver.kernels import Action, Kernels, Purpose
from nf4conv.sources.encodings.types.gguf import GgufBlocks

_MOVED: Final = (ROTARY, FUSED)
"""Words of format/gguf.py for rows that llama.cpp's converter moved."""

_UNDONE: Final = (None, *_MOVED, TRANSPOSED, PLUS_ONE)
"""The changes that the kernels undo; None for none."""


def ggml_purpose(encoding: GgufBlocks, tag: str) -> Purpose | None:
    """Tells which kernels decode a tensor to the dtype of a tag; None if there are none."""
    if encoding.changed not in _UNDONE or encoding.block_type in RARE:
        return None
    if _is_column(encoding) and encoding.block_type not in PLAIN:
        return None  # a block holds values of several rows
    details = (tag, NUMBERS[encoding.block_type], encoding.changed)
    return Purpose(Action.DECODE_GGML, details)


def decode_ggml(
    encoding: GgufBlocks, places: Mapping[str, int], kernels: Kernels[int], target: int
) -> Launch:
    """Returns the launch that decodes a tensor.

    Args:
        encoding: of the tensor.
        places: the addresses of its parts, by role.
        kernels: those of its purpose.
        target: the address of the result, a multiple of 16.
    """
    values = encoding.values
    rows = math.prod(values.shape[:-1])
    if _is_column(encoding):
        rows = values.shape[0]
    row_bytes = values.nbytes // rows
    _, values_of_block, size = BY_NAME[encoding.block_type]
    columns = row_bytes // size * values_of_block
    tiles_of_row = -(-columns // kernels.numbers["columns"])
    tiles_of_rows = -(-rows // kernels.numbers["rows"])
    arguments = (
        places["values"],
        target,
        rows,
        columns,
        tiles_of_row,
        row_bytes,
        encoding.heads,
        encoding.key_value_heads,
    )
    return Launch(kernels.functions["decode"], tiles_of_rows * tiles_of_row, arguments)


def _is_column(encoding: GgufBlocks) -> bool:
    """Returns True for a bias whose elements were moved: each of them is a row."""
    return encoding.changed in _MOVED and len(encoding.values.shape) == 1
