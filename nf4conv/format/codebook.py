"""The code values and cut points of bitsandbytes' 4-bit and 8-bit data types, as float32 bit patterns.

A 4-bit code stands for one of 16 values in [-1, 1]; a block of weights is divided by its absmax and each quotient is
replaced by the code of a near value. Which code is near is decided by *cuts*: bitsandbytes' CUDA library compares with
constants that its compiler rounded from decimal literals straight to float32, and four of the fifteen NF4 literals land
one ulp elsewhere when a decimal goes through float64 first, as it does in Python. So nothing here is a decimal: every
constant is the bit pattern found in the compiled library (bitsandbytes 0.50.2).

No torch in this file: kernels, reference and tests all read the same tables from here.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final


def float32_from_bits(bits: int) -> float:
    """The float32 with this bit pattern; a Python float holds it exactly."""
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def _floats(patterns: str) -> tuple[float, ...]:
    return tuple(float32_from_bits(int(word, 16)) for word in patterns.split())


@dataclass(frozen=True)
class Codebook:
    """One 4-bit data type."""

    quant_type: str  # "nf4" or "fp4"
    # the 16 values in code order, as stored in `quant_map`. FP4 code 8 is +0.0 here, as bitsandbytes stores it,
    # although its CUDA kernels decode that code to -0.0
    values: tuple[float, ...]
    # ascending cut points. NF4: 15 of them on the signed quotient; the code is the number of cuts below it. FP4: 7 of
    # them on the magnitude of the quotient
    cuts: tuple[float, ...]
    # the code for each number of cuts passed. NF4: 0..15. FP4: the magnitudes in ascending order are the codes 0, 1, 6,
    # 7, 4, 5, 2, 3, to which the sign adds 8
    ranks: tuple[int, ...]
    signed_cuts: bool  # whether the cuts apply to the signed quotient (NF4) or to its magnitude (FP4)


NF4: Final = Codebook(
    quant_type="nf4",
    values=_floats(
        "bf800000 bf3239b1 bf066b30 beca32a0 be91a24d be3d353f bdba7871 00000000"
        " 3da2faff 3e24cae3 3e7c04dd 3ead033a 3ee1a4b8 3f1007ab 3f3913b3 3f800000"
    ),
    cuts=_floats(
        "bf591cd9 bf1c5270 beeb8480 beadea76 be703cec be0d38bc bd3a7871 3d22faff"
        " 3df64863 3e5067e0 3e9582d4 3ec753f9 3f006d03 3f248daf 3f5c89d9"
    ),
    ranks=tuple(range(16)),
    signed_cuts=True,
)

FP4: Final = Codebook(
    quant_type="fp4",
    values=_floats(
        "00000000 3baaaaab 3f2aaaab 3f800000 3eaaaaab 3f000000 3e2aaaab 3e800000"
        " 00000000 bbaaaaab bf2aaaab bf800000 beaaaaab bf000000 be2aaaab be800000"
    ),
    cuts=_floats("3b2aaab9 3db00000 3e555555 3e955555 3ed55556 3f155550 3f555555"),
    ranks=(0, 1, 6, 7, 4, 5, 2, 3),
    signed_cuts=False,
)

CODEBOOKS: Final = {"nf4": NF4, "fp4": FP4}

BLOCKSIZES: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Block sizes that bitsandbytes' CUDA kernels accept (32 since its 0.49.2)."""

SCALES: Final = ("absmax", "search")
"""What the values of a block are multiplied by: its absmax, or what codec/search.py finds."""

NESTED_BLOCKSIZE: Final = 256  # block size of the second quantization, of absmax itself; fixed in bitsandbytes

# The 128 positive values of the signed dynamic map, ascending. This is the variant that torch.linspace gives on a host
# with fused multiply-add (every x86 machine of the last decade, so every published checkpoint); without FMA 42 of the
# 256 entries differ by up to 2 ulp.
_DYNAMIC_POSITIVE: Final = _floats(Path(__file__).with_name("dynamic_map.txt").read_text())
DYNAMIC_MAP: Final = (*(-value for value in reversed(_DYNAMIC_POSITIVE[:-1])), 0.0, *_DYNAMIC_POSITIVE)
"""bitsandbytes' `create_dynamic_map(signed=True)`: 256 ascending values, 0.0 at index 127, 1.0 at index 255."""
