"""The constants, held against the decimals they were made of and against arithmetic done twice
over.
"""

import hashlib
import struct
from fractions import Fraction

import numpy as np
import pytest

from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP

NF4, FP4 = CODEBOOKS["nf4"], CODEBOOKS["fp4"]

# The literals of bitsandbytes' csrc/kernels.cu, ascending.
NF4_LITERALS = """
    -0.8480964004993439 -0.6106329262256622 -0.4599952697753906 -0.33967943489551544
    -0.23460740596055984 -0.13791173323988914 -0.045525018125772476 0.03979014977812767
    0.1202552504837513 0.2035212516784668 0.2920137718319893 0.3893125355243683
    0.5016634166240692 0.6427869200706482 0.8614784181118011
"""
FP4_LITERALS = "0.00260417 0.0859375 0.20833333 0.29166667 0.4166667 0.583333 0.8333333"


def bits(value: float) -> str:
    return struct.pack(">f", value).hex()


def rounded_once(decimal: str) -> float:
    """The float32 nearest to a decimal, the even one of two that are as near: what nvcc makes of
    the literal.
    """
    exact = Fraction(decimal)
    guess = np.float32(decimal)
    nearby = [np.nextafter(guess, np.float32(-2)), guess, np.nextafter(guess, np.float32(2))]
    return float(
        min(
            nearby,
            key=lambda value: (abs(Fraction(float(value)) - exact), value.view(np.uint32) & 1),
        )
    )


@pytest.mark.parametrize(
    ("codebook", "literals"), [(NF4, NF4_LITERALS), (FP4, FP4_LITERALS)], ids=["nf4", "fp4"]
)
def test_cuts_are_the_literals_rounded_once(codebook, literals):
    assert [bits(cut) for cut in codebook.cuts] == [
        bits(rounded_once(literal)) for literal in literals.split()
    ]


def test_four_nf4_literals_round_differently_by_way_of_float64():
    twice = [bits(float(literal)) for literal in NF4_LITERALS.split()]
    differing = [i for i, cut in enumerate(NF4.cuts) if bits(cut) != twice[i]]
    assert differing == [0, 8, 12, 14]


def test_fp4_values_are_twelfths():
    twelfths = (0, 0.0625, 8, 12, 4, 6, 2, 3)
    expected = [float(np.float32(part) / np.float32(12)) for part in twelfths]
    assert list(FP4.values) == expected + [-value for value in expected]


def test_minus_zero_is_stored_as_zero():
    assert bits(FP4.values[8]) == "00000000"


def test_dynamic_map_has_the_published_digest():
    stored = struct.pack("<256f", *DYNAMIC_MAP)
    assert (
        hashlib.sha256(stored).hexdigest()
        == "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c"
    )
