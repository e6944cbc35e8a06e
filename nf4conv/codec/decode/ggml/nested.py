"""Decodes types whose blocks of 256 have quantized scales: [n, bytes] uint8 → [n, 256] float32."""

import torch

from nf4conv.codec.decode.ggml.bytes import bits_of_words, fields, halves, parts, signed, words_16
from nf4conv.codec.decode.ggml.simple import NON_LINEAR


def _scaled(
    scale: torch.Tensor,
    scales: torch.Tensor,
    codes: torch.Tensor,
) -> torch.Tensor:
    """Multiplies codes with the scales of their groups.

    Args:
        scale: [n, 2] uint8: the scale of each block, in half precision.
        scales: [n, groups] float32: what it is multiplied with.
        codes: [n, 256] float32.

    Returns:
        [n, 256] float32.
    """
    factors = halves(scale) * scales
    grouped = codes.view(*scales.shape, -1)
    products = factors.unsqueeze(2) * grouped
    return products.flatten(1)


def _less(
    values: torch.Tensor,
    minimum: torch.Tensor,
    minimums: torch.Tensor,
) -> torch.Tensor:
    """Subtracts the minimums of groups, which are nested like their scales."""
    subtracted = halves(minimum) * minimums
    grouped = values.view(*minimums.shape, -1)
    differences = grouped - subtracted.unsqueeze(2)
    return differences.flatten(1)


def decode_q2_k(block: torch.Tensor) -> torch.Tensor:
    """Decodes [16 scales and minimums of 4 bits | 64 bytes of codes | scale | minimum]."""
    nested, packed, scale, minimum = parts(block, 16, 64, 2, 2)
    codes = fields(packed, 2, 32).float()
    scales = (nested & 15).float()
    minimums = (nested >> 4).float()
    values = _scaled(scale, scales, codes)
    return _less(values, minimum, minimums)


def decode_q3_k(block: torch.Tensor) -> torch.Tensor:
    """Decodes [32 bytes of high bits | 64 of low bits | 16 scales of 6 bits | scale].

    The high bit counts upside down: 4 is subtracted where it is 0.
    """
    high, low, low_scales, high_scales, scale = parts(block, 32, 64, 8, 4, 2)
    high_bits = fields(high_scales, 2, 4) << 4
    scales = fields(low_scales, 4, 8) | high_bits
    codes = fields(low, 2, 32).float()
    missing = 1 - fields(high, 1, 32).float()
    codes = codes - 4 * missing
    return _scaled(scale, scales.float() - 32, codes)


def _scales_and_minimums(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes 8 scales and 8 minimums of 6 bits each out of 12 bytes: [n, 8] float32 both.

    The first four are whole in bytes 0 to 7. The other four have their low bits in bytes 8 to 11
    and their high bits above the first four.
    """
    first, second, mixed = parts(packed, 4, 4, 4)
    high_of_scales = first >> 2 & 48
    high_of_minimums = second >> 2 & 48
    last_scales = mixed & 15 | high_of_scales
    last_minimums = mixed >> 4 | high_of_minimums
    scales = torch.cat([first & 63, last_scales], dim=1)
    minimums = torch.cat([second & 63, last_minimums], dim=1)
    return scales.float(), minimums.float()


def decode_q4_k(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | minimum | 12 bytes of scales and minimums | 128 bytes of codes]."""
    scale, minimum, nested, packed = parts(block, 2, 2, 12, 128)
    scales, minimums = _scales_and_minimums(nested)
    codes = fields(packed, 4, 32)
    values = _scaled(scale, scales, codes.float())
    return _less(values, minimum, minimums)


def decode_q5_k(block: torch.Tensor) -> torch.Tensor:
    """Decodes what Q4_K has, with 32 bytes of fifth bits before the codes."""
    scale, minimum, nested, high, low = parts(block, 2, 2, 12, 32, 128)
    scales, minimums = _scales_and_minimums(nested)
    fifth = fields(high, 1, 32) << 4
    codes = fields(low, 4, 32) | fifth
    values = _scaled(scale, scales, codes.float())
    return _less(values, minimum, minimums)


def decode_q6_k(block: torch.Tensor) -> torch.Tensor:
    """Decodes [128 bytes of low bits | 64 of high bits | 16 int8 scales | scale]."""
    low, high, nested, scale = parts(block, 128, 64, 16, 2)
    high_bits = fields(high, 2, 32) << 4
    codes = fields(low, 4, 64) | high_bits
    return _scaled(scale, signed(nested), codes.float() - 32)


def decode_iq4_xs(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 8 high bits of scales | 4 bytes of their low bits | 128 bytes of codes]."""
    scale, high, low, packed = parts(block, 2, 2, 4, 128)
    high_bits = bits_of_words(words_16(high), 2, 2, 8) << 4
    nested = fields(low, 4, 1).int() | high_bits
    table = torch.tensor(NON_LINEAR, dtype=torch.float32, device=block.device)
    codes = fields(packed, 4, 16).long()
    return _scaled(scale, nested.float() - 32, table[codes])
