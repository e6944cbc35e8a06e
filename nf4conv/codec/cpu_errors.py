"""`reference.error_sums` as a CPU does it fastest: a chunk that fits the cache at a time, several
times sooner.

The bound of a value has a large part, which two tables and a multiplication give for all values,
and a small one, which is worked out only for the few that are beyond the large one. What numpy
compares faster than torch, numpy compares.
"""

from functools import cache
from typing import Final

import numpy as np
import torch

from nf4conv.codec import reference
from nf4conv.codec.error_sums import SMALLEST_NORMAL, ErrorSums, half_gaps, merged
from nf4conv.codec.quant_state import Decoding

_COMPARED: Final = 1 << 18  # elements at a time
_MIN_SQUARED: Final = (
    2.0**-40
)  # scales from here on have squares that float32 holds, and so have their errors
_MAX_SQUARED: Final = 2.0**50  # up to here


def _pairs(values: torch.Tensor) -> torch.Tensor:
    """[256] int64: the two of 16 float32 values that belong to a byte's two codes, as one word."""
    return torch.cartesian_prod(values, values).view(torch.int64).view(-1)


def are_between(scales: torch.Tensor, least: float, most: float) -> bool:
    """Whether every magnitude is zero, or at least the one and below the other."""
    magnitudes = scales.abs()
    return bool(((magnitudes == 0) | (magnitudes >= least) & (magnitudes < most)).all())


@cache
def value_pairs(quant_type: str) -> torch.Tensor:
    """[256] int64: the two float32 values that a byte decodes to, times absmax, as one word."""
    return _pairs(reference.decoded_values(quant_type, torch.device("cpu")))


def error_sums(weight: torch.Tensor, packed: torch.Tensor, decoding: Decoding) -> ErrorSums:
    """Compare a weight with its packed form; arguments and result as `reference.error_sums`.

    Squares are added up in float32 within a block, and in float64 from there on.
    """
    scales, moved = reference.scales_and_shifts(decoding)
    blocksize = decoding.blocksize
    step = max(_COMPARED, blocksize)
    parts = []
    for at in range(0, max(weight.numel(), 1), step):
        end = min(at + step, weight.numel())
        blocks = slice(at // blocksize, -(-end // blocksize))
        chunk = weight[at:end], packed[at // 2 : (end + 1) // 2], decoding
        parts.append(_chunk_errors(*chunk, (scales[blocks], moved[blocks])))
    return merged(parts)


def _chunk_errors(
    weight: torch.Tensor,
    packed: torch.Tensor,
    decoding: Decoding,
    known: tuple[torch.Tensor, torch.Tensor],
) -> ErrorSums:
    quant_type, blocksize, (scales, moved) = decoding.quant_type, decoding.blocksize, known
    if (
        weight.numel() == 0
        or weight.numel() % blocksize
        or not are_between(scales, _MIN_SQUARED, _MAX_SQUARED)
    ):
        return reference.error_sums(weight, packed, decoding, known)
    original = weight.to(torch.float32, copy=True)
    indices = packed.to(torch.int32)
    errors = _by_pairs(value_pairs(quant_type), indices, scales, blocksize)
    errors = torch.sub(original, errors, out=errors).abs_().view(-1, blocksize)
    peaks = errors.amax(dim=1)
    if not bool((peaks < _MAX_SQUARED).all()):  # or NaN
        return reference.error_sums(weight, packed, decoding, known)
    # the bound without its last terms; what is beyond it is seldom, and held against the whole
    # bound
    bounds = _by_pairs(
        _gap_table(quant_type, decoding.scales), indices, scales.abs() + moved, blocksize
    )
    beyond = torch.from_numpy(np.flatnonzero(errors.view(-1).numpy() > bounds.numpy()))
    errors_beyond = errors.view(-1)[beyond]
    codes = (packed[beyond // 2] >> (4 - 4 * (beyond % 2))) & 15
    values = reference.decoded_values(quant_type, packed.device)[codes.int()]
    allowed = bounds[beyond] + values.abs() * moved[beyond // blocksize] + SMALLEST_NORMAL
    return ErrorSums(
        max_error=peaks.amax(),
        max_relative_error=(peaks / scales).abs_().where(scales != 0, 0).amax(),
        squared_error=errors.square_().sum(dim=1).sum(dtype=torch.float64),
        squared_weight=original.square_().view(-1, blocksize).sum(dim=1).sum(dtype=torch.float64),
        outside=(errors_beyond > allowed).sum(),
    )


def _by_pairs(
    table: torch.Tensor, indices: torch.Tensor, scales: torch.Tensor, blocksize: int
) -> torch.Tensor:
    """[2n] float32: for each of n bytes the two entries of a table of pairs, times the scales of
    their blocks.
    """
    found = table.index_select(0, indices).view(torch.float32)
    found.view(-1, blocksize).mul_(scales[:, None])
    return found


@cache
def _gap_table(quant_type: str, scales: str) -> torch.Tensor:
    return _pairs(torch.tensor(half_gaps(quant_type, scales), dtype=torch.float32))
