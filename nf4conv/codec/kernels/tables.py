"""Makes the small tables that the kernels read; each is kept once for each device."""

import numpy as np
import numpy.typing as npt
import torch

from nf4conv.codec.error_sums import half_gaps
from nf4conv.codec.kernels.launch import kept
from nf4conv.codec.reciprocal import coefficients
from nf4conv.codec.reference.dequantize import decoded_values
from nf4conv.codec.search import FACTORS, candidates, levels, nearest_levels
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP

_NO_CUT = 2.0  # above every quotient, so never passed

MULTIPLES = {
    ("nf4", torch.bfloat16): 1.43671,
    ("nf4", torch.float16): 1.36619,
    ("fp4", torch.bfloat16): 12.0,
    ("fp4", torch.float16): 12.0,
}
"""Factors of the values of a codebook, which are multiplied before they are rounded to 16 bits for
a product.

Of the factors between 1 and 2, those of NF4 lose least, weighted by how often normal weights have
each code: 0.00078 of the root mean square in bfloat16, where the rounding of every decoded weight
loses 0.00166. Twelve times FP4's values are exact.
"""

# Where the parts of `search_table` begin, in words.
SEARCH_VALUES = 448
SEARCH_LEVELS = SEARCH_VALUES + 32
SEARCH_CANDIDATES = SEARCH_LEVELS + 8 * len(FACTORS)
SEARCH_NEAREST = SEARCH_CANDIDATES + 32


@kept
def pair_table(quant_type: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns for each byte of codes the two values in 16 bits, times MULTIPLES: [256] int32, the
    even element's value in the low half.
    """
    values = torch.tensor(CODEBOOKS[quant_type].values, dtype=torch.float64)
    multiples = (values * MULTIPLES[quant_type, dtype]).to(dtype)
    bits = multiples.view(torch.int16).int() & 0xFFFF
    pairs = bits[:, None] | (bits << 16)[None, :]
    return pairs.view(-1).to(device)


@kept
def value_table(quant_type: str, device: torch.device) -> torch.Tensor:
    """Returns the bits of the 16 decoded values, twice over, so that bit 4 of an index does not
    matter: [32] int32.
    """
    return decoded_values(quant_type, device).view(torch.int32).repeat(2)


@kept
def bucket_table(quant_type: str, device: torch.device) -> torch.Tensor:
    """Returns the table that finds codes: 32 buckets of the quotients' range.

    The bucket of a quotient q is round(15.25 q) + 15 for NF4, 0 … 30, and round(16 |q|) for FP4,
    0 … 16. No bucket holds two cuts, and no cut is nearer to a bucket's edge than 0.04 buckets. So
    the bucket may be found with one rounded operation, and the one exact comparison with its cut
    settles the code. NaN lands in bucket 31, code 0.

    Returns:
        [448] int32: for each bucket the bits of the cut inside it; for each bucket the number of
        cuts below it; then what plain Triton needs for a reciprocal, [3, 128].
    """
    codebook = CODEBOOKS[quant_type]
    cut_in = {}
    for cut in codebook.cuts:
        bucket = round(15.25 * cut) + 15 if codebook.signed_cuts else round(16 * cut)
        cut_in[bucket] = cut
    cuts = np.full(32, _NO_CUT, dtype=np.float32)
    below = np.zeros(32, dtype=np.int32)
    passed = 0
    for bucket in range(31):
        below[bucket] = passed
        if bucket in cut_in:
            cuts[bucket] = cut_in[bucket]
            passed += 1
    return _words(device, cuts.view(np.int32), below, coefficients())


@kept
def search_table(quant_type: str, device: torch.device) -> torch.Tensor:
    """Returns what packing/search.py reads, one part behind the other: int32 words.

    Returns:
        0: [448] `bucket_table`.
        SEARCH_VALUES: [32] `value_table`.
        SEARCH_LEVELS: [16 factors, 2, 8] float16, two in a word: the magnitudes of the levels below
            0, then of those above it.
        SEARCH_CANDIDATES: [32] the bits of the factors with their signs, of which FP4 has 16.
        SEARCH_NEAREST: [candidates, positions] the nearest levels.
    """
    sides = np.abs(np.sort(levels(quant_type), axis=1)).astype(np.float16)
    signed = candidates(quant_type)
    factors = np.pad(signed, (0, 32 - signed.size))
    ours = _words(device, sides.view("i4"), factors.view("i4"), nearest_levels(quant_type))
    return torch.cat([bucket_table(quant_type, device), value_table(quant_type, device), ours])


@kept
def middle_table(device: torch.device) -> torch.Tensor:
    """Returns the middles between neighbours of the dynamic map, which bound the 8-bit codes.

    Each float32 step of (left + right) / 2 is rounded, as bitsandbytes does. The last middle is
    above every quotient.

    Returns:
        [20, 32] float32: the i-th middle is at [i % 8, i // 8]; from row 8 on are the bits of what
        plain Triton needs for a reciprocal.
    """
    values = np.array(DYNAMIC_MAP, dtype=np.float32)
    middles = (values[1:] + values[:-1]) * np.float32(0.5)
    padded = np.append(middles, np.float32(_NO_CUT))
    words = _words(device, padded.view("i4").reshape(32, 8).T, coefficients())
    return words.view(torch.float32).view(20, 32)


@kept
def bound_table(quant_type: str, scales: str, device: torch.device) -> torch.Tensor:
    """Returns the bits of `half_gaps`, for the error bound, twice over: [32] int32."""
    twice = half_gaps(quant_type, scales) * 2
    return torch.tensor(twice, dtype=torch.float32, device=device).view(torch.int32)


def _words(device: torch.device, *parts: npt.ArrayLike) -> torch.Tensor:
    """Returns parts as int32 words, one behind the other."""
    words = [np.ravel(part).astype("i4") for part in parts]
    return torch.from_numpy(np.concatenate(words)).to(device)
