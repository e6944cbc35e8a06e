"""The values of a 4-bit data type in ascending order, each with its code."""

from dataclasses import dataclass
from functools import cache

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
        is_symmetric: True if a minus sign does not change the set of values: FP4.
    """

    values: torch.Tensor
    cuts: torch.Tensor
    codes: torch.Tensor
    is_symmetric: bool

    def ranks(self, quotients: torch.Tensor) -> torch.Tensor:
        """Returns the rank of the level nearest to each quotient: uint8, in the same shape."""
        return torch.bucketize(quotients, self.cuts, out_int32=True).to(torch.uint8)

    def decode(self, ranks: torch.Tensor) -> torch.Tensor:
        """Returns the values of ranks, uint8 of any shape: float32, in the same shape."""
        return self.values.index_select(0, ranks.reshape(-1).int()).view(ranks.shape)


@cache
def levels_of(quant_type: str, device: torch.device) -> Levels:
    """Returns the levels of "nf4" or "fp4" on a device; never write to them."""
    values, cuts, codes = ascending(quant_type)
    with torch.inference_mode(mode=False):
        return Levels(
            torch.tensor(values, dtype=torch.float32, device=device),
            torch.tensor(cuts, dtype=torch.float32, device=device),
            torch.tensor(codes, dtype=torch.uint8, device=device),
            not CODEBOOKS[quant_type].signed_cuts,
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
