"""How large the relative error of a 4-bit weight may be: what the format does to heavy-tailed weights, by the theory.

A tolerance is the relative Frobenius error ‖W - Ŵ‖ / ‖W‖ that quantizing gives for weights drawn from Student's t
distribution with 4 degrees of freedom, rounded up to three decimals. Trained weights lie between a normal distribution
(0.092 for NF4 at blocksize 64) and this one (0.112). The integral is in docs/verify.md, and tests/test_verify.py
computes it; those of searched scales are measured, by tests/test_searched_checkpoints.py.
"""

import math
from typing import Final

from nf4conv.errors import PlanError

RELATIVE_ERRORS: Final = {
    ("absmax", "nf4"): {
        32: (0.087, 0.090, 0.096), 64: (0.092, 0.099, 0.112), 128: (0.096, 0.108, 0.129),
        256: (0.099, 0.118, 0.151), 512: (0.101, 0.129, 0.176), 1024: (0.104, 0.141, 0.206),
        2048: (0.107, 0.155, 0.241), 4096: (0.110, 0.171, 0.282),
    },
    ("absmax", "fp4"): {
        32: (0.114, 0.124, 0.141), 64: (0.122, 0.140, 0.169), 128: (0.129, 0.158, 0.202),
        256: (0.135, 0.177, 0.240), 512: (0.140, 0.199, 0.284), 1024: (0.146, 0.224, 0.334),
        2048: (0.152, 0.252, 0.389), 4096: (0.158, 0.283, 0.447),
    },
    ("search", "nf4"): {
        32: (0.076, 0.080, 0.087), 64: (0.083, 0.090, 0.103), 128: (0.088, 0.100, 0.121),
        256: (0.092, 0.109, 0.139), 512: (0.095, 0.116, 0.156), 1024: (0.097, 0.121, 0.170),
        2048: (0.098, 0.124, 0.181), 4096: (0.099, 0.126, 0.191),
    },
    ("search", "fp4"): {
        32: (0.104, 0.116, 0.133), 64: (0.113, 0.130, 0.157), 128: (0.119, 0.143, 0.182),
        256: (0.123, 0.153, 0.203), 512: (0.126, 0.159, 0.220), 1024: (0.127, 0.163, 0.233),
        2048: (0.128, 0.166, 0.249), 4096: (0.129, 0.169, 0.273),
    },
}  # fmt: skip
"""By scales and quant_type, and blocksize: what trained weights usually have, from weights of a normal distribution to
those of Student's t with 7 degrees of freedom; and the tolerance. The weights of all-MiniLM-L6-v2 have 0.092 to 0.099
with NF4 at blocksize 64 and absmax."""


def check_tolerance(tolerance: float | None) -> None:
    """Refuse by a PlanError a tolerance that is negative, NaN or infinite."""
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise PlanError(f"--tolerance {tolerance}: expected a relative error such as 0.1")
