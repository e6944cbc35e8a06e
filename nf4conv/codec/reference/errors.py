"""Weight, packed codes → error sums, by the bound that codec/error_sums.py states."""

import torch

from nf4conv.codec.error_sums import NESTED_ERROR, SMALLEST_NORMAL, ErrorSums, half_gaps
from nf4conv.codec.quant_state import Decoding
from nf4conv.codec.reference.blocks import CHUNK, flushed
from nf4conv.codec.reference.dequantize import (
    decoded_absmax,
    decoded_values,
    nested_scales,
    spread,
    unpacked,
)


def scales_and_shifts(decoding: Decoding) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns absmax as it decodes, and how far nested quantization may have moved it, zeros
    without: twice [blocks] float32.
    """
    scales = decoded_absmax(decoding)
    if decoding.state2 is None:
        return scales, torch.zeros_like(scales)
    return scales, NESTED_ERROR * nested_scales(decoding.absmax, decoding.state2)


def error_sums(
    weight: torch.Tensor,
    packed: torch.Tensor,
    decoding: Decoding,
    known: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> ErrorSums:
    """Compares a weight, [n], with its packed form, on the weight's device. `known` is the result
    of `scales_and_shifts`, for a caller who has it already.
    """
    scales, shifts = known or scales_and_shifts(decoding)
    device = weight.device
    table = decoded_values(decoding.quant_type, device)
    half_gap = torch.tensor(
        half_gaps(decoding.quant_type, decoding.scales), dtype=torch.float32, device=device
    )
    chunks = -(-weight.numel() // CHUNK)
    max_error = torch.zeros(chunks, dtype=torch.float32, device=device)
    max_relative_error = torch.zeros(chunks, dtype=torch.float32, device=device)
    squared_error = torch.zeros(chunks, dtype=torch.float64, device=device)
    squared_weight = torch.zeros(chunks, dtype=torch.float64, device=device)
    outside = torch.zeros(chunks, dtype=torch.int64, device=device)
    for chunk, start in enumerate(range(0, weight.numel(), CHUNK)):
        original = weight[start : start + CHUNK].float()
        count = original.numel()
        codes = unpacked(packed[start // 2 : (start + CHUNK) // 2])[:count]
        scale = spread(scales, decoding.blocksize, start, count)
        shift = spread(shifts, decoding.blocksize, start, count)
        value = table.index_select(0, codes)
        error = (original - flushed(value * flushed(scale))).abs()
        of_rounding = half_gap.index_select(0, codes) * (scale.abs() + shift)
        bound = of_rounding + value.abs() * shift + SMALLEST_NORMAL
        max_error[chunk] = _largest(error)
        max_relative_error[chunk] = _largest((error / scale).abs().where(scale != 0, 0))
        squared_error[chunk] = error.double().square().sum()
        squared_weight[chunk] = original.double().square().sum()
        outside[chunk] = (~((error <= bound) & error.isfinite())).sum()
    return ErrorSums(
        max_error=_largest(max_error),
        max_relative_error=_largest(max_relative_error),
        squared_error=squared_error.sum(),
        squared_weight=squared_weight.sum(),
        outside=outside.sum(),
    )


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Returns the largest value, 0-d: NaN is ignored, and 0 is that of no values."""
    with_zero = torch.cat((values, values.new_zeros(1)))
    return with_zero.nan_to_num(nan=0.0, posinf=torch.inf).amax()
