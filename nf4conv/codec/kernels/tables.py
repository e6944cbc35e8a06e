"""The small tables that the kernels read: built from the codebook, kept once for each device."""

import functools

import numpy as np
import numpy.typing as npt
import torch

from nf4conv.codec.error_sums import half_gaps
from nf4conv.codec.reciprocal import coefficients
from nf4conv.codec.reference.dequantize import decoded_values
from nf4conv.codec.search import candidates, levels, nearest_levels
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP

_NO_CUT = 2.0  # above every quotient, so never passed

_HALF, _BRAIN = torch.float16, torch.bfloat16
MULTIPLES = {
    ("nf4", _BRAIN): 1.43671,
    ("nf4", _HALF): 1.36619,
    ("fp4", _BRAIN): 12.0,
    ("fp4", _HALF): 12.0,
}
"""What the values of a codebook are multiplied with before they are rounded for a product. Of NF4's
multiples between 1 and 2 these lose least, weighted by how often normal weights have each code:
0.00078 of the root mean square in bfloat16, where the rounding of every decoded weight loses
0.00166. Twelve times FP4's values are exact.
"""


@functools.cache
def pair_table(quant_type: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256] int32: for each byte of codes the two values in 16 bits, times MULTIPLES, the even one
    low.
    """
    values = (
        torch.tensor(CODEBOOKS[quant_type].values, dtype=torch.float64)
        * MULTIPLES[quant_type, dtype]
    )
    bits = values.to(dtype).view(torch.int16).int() & 0xFFFF
    return (bits[:, None] | (bits << 16)[None, :]).view(-1).to(device)


@functools.cache
def value_table(quant_type: str, device: torch.device) -> torch.Tensor:
    """[32] int32: the bits of the 16 decoded values, twice over, so that bit 4 of an index does not
    matter.
    """
    return decoded_values(quant_type, device).view(torch.int32).repeat(2)


@functools.cache
def bucket_table(quant_type: str, device: torch.device) -> torch.Tensor:
    """[448] int32: for each of 32 buckets the bits of the cut inside it, then for each the number
    of cuts below it; behind them what plain Triton needs for a reciprocal.

    The bucket of a quotient q is round(15.25 q) + 15 for NF4, 0 … 30, and round(16 |q|) for FP4, 0 … 16. No bucket
    holds two cuts, and no cut is nearer to a bucket's edge than 0.04 buckets, so the bucket may be
    found with one rounded operation and the one exact comparison with its cut settles the code. NaN
    lands in bucket 31, code 0.
    """
    codebook = CODEBOOKS[quant_type]
    homes = [
        round(15.25 * cut) + 15 if codebook.signed_cuts else round(16 * cut)
        for cut in codebook.cuts
    ]
    inside = dict(zip(homes, codebook.cuts, strict=True))
    cuts = np.array([inside.get(bucket, _NO_CUT) for bucket in range(32)], dtype="f4").view("i4")
    below = [sum(home < bucket for home in homes) for bucket in range(31)]
    return _words(device, cuts, [*below, 0], coefficients())


@functools.cache
def search_table(quant_type: str, device: torch.device) -> torch.Tensor:
    """What packing/search.py reads, one part behind the other.

    [448] bucket_table; [32] value_table; [16 factors, 2, 8] float16, distances of the levels below
    0 and above it; [32] the bits of the factors with their signs, of which FP4 has 16; [candidates,
    positions] int32 the nearest levels.
    """
    signed = candidates(quant_type)
    sides = np.abs(np.sort(levels(quant_type), axis=1)).astype("f2")
    factors = np.pad(signed, (0, 32 - signed.size)).view("i4")
    ours = _words(device, sides.view("i4"), factors, nearest_levels(quant_type))
    return torch.cat([bucket_table(quant_type, device), value_table(quant_type, device), ours])


@functools.cache
def middle_table(device: torch.device) -> torch.Tensor:
    """[20, 32] float32: the middles between neighbours of the dynamic map, the i-th at [i % 8, i //
    8]; from row 8 on the bits of what plain Triton needs for a reciprocal.

    Each float32 step of (left + right) / 2 is rounded, as bitsandbytes does. The last is above
    every quotient.
    """
    values = torch.tensor(DYNAMIC_MAP, dtype=torch.float32)
    middles = np.append((values[1:] + values[:-1]).numpy() * np.float32(0.5), np.float32(_NO_CUT))
    return (
        _words(device, middles.view("i4").reshape(32, 8).T, coefficients())
        .view(torch.float32)
        .view(20, 32)
    )


@functools.cache
def bound_table(quant_type: str, scales: str, device: torch.device) -> torch.Tensor:
    """[32] int32: the bits of half_gaps, for the error bound, twice over."""
    return torch.tensor(half_gaps(quant_type, scales) * 2, dtype=torch.float32, device=device).view(
        torch.int32
    )


def _words(device: torch.device, *parts: npt.ArrayLike) -> torch.Tensor:
    """int32, one part behind the other."""
    return torch.from_numpy(np.concatenate([np.ravel(part).astype("i4") for part in parts])).to(
        device
    )
