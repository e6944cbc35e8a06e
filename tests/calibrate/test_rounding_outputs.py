"""Rounding that knows what depends on the outputs: its own cost falls, and loaders decode it."""

import pytest
import torch
from test_rounding import CPU, moments_of, weight_of

from nf4conv.calibrate.rounding.calibrated import round_calibrated
from nf4conv.calibrate.rounding.factor import Factor
from nf4conv.calibrate.rounding.factor import factor as factor_of
from nf4conv.calibrate.rounding.rounded import search
from nf4conv.calibrate.rounding.two_sided import round_two_sided, two_sided_cost


def problem(
    inputs: int, outputs: int, blocksize: int = 64
) -> tuple[Factor, torch.Tensor, torch.Tensor]:
    """Returns the factor of inputs, and the moments of inputs and of outputs."""
    gradients = moments_of(outputs, seed=5).mean() * 1e-6
    moments = moments_of(inputs).mean()
    return factor_of(moments, blocksize), moments, gradients


@pytest.mark.parametrize(
    ("quant_type", "blocksize", "double_quant"),
    [("nf4", 64, True), ("nf4", 32, False), ("fp4", 64, True)],
)
def test_it_lowers_its_own_cost_below_that_of_one_side(
    quant_type: str, blocksize: int, double_quant: bool
):
    factor, moments, gradients = problem(128, 200, blocksize)
    weight = weight_of(200, 128)
    searched = search(weight, quant_type, blocksize, double_quant)
    (one_sided,) = round_calibrated([weight], [searched], factor)
    costs = [two_sided_cost(weight, one_sided, moments, gradients)]
    for sweeps in (0, 1, 3):
        result = round_two_sided(weight, searched, factor, gradients, sweeps)
        costs.append(two_sided_cost(weight, result, moments, gradients))
    assert costs[1] < 0.95 * costs[0]
    assert costs == sorted(costs, reverse=True)


def test_the_cost_is_the_trace():
    _, moments, gradients = problem(64, 96)
    weight = weight_of(96, 64, dtype=torch.float32)
    result = search(weight)
    errors = (weight - result.values()).double()
    expected = torch.trace(gradients.double() @ errors @ moments.double() @ errors.T)
    found = two_sided_cost(weight, result, moments, gradients)
    assert found == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.oracle
def test_loaders_decode_it():
    from bitsandbytes.functional import QuantState, dequantize_4bit

    factor, _, gradients = problem(128, 100)
    weight = weight_of(100, 128)
    result = round_two_sided(weight, search(weight), factor, gradients)
    components = {f"w.{name}": one for name, one in result.state.components().items()}
    state = QuantState.from_dict(components, device=CPU)
    assert torch.equal(dequantize_4bit(result.packed, state), result.values())
