"""Tells whether float32 values are finite."""

import numpy as np


def are_finite(values: memoryview) -> bool:
    """Returns True if no float32 value in these bytes is NaN or infinite."""
    return bool(np.isfinite(np.frombuffer(values, np.float32)).all())


def count_improper(scales: memoryview, *, may_be_negative: bool) -> int:
    """Counts the float32 scales that are NaN, infinite or, unless they may be, negative."""
    values = np.frombuffer(scales, np.float32)
    improper = ~np.isfinite(values)
    if not may_be_negative:
        improper |= values < 0
    return int(improper.sum())
