"""Decodes some experts of a stack, bit for bit as bitsandbytes decodes each of them."""

import torch

from nf4conv.codec.backends import backend
from nf4conv.codec.quant_state import Decoding
from nf4conv.codec.reference.blocks import flushed
from nf4conv.inference.experts.packed import PackedExperts


def decode(packed: PackedExperts, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decodes experts.

    Args:
        packed: all experts.
        ids: [n] int64 or int32, which of them, on their device.
        dtype: of the result: float32, float16 or bfloat16.

    Returns:
        [n, rows, columns], contiguous.
    """
    codes = packed.codes.index_select(0, ids)
    absmax = decoded_absmax(packed, ids)
    shape = (codes.shape[0], packed.rows, packed.columns)
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    functions = backend(packed.device)
    if (packed.rows * packed.columns) % packed.blocksize == 0:
        pieces = [(codes.view(-1), absmax.view(-1), out.view(-1))]
    else:  # the last block of each expert is shorter
        pieces = []
        for i in range(out.shape[0]):
            pieces.append((codes[i], absmax[i], out[i].view(-1)))
    for piece, scales, target in pieces:
        decoding = Decoding(scales, None, None, packed.quant_type, packed.blocksize)
        functions.dequantize_blocks(piece, decoding, target)
    return out


def decoded_absmax(packed: PackedExperts, ids: torch.Tensor) -> torch.Tensor:
    """Returns the absmax of experts as they decode, [n, blocks] float32.

    A nested one is a flushed product, then a sum, each rounded.
    """
    absmax = packed.absmax.index_select(0, ids)
    if packed.nested_absmax is None or packed.nested_quant_map is None:
        return absmax
    assert packed.nested_offset is not None
    block = nested_blocks(packed, ids)
    scale = flushed(packed.nested_absmax).index_select(0, block.view(-1)).view(block.shape)
    values = flushed(packed.nested_quant_map).index_select(0, absmax.view(-1).int())
    offset = packed.nested_offset
    if offset.numel() > 1:
        offset = offset.index_select(0, ids)[:, None]
    return flushed(values.view(absmax.shape) * scale) + offset


def nested_blocks(packed: PackedExperts, ids: torch.Tensor) -> torch.Tensor:
    """Returns the index of the nested block of each absmax of experts: [n, blocks] int64."""
    blocks = packed.absmax.shape[1]
    within = torch.arange(blocks, device=ids.device)
    expert = ids.long()[:, None]
    if packed.nested_blocks_per_expert is None:
        return (expert * blocks + within) // packed.nested_blocksize
    return expert * packed.nested_blocks_per_expert + within // packed.nested_blocksize
