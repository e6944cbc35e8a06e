"""Decodes types whose blocks of 256 have quantized scales: [n, bytes] uint8 → [n, 256] float32."""

import torch

from nf4conv.codec.decode.ggml.bytes import bits_of_words, fields, halves, signed, words_16
from nf4conv.codec.decode.ggml.simple import NON_LINEAR


def _scaled(scale: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Multiplies codes with the scales of their groups: [n, groups] and [n, 256]."""
    grouped = codes.view(*scale.shape, -1)
    return (scale.unsqueeze(2) * grouped).flatten(1)


def _scaled_from(scale: torch.Tensor, minimum: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Multiplies codes with the scales of their groups, and subtracts the groups' minimums."""
    grouped = codes.view(*scale.shape, -1)
    return (scale.unsqueeze(2) * grouped - minimum.unsqueeze(2)).flatten(1)


def decode_q2_k(block: torch.Tensor) -> torch.Tensor:
    """Decodes [16 scales and minimums of 4 bits | 64 bytes of codes | scale | minimum]."""
    scales = block[:, :16]
    codes = fields(block[:, 16:80], 2, 32).float()
    scale = halves(block[:, 80:82]) * (scales & 15).float()
    minimum = halves(block[:, 82:84]) * (scales >> 4).float()
    return _scaled_from(scale, minimum, codes)


def decode_q3_k(block: torch.Tensor) -> torch.Tensor:
    """Decodes [32 bytes of high bits | 64 of low bits | 16 scales of 6 bits | scale].

    The high bit counts upside down: 4 is subtracted where it is 0.
    """
    high = fields(block[:, :32], 1, 32)
    low = fields(block[:, 32:96], 2, 32)
    scales = fields(block[:, 96:104], 4, 8) | fields(block[:, 104:108], 2, 4) << 4
    scale = halves(block[:, 108:110]) * (scales.float() - 32)
    codes = low.float() - 4 * (1 - high.float())
    return _scaled(scale, codes)


def _scales_and_minimums(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes 8 scales and 8 minimums of 6 bits each out of 12 bytes: [n, 8] float32 both.

    The first four are whole in bytes 0 to 7. The other four have their low bits in bytes 8 to 11
    and their high bits above the first four.
    """
    first, second, mixed = packed.view(len(packed), 3, 4).unbind(1)
    scales = torch.cat([first & 63, (mixed & 15) | (first >> 2 & 48)], dim=1)
    minimums = torch.cat([second & 63, (mixed >> 4) | (second >> 2 & 48)], dim=1)
    return scales.float(), minimums.float()


def decode_q4_k(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | minimum | 12 bytes of scales and minimums | 128 bytes of codes]."""
    scales, minimums = _scales_and_minimums(block[:, 4:16].contiguous())
    scale = halves(block[:, :2]) * scales
    minimum = halves(block[:, 2:4]) * minimums
    return _scaled_from(scale, minimum, fields(block[:, 16:], 4, 32).float())


def decode_q5_k(block: torch.Tensor) -> torch.Tensor:
    """Decodes what Q4_K has, with 32 bytes of fifth bits before the codes."""
    scales, minimums = _scales_and_minimums(block[:, 4:16].contiguous())
    scale = halves(block[:, :2]) * scales
    minimum = halves(block[:, 2:4]) * minimums
    codes = fields(block[:, 48:], 4, 32) | fields(block[:, 16:48], 1, 32) << 4
    return _scaled_from(scale, minimum, codes.float())


def decode_q6_k(block: torch.Tensor) -> torch.Tensor:
    """Decodes [128 bytes of low bits | 64 of high bits | 16 int8 scales | scale]."""
    scale = halves(block[:, 208:210]) * signed(block[:, 192:208])
    codes = fields(block[:, :128], 4, 64) | fields(block[:, 128:192], 2, 32) << 4
    return _scaled(scale, codes.float() - 32)


def decode_iq4_xs(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 8 high bits of scales | 4 bytes of their low bits | 128 bytes of codes]."""
    high = bits_of_words(words_16(block[:, 2:4]), 2, 2, 8)
    low = fields(block[:, 4:8], 4, 1).int()
    scale = halves(block[:, :2]) * ((low | high << 4) - 32).float()
    table = torch.tensor(NON_LINEAR, dtype=torch.float32, device=block.device)
    return _scaled(scale, table[fields(block[:, 8:], 4, 16).long()])
