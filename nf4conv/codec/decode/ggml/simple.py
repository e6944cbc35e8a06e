"""Decodes types whose blocks have one scale: [n, bytes of a block] uint8 → [n, values] float32."""

from typing import Final

import torch

from nf4conv.codec.decode.ggml.bytes import fields, halves, signed

_DOUBLED_E2M1: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of E2M1, by code; scales are halved to match. The second 0 has no sign."""

NON_LINEAR: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of IQ4_NL and IQ4_XS, by code: kvalues_iq4nl of ggml-common.h."""


def decode_q4_0(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 16 bytes of codes]: scale * (code - 8)."""
    return halves(block[:, :2]) * (fields(block[:, 2:], 4, 16).float() - 8)


def decode_q4_1(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | minimum | 16 bytes of codes]: scale * code + minimum."""
    product = halves(block[:, :2]) * fields(block[:, 4:], 4, 16).float()
    return product + halves(block[:, 2:4])


def decode_q5_0(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 32 high bits | 16 bytes of low bits]: scale * (code - 16)."""
    code = fields(block[:, 6:], 4, 16) | fields(block[:, 2:6], 1, 1) << 4
    return halves(block[:, :2]) * (code.float() - 16)


def decode_q5_1(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | minimum | 32 high bits | 16 bytes of low bits]: scale * code + minimum."""
    code = fields(block[:, 8:], 4, 16) | fields(block[:, 4:8], 1, 1) << 4
    return halves(block[:, :2]) * code.float() + halves(block[:, 2:4])


def decode_q8_0(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 32 int8]."""
    return signed(block[:, 2:]) * halves(block[:, :2])


def decode_tq1_0(block: torch.Tensor) -> torch.Tensor:
    """Decodes [52 bytes of digits | scale]: five ternary digits to a byte, four in the last ones.

    A byte times 3^k has digit k in the highest part of its low 8 bits.
    """
    digits = [
        _ternary(block[:, :32], 32, 5),
        _ternary(block[:, 32:48], 16, 5),
        _ternary(block[:, 48:52], 4, 4),
    ]
    return halves(block[:, 52:]) * torch.cat(digits, dim=1)


def _ternary(digits: torch.Tensor, run: int, count: int) -> torch.Tensor:
    """Returns -1, 0 and 1 for the digits of bytes, in runs as `fields` has them."""
    powers = torch.tensor([3**power for power in range(count)], device=digits.device)
    shifted = (digits.reshape(len(digits), -1, 1, run).int() * powers.view(1, 1, -1, 1)) & 255
    return ((shifted * 3 >> 8) - 1).flatten(1).float()


def decode_tq2_0(block: torch.Tensor) -> torch.Tensor:
    """Decodes [64 bytes of codes | scale]: scale * (code - 1)."""
    return halves(block[:, 64:]) * (fields(block[:, :64], 2, 32).float() - 1)


def decode_mxfp4(block: torch.Tensor) -> torch.Tensor:
    """Decodes [exponent | 16 bytes of codes]: E2M1 times a power of two (OCP MX 1.0)."""
    exponent = block[:, :1].int()
    # half of 2^(exponent - 127), as the bits of a float32; the two smallest are subnormal
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return bits.view(torch.float32) * _looked_up(_DOUBLED_E2M1, fields(block[:, 1:], 4, 16))


def decode_nvfp4(block: torch.Tensor) -> torch.Tensor:
    """Decodes [4 scales | 4 times 8 bytes of codes]: E2M1 times a scale in unsigned E4M3."""
    codes = fields(block[:, 4:], 4, 8).view(len(block), 4, 16)
    values = _looked_up(_DOUBLED_E2M1, codes)
    return (_half_of_e4m3(block[:, :4]).unsqueeze(2) * values).flatten(1)


def _half_of_e4m3(scale: torch.Tensor) -> torch.Tensor:
    """Returns half of scales in unsigned E4M3; the code of NaN stands for 0."""
    exponent = (scale >> 3 & 15).int()
    mantissa = (scale & 7).float()
    normal = torch.ldexp(1 + mantissa / 8, exponent - 7)
    value = torch.where(exponent == 0, mantissa * 2**-9, normal)
    return torch.where((scale == 0) | (scale == 0x7F), 0.0, value * 0.5)


def decode_iq4_nl(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 16 bytes of codes], whose values are not evenly spaced."""
    return halves(block[:, :2]) * _looked_up(NON_LINEAR, fields(block[:, 2:], 4, 16))


def _looked_up(values: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
    """Returns the values of codes in float32."""
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table[codes.long()]
