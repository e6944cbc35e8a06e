"""How large the relative error of a 4-bit weight may be: what the format does to heavy-tailed
weights, by the theory.

A tolerance is the relative Frobenius error ‖W - Ŵ‖ / ‖W‖ that quantizing gives for weights drawn
from Student's t distribution with 4 degrees of freedom, rounded up to three decimals. Trained
weights lie between a normal distribution (0.092 for NF4 at blocksize 64) and this one (0.112). The
integral is in docs/verify.md, and tests/test_verify.py computes it; those of searched scales are
measured, by tests/test_searched_checkpoints.py.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from nf4conv.errors import PlanError

RELATIVE_ERRORS: Final[Mapping[tuple[str, str], Mapping[int, tuple[float, float, float]]]] = {
    (scales, quant_type): {
        int(blocksize): (normal, heavy, most) for blocksize, (normal, heavy, most) in errors.items()
    }
    for scales, tables in json.loads(Path(__file__).with_suffix(".json").read_bytes()).items()
    for quant_type, errors in tables.items()
}
"""By scales and quant_type, and blocksize: what trained weights usually have, from weights of a
normal distribution to those of Student's t with 7 degrees of freedom; and the tolerance. The
weights of all-MiniLM-L6-v2 have 0.092 to 0.099 with NF4 at blocksize 64 and absmax.
"""


def check_tolerance(tolerance: float | None) -> None:
    """Refuse by a PlanError a tolerance that is negative, NaN or infinite."""
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise PlanError(f"--tolerance {tolerance}: expected a relative error such as 0.1")
