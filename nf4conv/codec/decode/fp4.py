"""MXFP4 and NVFP4: pairs of E2M1 values, the low nibble first, times a scale for each 16 or 32
values of a row.

MXFP4                      value = e2m1 × 2^(scale − 127)
                           groups of 32; OCP Microscaling Formats v1.0, section 5.3.3, and
                           convert_moe_packed_tensors of transformers' integrations/mxfp4.py
NVFP4, compressed-tensors  value = e2m1 × (scale / weight_global_scale)
                           groups of 16, scale in FP8 E4M3; compressed-tensors' compressors/nvfp4
NVFP4, ModelOpt            value = e2m1 × (scale × weight_scale_2)
                           groups of 16, scale in FP8 E4M3; ModelOpt's NVFP4QTensor.dequantize

Everything is computed in float32 and rounded once.
"""

from functools import cache
from typing import Final

import torch

from nf4conv.codec.decode.scaled import as_pairs, chunks, look_up, scale_values
from nf4conv.errors import CodecError

_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

E2M1: Final = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
"""The values of the 16 codes: a sign bit, two bits of exponent, one of mantissa."""


def decode_fp4(
    values: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    divisor: torch.Tensor | None = None,
    multiplier: torch.Tensor | None = None,
    is_transposed: bool = False,
) -> torch.Tensor:
    """Decodes a matrix, or a stack of matrices, [..., rows, columns / 2] of two values a byte, the
    first one in the low nibble.

    Scales are [..., rows, groups] float8_e8m0fnu, its bytes as uint8, or float8_e4m3fn; all are
    divided by `divisor` and multiplied with `multiplier`, one float32 each. Transposed, the result
    is [..., columns, rows]: gpt-oss stores its experts as [out, in] and loads them as [in, out].
    Raises CodecError if the scales do not fit the values.
    """
    rows = values.shape[:-1]
    pairs = values.shape[-1]
    groups = 1 if scale.dim() == 0 else scale.shape[-1]
    _check_scales(values, scale, groups)
    out = torch.empty((*rows, 2 * pairs), dtype=dtype, device=values.device)
    flat_values = values.flatten(0, -2)
    flat_scale = scale.flatten(0, -2)
    flat_out = out.flatten(0, -2)
    factors = scale_values(flat_scale)
    if divisor is not None:
        factors = factors / divisor.reshape(()).to(torch.float32)
    if multiplier is not None:
        factors = factors * multiplier.reshape(()).to(torch.float32)
    for part in chunks(flat_values, 2 * pairs):
        decoded = pair_values(flat_values[part]).view(-1, groups, 2 * pairs // groups)
        decoded.mul_(factors[part].unsqueeze(-1))
        flat_out[part] = decoded.view(-1, 2 * pairs)
    if is_transposed:
        return out.mT.contiguous()
    return out


def _check_scales(values: torch.Tensor, scale: torch.Tensor, groups: int) -> None:
    """Raises a CodecError unless there is a scale for each 16 or 32 values of a row."""
    pairs = values.shape[-1]
    has_whole_groups = groups > 0 and pairs % groups == 0
    if (
        scale.shape[:-1] != values.shape[:-1]
        or not has_whole_groups
        or 2 * pairs // groups not in (16, 32)
    ):
        raise CodecError(
            f"scales of shape {list(scale.shape)} for FP4 values of shape {list(values.shape)}, "
            f"expected one for each 16 or 32 values of a row"
        )


def pair_values(values: torch.Tensor) -> torch.Tensor:
    """Decodes bytes to the two values of each: [..., n] → [..., 2 · n] float32."""
    stored = values.reshape(-1).view(torch.uint8)
    return look_up(_pairs(values.device), stored).view(*values.shape[:-1], -1)


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    return as_pairs(torch.tensor(E2M1, dtype=torch.float32, device=device))
