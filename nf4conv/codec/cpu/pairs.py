"""The two values that a byte of packed codes decodes to, found with one look."""

from functools import cache

import torch

from nf4conv.codec.reference.dequantize import decoded_values


def pair_table(values: torch.Tensor) -> torch.Tensor:
    """Returns [256] int64 words: for each byte the values of its two codes, of [16] float32."""
    return torch.cartesian_prod(values, values).view(torch.int64).view(-1)


@cache
def value_pairs(quant_type: str) -> torch.Tensor:
    """Returns [256] int64 words: the two float32 values of each byte's codes, before absmax."""
    return pair_table(decoded_values(quant_type, torch.device("cpu")))


def are_between(scales: torch.Tensor, least: float, most: float) -> bool:
    """Returns True if every magnitude is zero, or at least `least` and below `most`; NaN is not."""
    magnitudes = scales.abs()
    return bool(((magnitudes == 0) | (magnitudes >= least) & (magnitudes < most)).all())
