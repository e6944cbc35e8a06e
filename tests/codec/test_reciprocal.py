"""The reciprocal against the instruction's results on a GPU, of which tests/golden/reciprocal.json
has the hashes.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import scalar
import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels import arithmetic
from nf4conv.codec.reciprocal import coefficients, reciprocal

RECORDED = json.loads((Path(__file__).parents[1] / "golden/reciprocal.json").read_text())
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("exponent", [1, 127, 252, 253, 254])
def test_every_mantissa_has_the_recorded_result(exponent):
    numbers = (torch.arange(1 << 23, dtype=torch.int32) | exponent << 23).view(torch.float32)
    found = reciprocal(numbers).numpy().tobytes()
    assert hashlib.sha256(found).hexdigest() == RECORDED[f"exponent {exponent}"]["bits_sha256"]


def test_the_recorded_exponents_have_one_pattern():
    """So that five of them are enough to look at."""
    patterns = {
        facts["sha256"]
        for key, facts in RECORDED.items()
        if key.startswith("exponent") and facts["max"] == 1
    }
    assert len(patterns) == 1
    assert RECORDED["exponent 127"]["differ"] == 1_108_522


SPECIAL = (
    (0.0, np.inf), (-0.0, -np.inf), (1e-40, np.inf), (-1e-40, -np.inf), (np.inf, 0.0),
    (-np.inf, -0.0), (2.0**126, 2.0**-126), (2.0**126 + 2.0**103, 0.0), (3.4e38, 0.0),
    (-3.4e38, -0.0), (2.0**-126, 2.0**126),
)  # fmt: skip


@pytest.mark.parametrize(("value", "expected"), SPECIAL, ids=str)
def test_numbers_at_the_ends(value, expected):
    [found] = reciprocal(torch.tensor([value])).tolist()
    assert (found, np.signbit(found)) == (expected, np.signbit(expected))


def test_nan_stays_nan_whatever_shape_it_is_in():
    found = reciprocal(torch.tensor([[1.0, torch.nan], [4.0, -2.0]]).t())
    assert found.isnan().tolist() == [[False, False], [True, False]]
    assert found[0].tolist() == [1.0, 0.25]


@triton.jit
def _kernel(values_ptr, found_ptr, coefficient_ptr, COUNT: tl.constexpr, PTX: tl.constexpr):  # noqa: N803
    index = tl.arange(0, COUNT)
    found = arithmetic.reciprocal(tl.load(values_ptr + index), coefficient_ptr, PTX)
    tl.store(found_ptr + index, found)


@pytest.mark.parametrize(
    "ptx", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["plain", "ptx"]
)
def test_kernels_and_one_number_at_a_time_agree(ptx):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=generator, dtype=torch.int64).to(
        torch.int32
    )
    numbers = bits.view(torch.float32)
    numbers[: len(SPECIAL)] = torch.tensor([value for value, _ in SPECIAL])
    expected = reciprocal(numbers)
    table = torch.from_numpy(coefficients().astype(np.int32)).to(DEVICE)
    found = torch.empty(4096, device=DEVICE)
    _kernel[(1,)](numbers.to(DEVICE), found, table, 4096, ptx)
    one_by_one = torch.tensor([scalar.reciprocal(number) for number in numbers.numpy()[:500]])
    for others in (found.cpu(), torch.cat([one_by_one, expected[500:]])):
        is_nan = expected.isnan()
        assert torch.equal(others.isnan(), is_nan)
        assert torch.equal(others[~is_nan].view(torch.int32), expected[~is_nan].view(torch.int32))
