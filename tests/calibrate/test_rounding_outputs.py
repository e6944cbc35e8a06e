"""Rounding that knows what depends on the outputs: its own cost falls, and loaders decode it."""

import pytest
import torch
from test_rounding import CPU, moments_of, weight_of

from nf4conv.calibrate import rounding
from nf4conv.calibrate.rounding.factor import Factor
from nf4conv.errors import CodecError


def factors_of(
    inputs: int, outputs: int, blocksize: int = 64
) -> tuple[Factor, Factor, torch.Tensor]:
    """Returns the factors of inputs and of outputs, and the moments of the outputs."""
    gradients = moments_of(outputs, seed=5).mean() * 1e-6
    of_inputs = rounding.factor(moments_of(inputs).mean(), blocksize)
    of_outputs = rounding.factor(gradients, 1, rounding.OUTPUT_DAMPING)
    return of_inputs, of_outputs, gradients


@pytest.mark.parametrize(
    ("quant_type", "blocksize", "double_quant"),
    [("nf4", 64, True), ("nf4", 32, False), ("fp4", 64, True)],
)
def test_it_lowers_its_own_cost_below_that_of_one_side(
    quant_type: str, blocksize: int, double_quant: bool
):
    inputs, outputs, gradients = factors_of(128, 200, blocksize)
    weight = weight_of(200, 128)
    options = (quant_type, double_quant)
    (one_sided,) = rounding.round_calibrated([weight], inputs, *options)
    costs = [rounding.two_sided_cost(weight, one_sided, inputs, outputs)]
    for sweeps in (0, 1, 3):
        result = rounding.round_two_sided(weight, inputs, gradients, *options, sweeps)
        assert result.is_calibrated
        measured = rounding.two_sided_cost(weight, result, inputs, outputs)
        assert result.cost == pytest.approx(measured)
        costs.append(result.cost)
    assert costs[1] < 0.95 * costs[0]
    assert costs == sorted(costs, reverse=True)


def test_the_cost_is_the_trace():
    inputs, outputs, gradients = factors_of(64, 96)
    weight = weight_of(96, 64, dtype=torch.float32)
    result = rounding.search(weight)
    errors = (weight - result.values()).double()
    moments = torch.empty(64, 64, dtype=torch.float64)
    moments[inputs.order[:, None], inputs.order] = inputs.moments.double()
    expected = torch.trace(gradients.double() @ errors @ moments @ errors.T)
    found = rounding.two_sided_cost(weight, result, inputs, outputs)
    assert found == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.oracle
def test_loaders_decode_it():
    from bitsandbytes.functional import QuantState, dequantize_4bit

    inputs, _, gradients = factors_of(128, 100)
    weight = weight_of(100, 128)
    result = rounding.round_two_sided(weight, inputs, gradients)
    components = {f"w.{name}": one for name, one in result.state.components().items()}
    state = QuantState.from_dict(components, device=CPU)
    assert torch.equal(dequantize_4bit(result.packed, state), result.values())


def test_the_search_stays_where_it_costs_no_more():
    inputs, _, gradients = factors_of(64, 64)
    weight = torch.zeros(64, 64)
    result = rounding.round_two_sided(weight, inputs, gradients)
    assert not result.is_calibrated
    assert result.cost == result.cost_searched == 0


def test_what_cannot_be_rounded_is_refused():
    inputs, _, gradients = factors_of(64, 64)
    with pytest.raises(CodecError, match="NaN"):
        rounding.round_two_sided(torch.full((64, 64), float("nan")), inputs, gradients)
    gradients[3, 3] = float("nan")
    with pytest.raises(CodecError, match="not finite"):
        rounding.round_two_sided(weight_of(64, 64), inputs, gradients)
