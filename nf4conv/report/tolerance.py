"""How large the relative error of a 4-bit weight may be: what the format does to heavy-tailed weights, by the theory.

Each value is the relative Frobenius error ‖W - Ŵ‖ / ‖W‖ that quantizing gives for weights drawn from Student's t
distribution with 4 degrees of freedom, rounded up to three decimals. Trained weights lie between a normal distribution
(0.092 for NF4 at blocksize 64) and this one (0.112). The integral is in docs/verify.md, and tests/test_verify.py
computes it.
"""

import math
from typing import Final

from nf4conv.errors import PlanError

TOLERANCES: Final = {
    "nf4": {32: 0.096, 64: 0.112, 128: 0.129, 256: 0.151, 512: 0.176, 1024: 0.206, 2048: 0.241, 4096: 0.282},
    "fp4": {32: 0.141, 64: 0.169, 128: 0.202, 256: 0.240, 512: 0.284, 1024: 0.334, 2048: 0.389, 4096: 0.447},
}
"""By quant_type and blocksize."""


def check_tolerance(tolerance: float | None) -> None:
    """Refuse a tolerance that is none.

    Raises:
        PlanError: it is negative, NaN or infinite.
    """
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise PlanError(f"--tolerance {tolerance}: expected a relative error such as 0.1")
