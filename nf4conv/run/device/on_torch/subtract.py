"""Measures with torch how far the values of two tensors are apart."""

from typing import Final

import torch

from nf4conv.report.measured import PieceDifference

_CHUNK: Final = 2**18
"""Values that are compared at a time. In float64 they take a few times their memory in a file."""


def difference(a: torch.Tensor, b: torch.Tensor) -> PieceDifference:
    """Compares the values of two flat tensors of one length and any dtypes."""
    sums = torch.zeros(3, dtype=torch.float64, device=a.device)
    largest = torch.zeros((), dtype=torch.float64, device=a.device)
    for start in range(0, a.numel(), _CHUNK):
        left, right = a[start : start + _CHUNK], b[start : start + _CHUNK]
        x, y = left.double(), right.double()
        unequal = x != y
        if a.dtype == b.dtype and a.dtype in (
            torch.int64,
            torch.uint64,
        ):  # not all of which float64 holds
            unequal = left.view(torch.int64) != right.view(torch.int64)
        unequal &= ~(x.isnan() & y.isnan())
        distance = torch.where(unequal, (x - y).abs(), 0.0).nan_to_num_(
            nan=torch.inf, posinf=torch.inf
        )
        values = x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        of_chunk = [distance.square().sum(), values.square().sum(), unequal.sum()]
        sums += torch.stack(of_chunk)
        largest = torch.maximum(largest, distance.amax())
    squared_difference, squared_values, differing = sums.tolist()
    return PieceDifference(squared_difference, squared_values, float(largest), int(differing))
