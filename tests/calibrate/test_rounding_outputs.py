"""Rounding that knows what depends on the outputs: its own cost falls, and loaders decode it."""

import pytest
import torch
from test_rounding import CPU, moments_of, weight_of

from nf4conv.calibrate import rounding
from nf4conv.calibrate.rounding.factor import Factor


def problem(
    inputs: int, outputs: int, blocksize: int = 64
) -> tuple[Factor, torch.Tensor, torch.Tensor]:
    """Returns the factor of inputs, and the moments of inputs and of outputs."""
    gradients = moments_of(outputs, seed=5).mean() * 1e-6
    moments = moments_of(inputs).mean()
    return rounding.factor(moments, blocksize), moments, gradients


@pytest.mark.parametrize(
    ("quant_type", "blocksize", "double_quant"),
    [("nf4", 64, True), ("nf4", 32, False), ("fp4", 64, True)],
)
def test_it_lowers_its_own_cost_below_that_of_one_side(
    quant_type: str, blocksize: int, double_quant: bool
):
    factor, moments, gradients = problem(128, 200, blocksize)
    weight = weight_of(200, 128)
    searched = rounding.search(weight, quant_type, blocksize, double_quant)
    (one_sided,) = rounding.round_calibrated([weight], [searched], factor)
    costs = [rounding.two_sided_cost(weight, one_sided, moments, gradients)]
    for sweeps in (0, 1, 3):
        result = rounding.round_two_sided(weight, searched, factor, gradients, sweeps)
        costs.append(rounding.two_sided_cost(weight, result, moments, gradients))
    assert costs[1] < 0.95 * costs[0]
    assert costs == sorted(costs, reverse=True)


def test_the_cost_is_the_trace():
    _, moments, gradients = problem(64, 96)
    weight = weight_of(96, 64, dtype=torch.float32)
    result = rounding.search(weight)
    errors = (weight - result.values()).double()
    expected = torch.trace(gradients.double() @ errors @ moments.double() @ errors.T)
    found = rounding.two_sided_cost(weight, result, moments, gradients)
    assert found == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.oracle
def test_loaders_decode_it():
    from bitsandbytes.functional import QuantState, dequantize_4bit

    factor, _, gradients = problem(128, 100)
    weight = weight_of(100, 128)
    result = rounding.round_two_sided(weight, rounding.search(weight), factor, gradients)
    components = {f"w.{name}": one for name, one in result.state.components().items()}
    state = QuantState.from_dict(components, device=CPU)
    assert torch.equal(dequantize_4bit(result.packed, state), result.values())
