"""E2M1 values in pairs, the low nibble first, times a scale for each 16 or 32 of a row: NVFP4 and
MXFP4.

    MXFP4                      value = e2m1 × 2^(scale − 127)                 groups of 32
    NVFP4, compressed-tensors  value = e2m1 × (scale / weight_global_scale)   groups of 16, scale in FP8 E4M3
    NVFP4, ModelOpt            value = e2m1 × (scale × weight_scale_2)        the same, with a factor, not a divisor

Computed in float32 and rounded once: OCP Microscaling Formats v1.0, section 5.3.3;
convert_moe_packed_tensors of transformers' integrations/mxfp4.py; compressed-tensors'
compressors/nvfp4; ModelOpt's NVFP4QTensor.dequantize.
"""

from typing import Final

import torch

from nf4conv.codec.backends import has_kernels
from nf4conv.codec.decode.scaled import chunks, scale_values
from nf4conv.errors import CodecError

E2M1: Final = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
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
    """Decode a matrix, or a stack of matrices.

    Args:
        values: [..., rows, columns / 2] uint8 or int8: two values each, the first one in the low
            nibble.
        scale: [..., rows, groups] float8_e8m0fnu, its bytes as uint8, or float8_e4m3fn.
        dtype: of the result.
        divisor: one float32 that all scales are divided by.
        multiplier: one float32 that all scales are multiplied with.
        is_transposed: True to return the matrices transposed: gpt-oss stores its experts as
            [out, in] and loads them as [in, out].

    Returns:
        [..., rows, columns] `dtype`, or [..., columns, rows] if transposed; contiguous.

    Raises:
        CodecError: the scales do not fit the values.
    """
    rows, pairs, groups = values.shape[:-1], values.shape[-1], scale.shape[-1:].numel()
    if (
        scale.shape[:-1] != rows
        or groups == 0
        or pairs % groups
        or 2 * pairs // groups not in (16, 32)
    ):
        raise CodecError(
            f"scales of shape {list(scale.shape)} for FP4 values of shape {list(values.shape)}, "
            f"expected one for each "
            "16 or 32 values of a row"
        )
    out = torch.empty((*rows, 2 * pairs), dtype=dtype, device=values.device)
    values, scale, flat = (part.flatten(0, -2) for part in (values, scale, out))
    if has_kernels(values.device):
        from nf4conv.codec.kernels.decoding import fp4  # importing Triton takes a second

        fp4.decode_fp4(values.contiguous(), scale.contiguous(), divisor, multiplier, flat)
        return out.mT.contiguous() if is_transposed else out
    scale = scale_values(scale)
    if divisor is not None:
        scale = scale / divisor.reshape(()).to(torch.float32)
    if multiplier is not None:
        scale = scale * multiplier.reshape(()).to(torch.float32)
    for part in chunks(values, 2 * pairs):
        decoded = pair_values(values[part]).view(-1, groups, 2 * pairs // groups)
        flat[part] = decoded.mul_(scale[part].unsqueeze(-1)).view(-1, 2 * pairs)
    return out.mT.contiguous() if is_transposed else out


def pair_values(values: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes → [..., 2n] float32, by a table of all pairs."""
    singles = torch.tensor(E2M1, dtype=torch.float32, device=values.device)
    codes = torch.arange(256, device=values.device)
    pairs = (
        torch.stack([singles[codes & 15], singles[codes >> 4]], dim=1).view(torch.int64).view(-1)
    )
    found = pairs.index_select(0, values.reshape(-1).view(torch.uint8).to(torch.int32))
    return found.view(torch.float32).view(*values.shape[:-1], -1)
