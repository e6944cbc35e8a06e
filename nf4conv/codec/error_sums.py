"""The quantization error of a weight: what one pass over it and its packed form measures, and the
bound that every value is held to.

All backends return five float64 on the weight's device, [5]:

Σ error²       of a value: its float32 (or half-precision) original minus the float32 product
               value(code) · absmax, before any rounding to an output dtype
Σ weight²
max |error|    NaN is ignored
max |error| / absmax of the value's block; NaN is ignored
outside        the number of values outside the bound below; errors that are NaN or infinite are

They judge a value by the same bound:

    |w - value(code) · a|  ≤  half_gap(code) · (|a| + D)  +  |value(code)| · D  +  2^-126

a       the absmax of the block as it decodes.
D       how far the nested quantization may have moved a: half the widest gap of the dynamic map
        times nested_absmax. That gap is 9/640, between neighbours of the top decade; its half is
        also the distance of the map's ends from ±1. D is 0 without double quantization.
half_gap(code)
        half the wider of the two gaps between the code's value and its neighbours' values, plus a
        slack of 2^-20 for the roundings of a float32 product, of the reciprocal and of the cuts.
        Searched scales may be as small as half of absmax, so values may be cut off at the first and
        the last code's, by as much as the scale itself: there half_gap is 1.
2^-126  what flushing subnormal numbers to zero may cost.

A correct encoding has no value outside the bound, except where the format itself fails: blocks that
hold NaN, infinity or magnitudes above 2^126 (docs/format.md).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch

from nf4conv.format.codebook import CODEBOOKS

SLACK: Final = 2**-20  # added to half a gap, relative to absmax

NESTED_ERROR: Final = 9 / 1280 + SLACK  # D / nested_absmax

SMALLEST_NORMAL: Final = 2**-126


def half_gaps(quant_type: str, scales: str) -> tuple[float, ...]:
    """Returns the half_gap of each of the 16 codes, slack included."""
    values = CODEBOOKS[quant_type].values
    ascending = sorted(set(values))
    gaps = [right - left for left, right in pairwise(ascending)]
    gap_at_ends = 2.0 if scales == "search" else 0.0
    half_gap_of = {}
    for value, left, right in zip(
        ascending, [gap_at_ends, *gaps], [*gaps, gap_at_ends], strict=True
    ):
        half_gap_of[value] = max(left, right) / 2 + SLACK
    return tuple(half_gap_of[value] for value in values)


def merged(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the sums of a tensor from those of its consecutive pieces: [5] float64."""
    rows = torch.stack(list(parts))
    return torch.cat([rows[:, :2].sum(dim=0), rows[:, 2:4].amax(dim=0), rows[:, 4:].sum(dim=0)])
