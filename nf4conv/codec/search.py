"""The search for scales: of each block the scale, of either sign, that makes the squared error
small.

A scale need not be the absmax. Its error as a function of the scale has many local minima, and two
machines that add the same float32 numbers in another order would now and then choose another. So
everything that decides is a sum of integers, and what is rounded is rounded once, by IEEE rules:

    absmax     a, as ever. A block is searched if 2^-100 ≤ a ≤ 2^100; any other keeps a.
    exponent   the block is divided by the power of two that makes 1 ≤ a < 2: nothing is rounded, or could overflow.
    positions  p = round(x · (1024 / a)): integers from -1024 to 1024; of NaN 0.
    levels     of a factor f, round(f · value · 1024) for the 16 values: integers too.
    search     Σ (p - w)², w being the level nearest to p, for 16 factors from 0.5 to 1.09 and, where the values are
               not symmetric (NF4), the same with a minus sign. The least wins, the first of equals.
    step       t = f · (1 + Σ (p - w)·w / Σ w²): least squares for the winner's levels. |t| is kept in 0.5 … 1.25.
    scale      s = a · t. The codes are those of x · (1 / s), by the cuts and the reciprocal of the format; what is
               subnormal is flushed. So a block that keeps a has the bytes that it has without a
               search.
    proof      cost(s) = Σ round(2^18 · (x - s · value)²), NaN apart, and so for a. Each term is at most half a unit
               off: if cost(s) + 2 · blocksize ≤ cost(a), s is better in exact arithmetic. If not,
                   the block keeps a.

The table of nearest levels makes a candidate as cheap as one addition: 32 of them and one step cost
a CPU less than three encodings, and end within 0.3 % of an exhaustive search (docs/quality.md).

The sums of GROUP elements are integers that float32 holds, whatever their order; those of a block
fit in 32 bits.
"""

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from nf4conv.format.codebook import CODEBOOKS

UNIT: Final = 1024  # positions and levels of an absmax

FACTORS: Final = tuple(number / UNIT for number in (512, 592, 664, *range(728, 1113, 32)))
"""Of absmax, exact in float32. Most optima lie above 0.7; large blocks with heavy tails want less.
"""

GROUP: Final = 64  # elements whose sums float32 holds exactly; blocks of 32 have sums of 32

LEAST_ABSMAX: Final = 2.0**-100
LARGEST_ABSMAX: Final = 2.0**100
LEAST_FACTOR: Final = 0.5
LARGEST_FACTOR: Final = 1.25

COST_UNITS: Final = 2.0**18  # of a squared error of 1, absmax being from 1 to 2

ROUND: Final = 1.5 * 2.0**23
"""Added to a float32 below 2^22 in magnitude it rounds it to an integer, ties to even, as
subtracting it shows.
"""


@cache
def candidates(quant_type: str) -> npt.NDArray[np.float32]:
    """[candidates]: the factors in the order in which they are tried; those of either sign are
    neighbours, + first.
    """
    factors = np.array(FACTORS, dtype=np.float32)
    return (
        np.stack((factors, -factors), axis=1).ravel()
        if CODEBOOKS[quant_type].signed_cuts
        else factors
    )


@cache
def levels(quant_type: str) -> npt.NDArray[np.int32]:
    """[16 factors, 16 codes]: round(f · value · UNIT)."""
    values = np.array(CODEBOOKS[quant_type].values, dtype=np.float64)
    rounded: npt.NDArray[np.float64] = np.rint(np.outer(FACTORS, values) * UNIT)
    return rounded.astype(np.int32)


@cache
def nearest_levels(quant_type: str) -> npt.NDArray[np.int32]:
    """[candidates, 2 · UNIT + 1]: for each position, from -UNIT on, the candidate's level; of two
    as near the lower.
    """
    doubled = 2 * np.arange(-UNIT, UNIT + 1)
    found = []
    for factor in candidates(quant_type).tolist():
        row = levels(quant_type)[FACTORS.index(abs(factor))]
        ascending = np.unique(row if factor > 0 else -row)
        found.append(ascending[np.searchsorted(ascending[:-1] + ascending[1:], doubled)])
    return np.stack(found).astype(np.int32)
