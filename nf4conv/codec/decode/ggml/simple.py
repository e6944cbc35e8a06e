"""Decodes types whose blocks have one scale: [n, bytes of a block] uint8 → [n, values] float32."""

from typing import Final

import torch

from nf4conv.codec.decode.ggml.bytes import fields, halves, parts, signed

_DOUBLED_E2M1: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of E2M1, by code; scales are halved to match. The second 0 has no sign."""

NON_LINEAR: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of IQ4_NL and IQ4_XS, by code: kvalues_iq4nl of ggml-common.h."""


def decode_q4_0(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 16 bytes of codes]: scale * (code - 8)."""
    scale, packed = parts(block, 2, 16)
    codes = fields(packed, 4, 16).float()
    centred = codes - 8
    return halves(scale) * centred


def decode_q4_1(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | minimum | 16 bytes of codes]: scale * code + minimum."""
    scale, minimum, packed = parts(block, 2, 2, 16)
    codes = fields(packed, 4, 16).float()
    products = halves(scale) * codes
    return products + halves(minimum)


def decode_q5_0(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 32 high bits | 16 bytes of low bits]: scale * (code - 16)."""
    scale, high, low = parts(block, 2, 4, 16)
    codes = _five_bits(high, low)
    return halves(scale) * (codes - 16)


def decode_q5_1(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | minimum | 32 high bits | 16 bytes of low bits]: scale * code + minimum."""
    scale, minimum, high, low = parts(block, 2, 2, 4, 16)
    codes = _five_bits(high, low)
    products = halves(scale) * codes
    return products + halves(minimum)


def _five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Puts the fifth bits above the other four; returns codes as float32."""
    fifth = fields(high, 1, 1)
    codes = fields(low, 4, 16) | fifth << 4
    return codes.float()


def decode_q8_0(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 32 int8]."""
    scale, codes = parts(block, 2, 32)
    return signed(codes) * halves(scale)


def decode_tq1_0(block: torch.Tensor) -> torch.Tensor:
    """Decodes [52 bytes of digits | scale]: five ternary digits to a byte, four in the last ones.

    A byte times 3^k has digit k in the highest part of its low 8 bits.
    """
    first, second, third, scale = parts(block, 32, 16, 4, 2)
    digits = [
        _ternary(first, 32, 5),
        _ternary(second, 16, 5),
        _ternary(third, 4, 4),
    ]
    return halves(scale) * torch.cat(digits, dim=1)


def _ternary(digits: torch.Tensor, run: int, count: int) -> torch.Tensor:
    """Returns -1, 0 and 1 for the digits of bytes, in runs as `fields` has them."""
    runs = digits.reshape(len(digits), -1, run).int()
    found = []
    for power in range(count):
        shifted = runs * 3**power & 255
        found.append(shifted * 3 >> 8)
    stacked = torch.stack(found, dim=2)
    return stacked.flatten(1).float() - 1


def decode_tq2_0(block: torch.Tensor) -> torch.Tensor:
    """Decodes [64 bytes of codes | scale]: scale * (code - 1)."""
    packed, scale = parts(block, 64, 2)
    codes = fields(packed, 2, 32).float()
    return halves(scale) * (codes - 1)


def decode_mxfp4(block: torch.Tensor) -> torch.Tensor:
    """Decodes [exponent | 16 bytes of codes]: E2M1 times a power of two (OCP MX 1.0)."""
    exponent, packed = parts(block, 1, 16)
    values = _looked_up(_DOUBLED_E2M1, fields(packed, 4, 16))
    return _half_of_power(exponent.int()) * values


def _half_of_power(exponent: torch.Tensor) -> torch.Tensor:
    """Returns half of 2^(exponent - 127), put together as the bits of a float32."""
    subnormal = 0x00200000 << exponent.clamp(max=1)
    normal = (exponent - 1) << 23
    bits = torch.where(exponent < 2, subnormal, normal)
    return bits.view(torch.float32)


def decode_nvfp4(block: torch.Tensor) -> torch.Tensor:
    """Decodes [4 scales | 4 times 8 bytes of codes]: E2M1 times a scale in unsigned E4M3."""
    scales, packed = parts(block, 4, 32)
    values = _looked_up(_DOUBLED_E2M1, fields(packed, 4, 8))
    grouped = values.view(len(block), 4, 16)
    scaled = _half_of_e4m3(scales).unsqueeze(2) * grouped
    return scaled.flatten(1)


def _half_of_e4m3(scale: torch.Tensor) -> torch.Tensor:
    """Returns half of scales in unsigned E4M3; the code of NaN stands for 0."""
    exponent = (scale >> 3 & 15).int()
    mantissa = (scale & 7).float()
    normal = torch.ldexp(1 + mantissa / 8, exponent - 7)
    subnormal = mantissa * 2**-9
    value = torch.where(exponent == 0, subnormal, normal)
    is_zero = (scale == 0) | (scale == 0x7F)
    return torch.where(is_zero, 0.0, value * 0.5)


def decode_iq4_nl(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 16 bytes of codes], whose values are not evenly spaced."""
    scale, packed = parts(block, 2, 16)
    values = _looked_up(NON_LINEAR, fields(packed, 4, 16))
    return halves(scale) * values


def _looked_up(values: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
    """Returns the values of codes in float32."""
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table[codes.long()]
