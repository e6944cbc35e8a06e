"""Finds the decoder of a block type, and decodes rows of blocks."""

from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from nf4conv.codec.decode.ggml import grids, nested, simple
from nf4conv.errors import CodecError


class BlockDecoder(NamedTuple):
    """How blocks of a type are decoded.

    Attributes:
        values: how many values a block has.
        size: bytes of a block.
        decode: takes [n, size] uint8, and returns [n, values] float32.
    """

    values: int
    size: int
    decode: Callable[[torch.Tensor], torch.Tensor]


DECODERS: Final = {
    "Q4_0": BlockDecoder(32, 18, simple.decode_q4_0),
    "Q4_1": BlockDecoder(32, 20, simple.decode_q4_1),
    "Q5_0": BlockDecoder(32, 22, simple.decode_q5_0),
    "Q5_1": BlockDecoder(32, 24, simple.decode_q5_1),
    "Q8_0": BlockDecoder(32, 34, simple.decode_q8_0),
    "Q2_K": BlockDecoder(256, 84, nested.decode_q2_k),
    "Q3_K": BlockDecoder(256, 110, nested.decode_q3_k),
    "Q4_K": BlockDecoder(256, 144, nested.decode_q4_k),
    "Q5_K": BlockDecoder(256, 176, nested.decode_q5_k),
    "Q6_K": BlockDecoder(256, 210, nested.decode_q6_k),
    "IQ2_XXS": BlockDecoder(256, 66, grids.decode_iq2_xxs),
    "IQ2_XS": BlockDecoder(256, 74, grids.decode_iq2_xs),
    "IQ2_S": BlockDecoder(256, 82, grids.decode_iq2_s),
    "IQ3_XXS": BlockDecoder(256, 98, grids.decode_iq3_xxs),
    "IQ3_S": BlockDecoder(256, 110, grids.decode_iq3_s),
    "IQ1_S": BlockDecoder(256, 50, grids.decode_iq1_s),
    "IQ1_M": BlockDecoder(256, 56, grids.decode_iq1_m),
    "IQ4_NL": BlockDecoder(32, 18, simple.decode_iq4_nl),
    "IQ4_XS": BlockDecoder(256, 136, nested.decode_iq4_xs),
    "TQ1_0": BlockDecoder(256, 54, simple.decode_tq1_0),
    "TQ2_0": BlockDecoder(256, 66, simple.decode_tq2_0),
    "MXFP4": BlockDecoder(32, 17, simple.decode_mxfp4),
    "NVFP4": BlockDecoder(64, 36, simple.decode_nvfp4),
}
"""The decoder of each type that the package `gguf` decodes."""

_VALUES_TOGETHER: Final = 2**22
"""Values that are decoded at a time: the steps in between take several times their memory."""


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
    decoder = DECODERS.get(block_type)
    if decoder is None:
        raise CodecError(f"GGUF's type {block_type} is not decoded")
    if values.shape[-1] % decoder.size != 0:
        raise CodecError(f"{values.shape[-1]} bytes are no whole number of blocks of {block_type}")
    columns = values.shape[-1] // decoder.size * decoder.values
    blocks = values.reshape(-1, decoder.size)
    out = torch.empty((len(blocks), decoder.values), dtype=dtype, device=values.device)
    step = _VALUES_TOGETHER // decoder.values
    for start in range(0, len(blocks), step):
        out[start : start + step] = decoder.decode(blocks[start : start + step])
    return out.view(*values.shape[:-1], columns)
