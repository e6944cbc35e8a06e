"""Rounds weights to 4 bits with knowledge of the activations that they multiply.

docs/quality.md explains the algorithm and its formulas. The result has the format of every other
4-bit weight.

    moments.py      adds up x·xᵀ over tokens, and blends what few tokens say
    factor.py       orders the inputs and factors the inverse of their second moments
    levels.py       lists the values of a data type in ascending order, with the cuts between
    scales.py       finds the nearest scale that can be stored
    calibrated.py   rounds weights group by group, then sweeps over codes and scales
    candidates.py   lists the scales that are tried
    reference.py    defines all of it in float64
    two_sided.py    rounds with knowledge of what depends on the outputs as well
    steps.py        computes the two steps of a group, in plain torch
    rounded.py      packs codes and scales, and measures the cost of a layer
"""

from nf4conv.codec.rounding.calibrated import round_calibrated as round_calibrated
from nf4conv.codec.rounding.calibrated import why_not_calibrated as why_not_calibrated
from nf4conv.codec.rounding.factor import Factor as Factor
from nf4conv.codec.rounding.factor import factor as factor
from nf4conv.codec.rounding.moments import SecondMoments as SecondMoments
from nf4conv.codec.rounding.rounded import Rounded as Rounded
from nf4conv.codec.rounding.rounded import layer_cost as layer_cost
from nf4conv.codec.rounding.rounded import search as search
from nf4conv.codec.rounding.two_sided import OUTPUT_DAMPING as OUTPUT_DAMPING
from nf4conv.codec.rounding.two_sided import round_two_sided as round_two_sided
from nf4conv.codec.rounding.two_sided import two_sided_cost as two_sided_cost
