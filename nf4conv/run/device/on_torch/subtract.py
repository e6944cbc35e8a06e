"""Measures with torch how far the values of two tensors are apart."""

from typing import Final

import torch

from nf4conv.plan.rows import Errors

_CHUNK: Final = 2**18
"""Values that are compared at a time. In float64 they take a few times their memory in a file."""

_WIDE: Final = (torch.int64, torch.uint64)
"""Integers, not all of which float64 holds."""


def difference(a: torch.Tensor, b: torch.Tensor) -> Errors:
    """Compares the values of two flat tensors of one length and any dtypes."""
    device = a.device
    are_wide = a.dtype == b.dtype and a.dtype in _WIDE
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, a.numel(), _CHUNK):
        left = a[start : start + _CHUNK]
        right = b[start : start + _CHUNK]
        x = left.double()
        y = right.double()
        if are_wide:
            unequal = left.view(torch.int64) != right.view(torch.int64)
        else:
            unequal = x != y
        are_nan = x.isnan() & y.isnan()
        unequal &= ~are_nan
        apart = (x - y).abs()
        distance = torch.where(unequal, apart, 0.0)
        distance = distance.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        values = x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        squared_difference = distance.square().sum()
        squared_values = values.square().sum()
        differing = unequal.sum()
        sums += torch.stack([squared_difference, squared_values, differing])
        farthest = distance.amax()
        largest = torch.maximum(largest, farthest)
    found = sums.tolist()
    return Errors(
        squared_error=found[0],
        squared_weight=found[1],
        largest=float(largest),
        differing=int(found[2]),
    )
