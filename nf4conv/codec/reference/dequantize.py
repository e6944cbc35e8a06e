"""Packed codes → weight, absmax as it decodes, and the errors of a weight by the bound that
codec/error_sums.py states.
"""

from typing import Final

import torch

from nf4conv.codec.error_sums import NESTED_ERROR, SMALLEST_NORMAL, half_gaps, merged
from nf4conv.codec.quant_state import Decoding
from nf4conv.format.codebook import CODEBOOKS, NESTED_BLOCKSIZE

CHUNK: Final = 7 << 12
"""Elements worked on at a time: a multiple of any blocksize, and less than 2^15.

On a CPU torch calls its threads together from 2^15 elements on. They would come for every operation
of some 10 µs, and on a busy machine each time wait for the one that sleeps. (Indexing by a tensor
calls them at any size, which is why the reference uses `index_select`.)
"""


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


def flushed(values: torch.Tensor) -> torch.Tensor:
    """Returns values with denormals replaced by zeros of their sign; NaN and infinities stay."""
    return values * (values.abs() >= SMALLEST_NORMAL)


def scales_and_shifts(decoding: Decoding) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns absmax as it decodes, and how far nested quantization may have moved it, zeros
    without: twice [blocks] float32.
    """
    scales = decoded_absmax(decoding)
    if decoding.nested_absmax is None:
        return scales, torch.zeros_like(scales)
    return scales, NESTED_ERROR * nested_scales(decoding.nested_absmax, len(scales))


def error_sums(weight: torch.Tensor, packed: torch.Tensor, decoding: Decoding) -> torch.Tensor:
    """Compares a weight, [n], with its packed form, on the weight's device."""
    scales, shifts = scales_and_shifts(decoding)
    device = weight.device
    table = decoded_values(decoding.quant_type, device)
    half_gap = torch.tensor(
        half_gaps(decoding.quant_type, decoding.scales), dtype=torch.float32, device=device
    )
    parts = [torch.zeros(5, dtype=torch.float64, device=device)]
    for start in range(0, weight.numel(), CHUNK):
        original = weight[start : start + CHUNK].float()
        count = original.numel()
        codes = unpacked(packed[start // 2 : (start + CHUNK) // 2])[:count]
        scale = spread(scales, decoding.blocksize, start, count)
        shift = spread(shifts, decoding.blocksize, start, count)
        value = table.index_select(0, codes)
        error = (original - flushed(value * flushed(scale))).abs()
        of_rounding = half_gap.index_select(0, codes) * (scale.abs() + shift)
        bound = of_rounding + value.abs() * shift + SMALLEST_NORMAL
        figures = [
            error.double().square().sum(),
            original.double().square().sum(),
            _largest(error).double(),
            _largest((error / scale).abs().where(scale != 0, 0)).double(),
            (~((error <= bound) & error.isfinite())).sum().double(),
        ]
        parts.append(torch.stack(figures))
    return merged(parts)


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Returns the largest of some magnitudes, 0-d; NaN is ignored."""
    return values.nan_to_num(nan=0.0, posinf=torch.inf).amax()
