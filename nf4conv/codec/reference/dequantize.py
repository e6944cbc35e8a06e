"""Packed codes → weight, and absmax as it decodes."""

import torch

from nf4conv.codec.quant_state import Decoding, NestedState
from nf4conv.codec.reference.blocks import CHUNK, flushed
from nf4conv.format.codebook import CODEBOOKS


def dequantize_blocks(packed: torch.Tensor, decoding: Decoding, out: torch.Tensor) -> None:
    """Decode a packed weight: the value of each code times the absmax of its block, rounded to the
    dtype of `out`.

    Args:
        packed: [ceil(n / 2)] uint8, contiguous.
        decoding: of the codes.
        out: [n] float32, float16 or bfloat16, written.
    """
    scales = flushed(decoded_absmax(decoding))
    table = decoded_values(decoding.quant_type, out.device)
    for start in range(0, out.numel(), CHUNK):
        target = out[start : start + CHUNK]
        codes = unpacked(packed[start // 2 : (start + CHUNK) // 2])[: target.numel()]
        values = table.index_select(0, codes)
        target.copy_(flushed(values * spread(scales, decoding.blocksize, start, target.numel())))
        _write_nan_as_cuda(target)


def _write_nan_as_cuda(values: torch.Tensor) -> None:
    """Give every NaN the bits that the GPU's multiply and conversion give it: all ones but the
    sign.
    """
    bits = values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)
    bits.masked_fill_(values.isnan(), torch.iinfo(bits.dtype).max)


def decoded_absmax(decoding: Decoding) -> torch.Tensor:
    """Return absmax as it decodes, [blocks] float32.

    A nested one is a flushed product, then a sum, each rounded.
    """
    absmax = decoding.absmax
    state2 = decoding.state2
    if state2 is None or decoding.offset is None:
        return absmax
    values = flushed(state2.code).index_select(0, absmax.int())
    return flushed(values * nested_scales(absmax, state2)) + decoding.offset


def nested_scales(codes: torch.Tensor, state2: NestedState) -> torch.Tensor:
    """Return the nested absmax that each of [blocks] codes is multiplied by: [blocks] float32."""
    by_code = flushed(state2.absmax)[:, None].expand(-1, state2.blocksize).reshape(-1)
    return by_code[: codes.numel()]


def decoded_values(quant_type: str, device: torch.device) -> torch.Tensor:
    """Return the 16 float32 values that CUDA decodes to.

    FP4 code 8 is -0.0 there, not the +0.0 of its quant_map.
    """
    values = torch.tensor(CODEBOOKS[quant_type].values, dtype=torch.float32, device=device)
    if quant_type == "fp4":
        values[8] = -0.0
    return values


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Unpack [n] bytes to [2 · n] codes, int32 for use as indices."""
    return torch.stack((packed >> 4, packed & 15), dim=1).view(-1).int()


def spread(per_block: torch.Tensor, blocksize: int, start: int, count: int) -> torch.Tensor:
    """Repeat the values of blocks for their elements.

    Args:
        per_block: [blocks], of a whole weight.
        blocksize: elements of a block.
        start: the first element, which begins a block.
        count: the number of elements.

    Returns:
        [count]: the values for elements start, start + 1, …
    """
    stop = -(-(start + count) // blocksize)
    return per_block[start // blocksize : stop].repeat_interleave(blocksize)[:count]
