"""The fast error sums of the CPU against the reference: counts and extremes equal, sums to the
precision of float32.
"""

from itertools import product

import pytest
import torch
from four_bit import sums_of
from weights import special_weight

from nf4conv.codec import cpu, reference
from nf4conv.codec.ops import quantize_4bit
from nf4conv.codec.quant_state import decoding_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def compare(weight: torch.Tensor, packed: torch.Tensor, state: object) -> int:
    """Both results are alike; returns how many values are outside the bound."""
    arguments = (weight, packed.view(-1), decoding_of(state))
    fast, slow = sums_of(cpu, *arguments), sums_of(reference, *arguments)
    assert fast[2:] == slow[2:]
    assert fast[:2] == pytest.approx(slow[:2], rel=1e-6, abs=0, nan_ok=True)
    return int(fast.outside)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_weights(dtype: torch.dtype):
    for elements, quant_type, double_quant in product(
        [0, 1, 64, 5 * 64 + 7, 2**18, 2**18 + 640 + 3], ["nf4", "fp4"], [True, False]
    ):
        weight = (
            torch.randn(elements, generator=torch.Generator().manual_seed(elements)) * 0.02
        ).to(dtype)
        packed, state = quantize_4bit(weight, quant_type, double_quant=double_quant)
        assert compare(weight, packed, state) == 0


@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [32, 64, 4096])
def test_special_blocks(blocksize: int, quant_type: str, double_quant: bool):
    weight = special_weight(torch.float32, blocksize, "constant")
    packed, state = quantize_4bit(weight, quant_type, blocksize, double_quant)
    compare(weight, packed, state)


@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_wrong_codes_are_counted(quant_type: str, double_quant: bool):
    weight = torch.randn(2**18, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed, state = quantize_4bit(weight, quant_type, double_quant=double_quant)
    damaged = (
        packed
        ^ (torch.rand(packed.shape, generator=torch.Generator().manual_seed(1)) < 0.01).byte()
        * 0x30
    )
    assert compare(weight, damaged, state) > 100
