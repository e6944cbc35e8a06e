"""The scales that are tried for a group."""

from typing import Final

MAGNITUDES: Final = (0.62, 0.7, 0.76, 0.81, 0.86, 0.91, 0.96, 1.02)
"""Scales that are tried first, relative to the absmax of a group."""

BETWEEN: Final = (0.58, 0.66, 0.73, 0.785, 0.835, 0.885, 0.935, 0.99)
"""Tried as well where a negative scale gives the same values: FP4."""

FINER: Final = (0.95, 0.97, 0.985, 1.015, 1.03, 1.05)
"""Scales that are tried next, relative to the best of the first."""


def first_candidates(is_symmetric: bool) -> tuple[float, ...]:
    """Returns the 16 factors of a group's absmax that are tried first.

    Args:
        is_symmetric: True if the levels are those of FP4, which a minus sign does not change.
    """
    if is_symmetric:
        return (*MAGNITUDES, *BETWEEN)
    return (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES))
