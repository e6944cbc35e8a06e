"""Weight, packed codes → error sums: a chunk that fits the cache at a time, several times sooner
than the reference.

The bound of a value has a large part, which two tables and a multiplication give for all values,
and a small one, which is worked out only for the few that are beyond the large one. What numpy
compares faster than torch, numpy compares.
"""

from functools import cache
from typing import Final

import numpy as np
import torch

from nf4conv.codec import reference
from nf4conv.codec.cpu.dequantize import (
    are_between,
    decoding_of_blocks,
    pair_table,
    value_pairs,
)
from nf4conv.codec.error_sums import SMALLEST_NORMAL, half_gaps, merged
from nf4conv.codec.quant_state import Decoding
from nf4conv.codec.reference.dequantize import decoded_values, scales_and_shifts, unpacked
from nf4conv.format.codebook import NESTED_BLOCKSIZE

_COMPARED: Final = 1 << 18  # elements at a time

# Scales between these have squares that float32 holds, and so have their errors.
_MIN_SQUARED: Final = 2.0**-40
_MAX_SQUARED: Final = 2.0**50


def error_sums(weight: torch.Tensor, packed: torch.Tensor, decoding: Decoding) -> torch.Tensor:
    """Compares a weight with its packed form, as `reference.error_sums` does. Squares are added up
    in float32 within a block, and in float64 from there on.
    """
    blocksize = decoding.blocksize
    step = max(_COMPARED, NESTED_BLOCKSIZE * blocksize)
    parts = []
    for at in range(0, max(weight.numel(), 1), step):
        end = min(at + step, weight.numel())
        piece = decoding_of_blocks(decoding, at // blocksize, -(-end // blocksize))
        parts.append(_chunk_errors(weight[at:end], packed[at // 2 : (end + 1) // 2], piece))
    return merged(parts)


def _chunk_errors(weight: torch.Tensor, packed: torch.Tensor, decoding: Decoding) -> torch.Tensor:
    """Compares consecutive blocks.

    Chunks whose squares might leave float32, and partial blocks, are left to the reference.
    """
    quant_type = decoding.quant_type
    blocksize = decoding.blocksize
    scales, shifts = scales_and_shifts(decoding)
    is_whole = weight.numel() > 0 and weight.numel() % blocksize == 0
    if not is_whole or not are_between(scales, _MIN_SQUARED, _MAX_SQUARED):
        return reference.error_sums(weight, packed, decoding)
    original = weight.to(torch.float32, copy=True)
    indices = packed.to(torch.int32)
    decoded = _by_pairs(value_pairs(quant_type), indices, scales, blocksize)
    errors = torch.sub(original, decoded, out=decoded).abs_().view(-1, blocksize)
    peaks = errors.amax(dim=1)
    if not bool((peaks < _MAX_SQUARED).all()):  # or NaN
        return reference.error_sums(weight, packed, decoding)
    outside = _count_outside(errors.view(-1), packed, indices, decoding, scales, shifts)
    relative_peaks = (peaks / scales).abs_().where(scales != 0, 0)
    # float32 within a block, float64 over blocks
    squared_errors = errors.square_().sum(dim=1)
    squared_weights = original.square_().view(-1, blocksize).sum(dim=1)
    figures = [
        squared_errors.sum(dtype=torch.float64),
        squared_weights.sum(dtype=torch.float64),
        peaks.amax().double(),
        relative_peaks.amax().double(),
        outside.double(),
    ]
    return torch.stack(figures)


def _count_outside(
    errors: torch.Tensor,
    packed: torch.Tensor,
    indices: torch.Tensor,
    decoding: Decoding,
    scales: torch.Tensor,
    shifts: torch.Tensor,
) -> torch.Tensor:
    """Counts the errors, [n] magnitudes, that are beyond their bound: 0-d int64."""
    blocksize = decoding.blocksize
    # the bound without its last terms; what is beyond it is seldom, and held against the whole one
    gaps = _gap_pairs(decoding.quant_type, decoding.scales)
    large_parts = _by_pairs(gaps, indices, scales.abs() + shifts, blocksize)
    beyond = torch.from_numpy(np.flatnonzero(errors.numpy() > large_parts.numpy()))
    errors_beyond = errors[beyond]
    codes = unpacked(packed[beyond // 2]).view(-1, 2).gather(1, beyond[:, None] % 2).view(-1)
    values = decoded_values(decoding.quant_type, packed.device)[codes]
    allowed = large_parts[beyond] + values.abs() * shifts[beyond // blocksize] + SMALLEST_NORMAL
    return (errors_beyond > allowed).sum()


def _by_pairs(
    table: torch.Tensor, indices: torch.Tensor, scales: torch.Tensor, blocksize: int
) -> torch.Tensor:
    """Looks up the two entries of each of n bytes, and multiplies them with the scales of their
    blocks: [2 · n] float32.
    """
    found = table.index_select(0, indices).view(torch.float32)
    found.view(-1, blocksize).mul_(scales[:, None])
    return found


@cache
def _gap_pairs(quant_type: str, scales: str) -> torch.Tensor:
    """Returns [256] int64 words: `half_gaps` of each byte's two codes."""
    gaps = torch.tensor(half_gaps(quant_type, scales), dtype=torch.float32, device="cpu")
    return pair_table(gaps)
