"""Finds the decoder of a block type, and decodes rows of blocks: by Triton on a GPU, by torch
elsewhere.
"""

import math
from collections.abc import Callable
from typing import Final

import torch

from nf4conv.codec.backends import has_kernels
from nf4conv.codec.decode.ggml import grids, nested, simple
from nf4conv.errors import CodecError
from nf4conv.format.gguf import BY_NAME, NUMBERS

DECODERS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Q4_0": simple.decode_q4_0,
    "Q4_1": simple.decode_q4_1,
    "Q5_0": simple.decode_q5_0,
    "Q5_1": simple.decode_q5_1,
    "Q8_0": simple.decode_q8_0,
    "Q2_K": nested.decode_q2_k,
    "Q3_K": nested.decode_q3_k,
    "Q4_K": nested.decode_q4_k,
    "Q5_K": nested.decode_q5_k,
    "Q6_K": nested.decode_q6_k,
    "IQ2_XXS": grids.decode_iq2_xxs,
    "IQ2_XS": grids.decode_iq2_xs,
    "IQ2_S": grids.decode_iq2_s,
    "IQ3_XXS": grids.decode_iq3_xxs,
    "IQ3_S": grids.decode_iq3_s,
    "IQ1_S": grids.decode_iq1_s,
    "IQ1_M": grids.decode_iq1_m,
    "IQ4_NL": simple.decode_iq4_nl,
    "IQ4_XS": nested.decode_iq4_xs,
    "TQ1_0": simple.decode_tq1_0,
    "TQ2_0": simple.decode_tq2_0,
    "MXFP4": simple.decode_mxfp4,
    "NVFP4": simple.decode_nvfp4,
}
"""The decoder of each type that the package `gguf` decodes.

It takes [n, bytes of a block] uint8, and returns [n, values of a block] float32.
"""

_VALUES_TOGETHER: Final = 2**18
"""Values that are decoded at a time: the steps in between take several times their memory. What
they leave for each other, 1 MB in float32, stays in a core's cache. With 2^22 they took 1.3 to 2.1
times as long."""


def decode_ggml(values: torch.Tensor, block_type: str, dtype: torch.dtype) -> torch.Tensor:
    """Decodes rows of blocks.

    Args:
        values: [..., bytes] uint8: the blocks of a row one after the other.
        block_type: a key of DECODERS.
        dtype: of the result, to which float32 values are rounded once.

    Returns:
        [..., values] `dtype`.

    Raises:
        CodecError: nf4conv does not decode the type, or a row is no whole number of blocks.
    """
    if block_type not in DECODERS:
        raise CodecError(f"GGUF's type {block_type} is not decoded")
    decode = DECODERS[block_type]
    _, values_of_block, size = BY_NAME[block_type]
    if values.shape[-1] % size != 0:
        raise CodecError(f"{values.shape[-1]} bytes are no whole number of blocks of {block_type}")
    columns = values.shape[-1] // size * values_of_block
    shape = (*values.shape[:-1], columns)
    if has_kernels(values.device):
        from nf4conv.codec.kernels.decoding.ggml import decoding  # importing Triton takes a second

        rows = values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
        out = torch.empty((len(rows), columns), dtype=dtype, device=values.device)
        decoding.decode_blocks(rows.contiguous(), NUMBERS[block_type], out)
        return out.view(shape)
    blocks = values.reshape(-1, size)
    out = torch.empty((len(blocks), values_of_block), dtype=dtype, device=values.device)
    step = _VALUES_TOGETHER // values_of_block
    for start in range(0, len(blocks), step):
        out[start : start + step] = decode(blocks[start : start + step])
    return out.view(shape)
