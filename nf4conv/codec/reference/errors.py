"""Weight, packed codes → error sums, by the bound that codec/error_sums.py states."""

import torch

from nf4conv.codec.error_sums import NESTED_ERROR, SMALLEST_NORMAL, half_gaps, merged
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
    if decoding.nested_absmax is None:
        return scales, torch.zeros_like(scales)
    return scales, NESTED_ERROR * nested_scales(decoding.nested_absmax, len(scales))


def error_sums(
    weight: torch.Tensor,
    packed: torch.Tensor,
    decoding: Decoding,
    known: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compares a weight, [n], with its packed form, on the weight's device. `known` is the result
    of `scales_and_shifts`, for a caller who has it already.
    """
    scales, shifts = known or scales_and_shifts(decoding)
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
