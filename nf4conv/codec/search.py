"""The search for scales: the scale of each block, of either sign, that makes its squared error
small.

A scale need not be the absmax. The error as a function of the scale has many local minima, and two
machines that add the same float32 numbers in another order would now and then choose another of
them. So everything that decides is a sum of integers, and what is rounded is rounded once, by IEEE
rules:

absmax     a, the largest magnitude of the block. A block is searched if 2^-100 ≤ a ≤ 2^100; any
           other keeps a.
exponent   The block is divided by the power of two that makes 1 ≤ a < 2: nothing is rounded, or
           could overflow.
positions  p = round(x · (1024 / a)): integers from -1024 to 1024; 0 for NaN.
levels     round(f · value · 1024) for a factor f and the 16 values: integers too.
search     Σ (p - w)², w being the level nearest to p, for 16 factors from 0.5 to 1.09 and, where
           the values are not symmetric (NF4), the same with a minus sign. The least wins, the first
           of equals.
step       t = f · (1 + Σ (p - w)·w / Σ w²). That is linear least squares: with the winner's codes
           kept, f · Σ p·w / Σ w² is the factor that makes Σ (p - t/f · w)² least. |t| is kept in
           0.5 … 1.25.
scale      s = a · t. The codes are those of x · (1 / s), by the cuts and the reciprocal of the
           format; what is subnormal is flushed. So a block that keeps a has the bytes that it has
           without a search.
proof      cost(s) = Σ round(2^18 · (x - s · value)²), without NaN, and in the same way cost(a).
           Each term is at most half a unit off: if cost(s) + 2 · blocksize ≤ cost(a), s is better
           in exact arithmetic. If not, the block keeps a.

The result ends within 0.3 % of an exhaustive search (docs/quality.md). The table of nearest levels
makes a candidate as cheap as one addition: 32 of them and one step cost a CPU less than three
encodings.

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
"""Candidates, relative to absmax, exact in float32: 0.5, 0.58, 0.65, then 0.71 … 1.09 in steps of
1/32. Most optima lie above 0.7; large blocks with heavy tails want less.
"""

GROUP: Final = 64  # elements whose sums float32 holds exactly; blocks of 32 have sums of 32

# Blocks with an absmax outside these are not searched.
LEAST_ABSMAX: Final = 2.0**-100
LARGEST_ABSMAX: Final = 2.0**100

# The step ends between these.
LEAST_FACTOR: Final = 0.5
LARGEST_FACTOR: Final = 1.25

COST_UNITS: Final = 2.0**18  # of a squared error of 1, absmax being from 1 to 2

ROUND: Final = 1.5 * 2.0**23
"""Adding this to a float32 below 2^22 in magnitude, and subtracting it again, rounds the number to
an integer, ties to even.
"""


@cache
def candidates(quant_type: str) -> npt.NDArray[np.float32]:
    """Returns the factors in the order in which they are tried, [candidates] float32.

    Where both signs are tried (NF4), those of one magnitude are neighbours, the positive one first.
    """
    factors = np.array(FACTORS, dtype=np.float32)
    if not CODEBOOKS[quant_type].signed_cuts:
        return factors
    return np.stack((factors, -factors), axis=1).ravel()


@cache
def levels(quant_type: str) -> npt.NDArray[np.int32]:
    """Returns round(f · value · UNIT) for each factor and code: [16 factors, 16 codes] int32."""
    values = np.array(CODEBOOKS[quant_type].values, dtype=np.float64)
    rounded: npt.NDArray[np.float64] = np.rint(np.outer(FACTORS, values) * UNIT)
    return rounded.astype(np.int32)


@cache
def nearest_levels(quant_type: str) -> npt.NDArray[np.int32]:
    """Returns each candidate's level nearest to each position, [candidates, 2 · UNIT + 1] int32,
    from position -UNIT on; of two as near, the lower.
    """
    positions = np.arange(-UNIT, UNIT + 1)
    nearest = []
    for factor in candidates(quant_type).tolist():
        levels_of_codes = levels(quant_type)[FACTORS.index(abs(factor))]
        if factor < 0:
            levels_of_codes = -levels_of_codes
        ascending = np.unique(levels_of_codes)
        doubled_midpoints = ascending[:-1] + ascending[1:]
        index = np.searchsorted(doubled_midpoints, 2 * positions)
        nearest.append(ascending[index])
    return np.stack(nearest).astype(np.int32)
