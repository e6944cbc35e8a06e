"""Says how large the relative error of a 4-bit weight may be.

A relative error is ‖W - Ŵ‖ / ‖W‖, in Frobenius norms. tolerance.json holds the errors that the
theory gives for weights of three distributions, rounded up to three decimals: the normal
distribution, Student's t with 7 degrees of freedom, and Student's t with 4. Trained weights lie
between the first two: those of all-MiniLM-L6-v2 have 0.092 to 0.099 with NF4 at blocksize 64 and
absmax, where the theory gives 0.092 and 0.099. The third, with its heavier tails (0.112), is the
tolerance.

The errors of calibrated weights are no measure of their quality: calibration moves codes away from
their own weights to make up for the errors of others, and errors of 0.48 were right. Only a foreign
weight in the place of the right one, whose error is about 1.4, exceeds their tolerance.

docs/verify.md derives the integral, and tests/check/test_verify.py computes it. The errors of
searched scales are measured, by tests/commands/test_searched_checkpoints.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from nf4conv.format.layout import Format


class ExpectedErrors(NamedTuple):
    """The relative errors that a format gives.

    Attributes:
        normal: the error of weights from a normal distribution.
        heavy: the error of weights from Student's t distribution with 7 degrees of freedom.
        tolerance: the error of weights from Student's t distribution with 4 degrees of freedom, the
            largest that verification lets pass by default.
    """

    normal: float
    heavy: float
    tolerance: float


def _read_errors() -> dict[tuple[str, str], Mapping[int, ExpectedErrors]]:
    """Reads tolerance.json: the errors by scales and quant_type, and by blocksize."""
    tables: dict[tuple[str, str], Mapping[int, ExpectedErrors]] = {}
    content = json.loads(Path(__file__).with_name("tolerance.json").read_bytes())
    for scales, formats in content.items():
        for quant_type, errors in formats.items():
            by_blocksize = {int(size): ExpectedErrors(*three) for size, three in errors.items()}
            tables[scales, quant_type] = by_blocksize
    return tables


RELATIVE_ERRORS: Final[Mapping[tuple[str, str], Mapping[int, ExpectedErrors]]] = _read_errors()
"""By (scales, of SCALES, and quant_type), and by blocksize."""

FOREIGN_ERROR: Final = 0.8
"""The relative error from which on a weight has nothing to do with its source: two weights that do
not belong together are 1.4 apart. Calibrated weights pass below it.
"""


def expected_errors(scales: str, quant_type: str, blocksize: int) -> ExpectedErrors:
    """Returns the relative errors that a format gives; `scales` are of RECORDED_SCALES."""
    if scales == "calibrated":
        least = RELATIVE_ERRORS["search", quant_type][blocksize].normal
        return ExpectedErrors(least, FOREIGN_ERROR, FOREIGN_ERROR)
    return RELATIVE_ERRORS[scales, quant_type][blocksize]


def tolerance_of(format: Format, wanted: float | None) -> float:
    """Returns the largest relative error that passes: the wanted one, or the format's default."""
    if wanted is not None:
        return wanted
    return expected_errors(format.scales, format.quant_type, format.blocksize).tolerance
