"""What one pass over a weight and its packed form can say about the quantization error, and the
bound it is held to.

Both backends return `ErrorSums`, and both judge a value by the same bound:

    |w - value(code) · a|  ≤  half_gap(code) · (|a| + D)  +  |value(code)| · D  +  2^-126

with a the absmax of the block as it decodes, and D how far the nested quantization may have moved
it: half the widest gap of the dynamic map (9/1280, between neighbours of the top decade; also the
distance of its ends from ±1) times nested_absmax, and 0 without double quantization. half_gap(code)
is half the wider of the two gaps between the code's value and its neighbours' values, plus a slack
of 2^-20 for the roundings of a float32 product, of the reciprocal and of the cuts. 2^-126 is what
flushing subnormal numbers to zero may cost. Searched scales may be as small as half of absmax, so
values may be cut off at the first and the last code's, by as much as the scale itself: there
half_gap is 1.

A correct encoding has no value outside the bound, except where the format itself fails: blocks that
hold NaN, infinity or magnitudes above 2^126 (docs/format.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final

import torch

from nf4conv.format.codebook import CODEBOOKS

NESTED_ERROR: Final = 9 / 1280 + 2**-20  # D / nested_absmax, with the same slack

SLACK: Final = 2**-20  # added to half the gap, relative to absmax

SMALLEST_NORMAL: Final = 2**-126


@dataclass(frozen=True)
class ErrorSums:
    """Sums and extremes of the quantization error of one tensor: 0-d tensors on its device.

    The error of a value is its float32 (or half-precision) original minus the float32 product
    value(code) · absmax, before any rounding to an output dtype.
    """

    max_error: torch.Tensor  # float32, the largest |error|; NaN is ignored
    max_relative_error: (
        torch.Tensor
    )  # float32, the largest |error| / absmax of the value's block; NaN is ignored
    squared_error: torch.Tensor  # float64, Σ error²
    squared_weight: torch.Tensor  # float64, Σ weight²
    # int64, how many values are outside the bound of the module docstring; an error that is NaN or
    # infinite always is
    outside: torch.Tensor


def half_gaps(quant_type: str, scales: str) -> tuple[float, ...]:
    """For each of the 16 codes half the wider gap to its neighbours in value, plus the slack;
    `scales` as above.
    """
    values = CODEBOOKS[quant_type].values
    ascending = sorted(set(values))
    gaps = [right - left for left, right in pairwise(ascending)]
    end = 2.0 if scales == "search" else 0.0
    wider = [max(pair) for pair in zip([end, *gaps], [*gaps, end], strict=True)]
    return tuple(wider[ascending.index(value)] / 2 + SLACK for value in values)


def merged(parts: Sequence[ErrorSums]) -> ErrorSums:
    """The sums of a tensor from those of its parts, of which there is at least one; added in their
    order.
    """
    columns = {
        field.name: torch.stack([getattr(part, field.name) for part in parts])
        for field in fields(ErrorSums)
    }
    return ErrorSums(
        **{
            name: column.amax() if name.startswith("max") else column.sum()
            for name, column in columns.items()
        }
    )
