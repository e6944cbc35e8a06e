"""The values of a 4-bit data type in ascending order, and the scales that are tried for them."""

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from nf4conv.format.codebook import CODEBOOKS

INFINITY = float("inf")


@dataclass(frozen=True)
class Levels:
    """The distinct values of a data type by rank, its place in ascending order.

    FP4 has 15: its two zeros are one level, with the code of +0.0. Its rank 15 repeats 1.0 behind a
    cut that nothing passes.

    Attributes:
        values: [16] float32, ascending.
        cuts: [15] float32, ascending: the rank of x is the number of cuts below x.
        codes: [16] uint8, the code of each rank.
        quant_type: "nf4" or "fp4".
    """

    values: torch.Tensor
    cuts: torch.Tensor
    codes: torch.Tensor
    quant_type: str

    def ranks(self, quotients: torch.Tensor) -> torch.Tensor:
        """Returns the rank of the level nearest to each quotient: uint8, in the same shape."""
        ranks = torch.bucketize(quotients, self.cuts, out_int32=True)
        return ranks.to(torch.uint8)

    def decode(self, ranks: torch.Tensor) -> torch.Tensor:
        """Returns the values of ranks, uint8 of any shape: float32, in the same shape."""
        flat = ranks.reshape(-1)
        values = self.values.index_select(0, flat.int())
        return values.view(ranks.shape)


@cache
def levels_of(quant_type: str, device: torch.device) -> Levels:
    """Returns the levels of "nf4" or "fp4" on a device; never write to them."""
    values, cuts, codes = ascending(quant_type)
    with torch.inference_mode(mode=False):
        return Levels(
            torch.tensor(values, dtype=torch.float32, device=device),
            torch.tensor(cuts, dtype=torch.float32, device=device),
            torch.tensor(codes, dtype=torch.uint8, device=device),
            quant_type,
        )


@cache
def ascending(
    quant_type: str,
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
    """Returns the 16 values, the 15 cuts and the 16 codes of a data type's ranks."""
    codebook = CODEBOOKS[quant_type]
    if codebook.signed_cuts:
        return codebook.values, codebook.cuts, codebook.ranks
    magnitudes = codebook.ranks  # the codes of zero and of the positive values, ascending
    negative = [code + 8 for code in reversed(magnitudes[1:])]
    codes = (*negative, *magnitudes, magnitudes[-1])
    values = tuple(codebook.values[code] for code in codes)
    mirrored = [-cut for cut in reversed(codebook.cuts)]
    return values, (*mirrored, *codebook.cuts, INFINITY), codes


MAGNITUDES: Final = (0.62, 0.7, 0.76, 0.81, 0.86, 0.91, 0.96, 1.02)
"""Scales that are tried first, relative to the absmax of a group."""

BETWEEN: Final = (0.58, 0.66, 0.73, 0.785, 0.835, 0.885, 0.935, 0.99)
"""Tried as well where a negative scale gives the same values: FP4."""

FINER: Final = (0.95, 0.97, 0.985, 1.015, 1.03, 1.05)
"""Scales that are tried next, relative to the best of the first."""


def first_candidates(quant_type: str) -> tuple[float, ...]:
    """Returns the 16 factors of a group's absmax that are tried first."""
    if CODEBOOKS[quant_type].signed_cuts:
        return (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES))
    return (*MAGNITUDES, *BETWEEN)
