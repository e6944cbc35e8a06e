"""Packed codes → weight, and absmax as it decodes."""

import torch

from nf4conv.codec.quant_state import Decoding
from nf4conv.codec.reference.blocks import CHUNK, flushed
from nf4conv.format.codebook import CODEBOOKS, NESTED_BLOCKSIZE


def dequantize_blocks(packed: torch.Tensor, decoding: Decoding, out: torch.Tensor) -> None:
    """Decodes a packed weight: the value of each code times the absmax of its block, rounded to the
    dtype of `out`.

    Args:
        packed: ceil(n / 2) uint8, contiguous, of any shape.
        decoding: of the codes.
        out: n float32, float16 or bfloat16, contiguous, of any shape, written.
    """
    packed, out = packed.view(-1), out.view(-1)
    scales = flushed(decoded_absmax(decoding))
    table = decoded_values(decoding.quant_type, out.device)
    for start in range(0, out.numel(), CHUNK):
        stop = start + CHUNK
        target = out[start:stop]
        count = target.numel()
        codes = unpacked(packed[start // 2 : stop // 2])
        values = table.index_select(0, codes[:count])
        scale = spread(scales, decoding.blocksize, start, count)
        target.copy_(flushed(values * scale))
        _write_nan_as_cuda(target)


def _write_nan_as_cuda(values: torch.Tensor) -> None:
    """Gives every NaN the bits that the GPU's multiply and conversion give it: all ones but the
    sign.
    """
    if values.dtype == torch.float32:
        bits = values.view(torch.int32)
    else:
        bits = values.view(torch.int16)
    all_but_the_sign = torch.iinfo(bits.dtype).max
    bits.masked_fill_(values.isnan(), all_but_the_sign)


def decoded_absmax(decoding: Decoding) -> torch.Tensor:
    """Returns absmax as it decodes, [blocks] float32.

    A nested one is a flushed product, then a sum, each rounded.
    """
    absmax, code, nested_absmax, offset = decoding.pointers()
    if decoding.offset is None:
        return absmax
    values = flushed(code).index_select(0, absmax.int())
    return flushed(values * nested_scales(nested_absmax, len(absmax))) + offset


def nested_scales(nested_absmax: torch.Tensor, blocks: int) -> torch.Tensor:
    """Returns the nested absmax that each code is multiplied by: [blocks] float32."""
    by_code = flushed(nested_absmax)[:, None].expand(-1, NESTED_BLOCKSIZE)
    return by_code.reshape(-1)[:blocks]


def decoded_values(quant_type: str, device: torch.device) -> torch.Tensor:
    """Returns the 16 float32 values that CUDA decodes to.

    FP4 code 8 is -0.0 there, not the +0.0 of its quant_map.
    """
    codebook = CODEBOOKS[quant_type]
    values = torch.tensor(codebook.values, dtype=torch.float32, device=device)
    if quant_type == "fp4":
        values[8] = -0.0
    return values


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks [n] bytes to [2 · n] codes, int32 for use as indices."""
    even = packed >> 4
    odd = packed & 15
    codes = torch.stack((even, odd), dim=1)
    return codes.view(-1).int()


def spread(per_block: torch.Tensor, blocksize: int, start: int, count: int) -> torch.Tensor:
    """Repeats the values of blocks, of a whole weight, for `count` of their elements from `start`
    on, which begins a block.
    """
    first = start // blocksize
    stop = -(-(start + count) // blocksize)
    values = per_block[first:stop].repeat_interleave(blocksize)
    return values[:count]
