"""Says how large the relative error of a 4-bit weight may be.

A relative error is ‖W - Ŵ‖ / ‖W‖, in Frobenius norms. The tolerance is the error of weights from
Student's t distribution with 4 degrees of freedom, whose tails are heavier than those of trained
weights: with NF4 at blocksize 64 and absmax it is 0.112, and weights of all-MiniLM-L6-v2 have 0.092
to 0.099.

docs/verify.md derives the integral, and tests/check/test_verify.py computes it. The errors of
searched scales are measured, by tests/commands/test_searched_checkpoints.py.
"""

from typing import Final

from nf4conv.format.codebook import BLOCKSIZES
from nf4conv.format.layout import Format

TOLERANCES: Final = {
    ("absmax", "nf4"): (0.096, 0.112, 0.129, 0.151, 0.176, 0.206, 0.241, 0.282),
    ("absmax", "fp4"): (0.141, 0.169, 0.202, 0.240, 0.284, 0.334, 0.389, 0.447),
    ("search", "nf4"): (0.087, 0.103, 0.121, 0.139, 0.156, 0.170, 0.181, 0.191),
    ("search", "fp4"): (0.133, 0.157, 0.182, 0.203, 0.220, 0.233, 0.249, 0.273),
}
"""The tolerance for each of BLOCKSIZES, by scales and quant_type; rounded up to three decimals."""

FOREIGN_ERROR: Final = 0.8
"""The relative error from which on a weight has nothing to do with its source: two weights that do
not belong together are 1.4 apart. Calibrated weights pass below it: calibration moves codes away
from their own weights to make up for the errors of others, and errors of 0.48 were right.
"""


def tolerance_of(format: Format, wanted: float | None) -> float:
    """Returns the largest relative error that passes: the wanted one, or the format's default."""
    if wanted is not None:
        return wanted
    if format.scales == "calibrated":
        return FOREIGN_ERROR
    return TOLERANCES[format.scales, format.quant_type][BLOCKSIZES.index(format.blocksize)]
