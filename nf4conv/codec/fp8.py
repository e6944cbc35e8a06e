"""MXFP4 encoded anew as FP8: E4M3 values, and a power of two for each block of them.

    scale = 2^(largest of the block's scales − 6)        6 × 2^6 = 384, and E4M3 ends at 448
    value = e2m1 × its scale / scale of the block

So cast_e2m1fn_to_e4m3fn of DeepSeek-V4's inference/convert.py computes it, but for zeros, which
keep their sign here, and for scales that would be less than 2^-127, the smallest of E8M0. All
values are exact where the scales of a block are at most 2^14 apart, and some where they are more.
"""

from functools import cache
from typing import Final

import torch

from nf4conv.codec.decode.floats import chunks, pair_values, scale_values
from nf4conv.errors import CodecError

_GROUP: Final = 32  # values that share a scale of MXFP4
_HIGHEST: Final = 6  # the largest power of two by which a value is multiplied
_LOWEST: Final = -12  # 4 × 2^-12 is less than the smallest value of E4M3, 2^-9
_NAN: Final = 0x7F  # E4M3's


def encode_values(
    values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, block: tuple[int, int]
) -> torch.Tensor:
    """Encodes the values of a matrix.

    Args:
        values: [rows, columns / 2] uint8 or int8: two values each, the first one in the low nibble.
        scale: [rows, columns / 32] float8_e8m0fnu, or its bytes as uint8.
        dtype: float8_e4m3fn.
        block: (rows, columns) that share a scale in the result; columns are a multiple of 32.

    Returns:
        [rows, columns] float8_e4m3fn.

    Raises:
        CodecError: a value would be rounded, or is NaN.
    """
    rows, pairs = values.shape
    bytes_of_scales = scale.view(torch.uint8).to(torch.int32)
    groups = bytes_of_scales.shape[1]
    height, width = block[0], block[1] // _GROUP
    of_blocks = _bytes_of_blocks(scale, block).to(torch.int32)
    of_groups = of_blocks.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)
    powers = (bytes_of_scales - of_groups[:, :groups]).clamp_(_LOWEST, _HIGHEST) - _LOWEST
    table = _table(values.device)
    lines = powers.masked_fill_(bytes_of_scales == 255, len(table) - 1).mul_(256).unsqueeze_(-1)
    codes = values.view(torch.uint8).view(rows, groups, -1)
    out = torch.empty((rows, pairs), dtype=torch.int16, device=values.device)
    for part in chunks(values, 2 * pairs):
        indices = (lines[part] + codes[part]).view(-1)
        torch.index_select(table.view(-1), 0, indices, out=out[part].view(-1))
    encoded = out.view(torch.int8)
    if encoded.numel() and encoded.amax() == _NAN:  # the largest number of 8 bits
        inexact = int((encoded == _NAN).sum())
        raise CodecError(
            f"{inexact:,} values are not exact in FP8: in blocks of {height} × {block[1]} their "
            f"scales are too far apart, or NaN; --dtype bfloat16 decodes them"
        )
    return encoded.view(dtype)


def encode_scales(
    values: torch.Tensor, dtype: torch.dtype, *, block: tuple[int, int]
) -> torch.Tensor:
    """Returns the scales of the blocks of a matrix, given those of its MXFP4 values.

    Args:
        values: [rows, columns / 32] float8_e8m0fnu, or its bytes as uint8.
        dtype: float8_e8m0fnu, or float32, which holds the same numbers.
        block: (rows, columns) that share a scale in the result; columns are a multiple of 32.

    Returns:
        [rows / block rows, columns / block columns], both rounded up, `dtype`.
    """
    found = _bytes_of_blocks(values, block)
    return scale_values(found) if dtype == torch.float32 else found.view(dtype)


def _bytes_of_blocks(scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Returns the scale of each block as a byte of E8M0."""
    found = scale.view(torch.uint8)
    height, width = block[0], block[1] // _GROUP
    rows, groups = found.shape
    padded = torch.nn.functional.pad(found, (0, -groups % width, 0, -rows % height))
    tiles = padded.view(len(padded) // height, height, padded.shape[1] // width, width)
    return tiles.amax(dim=(1, 3)).clamp_(min=_HIGHEST) - _HIGHEST


@cache
def _table(device: torch.device) -> torch.Tensor:
    """Returns what each byte of two codes becomes, by the power of two: [powers + 1, 256] int16.

    NaN stands for what is not exact. The last line, all NaN, is that of a scale that is NaN.
    """
    pairs = pair_values(torch.arange(256, dtype=torch.uint8))
    powers = torch.tensor([2.0**power for power in range(_LOWEST, _HIGHEST + 1)])
    wanted = pairs * powers.unsqueeze(-1)
    encoded = wanted.to(torch.float8_e4m3fn)
    is_exact = encoded.to(torch.float32) == wanted
    found = encoded.view(torch.uint8).masked_fill(~is_exact, _NAN)
    last = found.new_full((1, found.shape[1]), _NAN)
    return torch.cat([found, last]).view(torch.int16).to(device)
