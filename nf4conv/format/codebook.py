"""The code values and cut points of bitsandbytes' 4-bit and 8-bit data types, as float32 bit
patterns.

A 4-bit code stands for one of 16 values in [-1, 1]. A block of weights is divided by its absmax,
and each quotient is replaced by the code of a near value. *Cuts* decide which code is near.

bitsandbytes' CUDA library compares with constants that its compiler rounded from decimal literals
straight to float32. Four of the fifteen NF4 literals land one ulp elsewhere when a decimal goes
through float64 first, as it does in Python. So codebook.json holds no decimals: every constant is
the bit pattern found in the compiled library (bitsandbytes 0.50.2).

This file imports no torch. Kernels, reference and tests all read the same tables from here.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

QuantType: TypeAlias = Literal["nf4", "fp4"]
Blocksize: TypeAlias = Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]
Scales: TypeAlias = Literal["absmax", "search"]


def _floats(patterns: Sequence[str]) -> tuple[float, ...]:
    """Reads float32 numbers, which Python's floats hold exactly, from their bits in hexadecimal."""
    raw = bytes.fromhex(" ".join(patterns))
    return struct.unpack(f">{len(raw) // 4}f", raw)


@dataclass(frozen=True)
class Codebook:
    """One 4-bit data type.

    Attributes:
        quant_type: "nf4" or "fp4".
        values: the 16 values in code order, as stored in `quant_map`. FP4 code 8 is +0.0 here, as
            bitsandbytes stores it, although its CUDA kernels decode that code to -0.0.
        cuts: ascending cut points. NF4 has 15 on the signed quotient; the code is the number of
            cuts below it. FP4 has 7 on the magnitude of the quotient.
        ranks: the code for each number of cuts below. NF4: 0 … 15. FP4: the magnitudes in ascending
            order are the codes 0, 1, 6, 7, 4, 5, 2, 3, to which the sign adds 8.
        signed_cuts: True if the cuts apply to the signed quotient (NF4), False if to its magnitude
            (FP4).
    """

    quant_type: str
    values: tuple[float, ...]
    cuts: tuple[float, ...]
    ranks: tuple[int, ...]
    signed_cuts: bool


_TABLES: Final = json.loads(Path(__file__).with_suffix(".json").read_bytes())

CODEBOOKS: Final = {
    name: Codebook(
        quant_type=name,
        values=_floats(entry["values"]),
        cuts=_floats(entry["cuts"]),
        ranks=tuple(entry["ranks"]),
        signed_cuts=entry["signed_cuts"],
    )
    for name, entry in _TABLES["4-bit"].items()
}
"""The data types by their names."""

BLOCKSIZES: Final[tuple[int, ...]] = get_args(Blocksize)
"""Block sizes that bitsandbytes' CUDA kernels accept (32 since its 0.49.2)."""

SCALES: Final[tuple[str, ...]] = get_args(Scales)
"""Ways to choose the scale of a block: its absmax, or the scale that codec/search.py finds."""

RECORDED_SCALES: Final = (*SCALES, "calibrated")
"""What nf4conv.json may say of the scales of a weight: calibration chooses them with the codes."""

NESTED_BLOCKSIZE: Final = 256
"""Block size of the second quantization, of absmax itself; fixed in bitsandbytes."""

# The 128 positive values of the signed dynamic map, ascending. This is the variant that
# torch.linspace gives on a host with fused multiply-add (every x86 machine of the last decade, so
# every published checkpoint); without FMA 42 of the 256 entries differ by up to 2 ulp.
_DYNAMIC_POSITIVE: Final = _floats(_TABLES["positive values of the dynamic map"])

# The largest positive value, 1.0, has no negative counterpart.
_DYNAMIC_NEGATIVE: Final = tuple(-value for value in reversed(_DYNAMIC_POSITIVE[:-1]))

DYNAMIC_MAP: Final = (*_DYNAMIC_NEGATIVE, 0.0, *_DYNAMIC_POSITIVE)
"""bitsandbytes' `create_dynamic_map(signed=True)`: 256 ascending values, 0.0 at index 127, 1.0 at
index 255.
"""
