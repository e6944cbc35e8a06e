"""The small tables that the kernels read: built from the codebook, kept once for each device."""

import struct
from collections.abc import Sequence

import torch

from nf4conv.codec.codebook import CODEBOOKS, DYNAMIC_MAP, Codebook
from nf4conv.codec.error_sums import half_gaps

_tables: dict[tuple[str, str, torch.device], torch.Tensor] = {}

_BUCKETS = 32  # as many as a warp has lanes
_NO_CUT = 2.0  # above every quotient, so never passed


def value_table(quant_type: str, device: torch.device) -> torch.Tensor:
    """[32] int32: the bits of the 16 decoded values, twice over, so that bit 4 of an index does not matter.

    FP4 code 8 is -0.0 here, as CUDA decodes it, whatever `quant_map` says.
    """
    values = list(CODEBOOKS[quant_type].values)
    values[8:] = [-0.0 if value == 0 and quant_type == "fp4" else value for value in values[8:]]
    return _table("values", quant_type, device, [_bits(value) for value in values * 2])


def bucket_table(quant_type: str, device: torch.device) -> torch.Tensor:
    """[64] int32: for each of 32 buckets the bits of the cut inside it, then for each the number of cuts below it.

    Bucket i holds the quotients nearest to i / 31 of the way through [-1, 1] (NF4), or through [0, 1] (FP4, whose cuts
    apply to magnitudes). No bucket holds two cuts, and no cut is nearer to a bucket's edge than 0.03 buckets, so the
    bucket may be found with approximate arithmetic and the one exact comparison with its cut settles the code.
    """
    codebook = CODEBOOKS[quant_type]
    homes = [_bucket(cut, codebook) for cut in codebook.cuts]
    inside = dict(zip(homes, codebook.cuts, strict=True))
    cuts = [_bits(inside.get(i, _NO_CUT)) for i in range(_BUCKETS)]
    below = [sum(home < i for home in homes) for i in range(_BUCKETS)]
    return _table("buckets", quant_type, device, cuts + below)


def middle_table(device: torch.device) -> torch.Tensor:
    """[256] float32: the middles between neighbours of the dynamic map, each float32 step rounded; the last unused."""
    values = torch.tensor(DYNAMIC_MAP, dtype=torch.float32)
    middles = (values[1:] + values[:-1]) * 0.5
    return _table("middles", "", device, [_bits(m) for m in middles.tolist()] + [_bits(_NO_CUT)]).view(torch.float32)


def bound_table(quant_type: str, device: torch.device) -> torch.Tensor:
    """[16] float32: half_gaps, for the error bound."""
    return _table("bounds", quant_type, device, [_bits(gap) for gap in half_gaps(quant_type)]).view(torch.float32)


def _bucket(cut: float, codebook: Codebook) -> int:
    position = 0.5 * cut + 0.5 if codebook.signed_cuts else cut
    return round(position * (_BUCKETS - 1))


def _bits(value: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def _table(kind: str, quant_type: str, device: torch.device, words: Sequence[int]) -> torch.Tensor:
    key = (kind, quant_type, device)
    if key not in _tables:
        _tables[key] = torch.tensor(words, dtype=torch.int32, device=device)
    return _tables[key]
