"""Tells whether float32 values are finite."""

import numpy as np


def are_finite(values: memoryview) -> bool:
    """Returns True if no float32 value in these bytes is NaN or infinite."""
    return bool(np.isfinite(np.frombuffer(values, np.float32)).all())
