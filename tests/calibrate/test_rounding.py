"""Rounding that knows the activations: what is stored decodes to what was chosen, and it is never
worse than the search.
"""

import pytest
import torch

import nf4conv
from nf4conv.calibrate.moments import SecondMoments
from nf4conv.calibrate.rounding import calibrated, steps
from nf4conv.calibrate.rounding.calibrated import round_calibrated
from nf4conv.calibrate.rounding.draft import Draft
from nf4conv.calibrate.rounding.factor import Factor
from nf4conv.calibrate.rounding.factor import factor as factor_of
from nf4conv.calibrate.rounding.levels import ascending, levels_of
from nf4conv.calibrate.rounding.rounded import layer_cost, search
from nf4conv.errors import CodecError

CPU = torch.device("cpu")
FORMATS = [
    (quant_type, blocksize, double_quant)
    for quant_type in ("nf4", "fp4")
    for blocksize in (32, 64, 128)
    for double_quant in (True, False)
] + [("nf4", 1024, True)]


def moments_of(inputs: int, tokens: int = 0, seed: int = 0) -> SecondMoments:
    """Returns the moments of tokens whose features are correlated and differ in size."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(inputs, inputs, generator=generator) / inputs**0.5
    mixing = mixed + torch.diag(torch.rand(inputs, generator=generator) + 0.2)
    tokens = tokens or 4 * inputs
    found = SecondMoments.zeros(inputs, CPU)
    found.add(torch.randn(tokens, inputs, generator=generator) @ mixing)
    return found


def weight_of(
    outputs: int, inputs: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(outputs, inputs, generator=generator) * 0.05).to(dtype)


def believed(
    weights: list[torch.Tensor], factor: Factor, quant_type: str, double_quant: bool
) -> torch.Tensor:
    """Returns the values that the first draft of stacked weights believes in, [out, in]."""
    found = [search(weight, quant_type, factor.blocksize, double_quant) for weight in weights]
    draft = Draft.beside([one.state for one in found], factor)
    calibrated.choose(draft, calibrated.ordered(weights, factor), factor)
    return draft.values()[factor.order.argsort()].T


@pytest.mark.oracle
@pytest.mark.parametrize(("quant_type", "blocksize", "double_quant"), FORMATS)
def test_loaders_decode_what_was_chosen(quant_type: str, blocksize: int, double_quant: bool):
    from bitsandbytes.functional import QuantState, dequantize_4bit

    inputs = max(256, blocksize)
    moments = moments_of(inputs, tokens=1024)
    factor = factor_of(moments.mean(), blocksize)
    weights = [weight_of(40, inputs), weight_of(24, inputs, 1) + 0.02]
    searched = [search(weight, quant_type, blocksize, double_quant) for weight in weights]
    results = round_calibrated(weights, searched, factor, sweeps=0)
    chosen = believed(weights, factor, quant_type, double_quant).split([40, 24])
    for weight, result, expected in zip(weights, results, chosen, strict=True):
        assert torch.equal(result.values(torch.float32), expected)
        components = {f"w.{name}": one for name, one in result.state.components().items()}
        state = QuantState.from_dict(components, device=CPU)
        assert state.dtype == weight.dtype
        assert state.shape == weight.shape
        state.dtype = torch.float32
        assert torch.equal(dequantize_4bit(result.packed, state), expected)


def test_the_largest_blocks_are_stored_as_chosen():
    """The factor of 4096 inputs takes too long for a test; this one is made up."""
    places = torch.arange(4096).flip(0)
    factor = Factor(places, torch.eye(4096), torch.eye(4096), 4096, 0.0)
    weight = weight_of(4, 4096)
    searched = search(weight, "fp4", 4096)
    (result,) = round_calibrated([weight], [searched], factor, sweeps=0)
    expected = believed([weight], factor, "fp4", double_quant=True)
    assert torch.equal(result.values(torch.float32), expected)
    (result,) = round_calibrated([weight], [searched], factor, sweeps=1)
    costs = [layer_cost(weight, one, factor.moments) for one in (result, searched)]
    assert costs[0] < costs[1]


@pytest.mark.parametrize(("quant_type", "blocksize", "double_quant"), FORMATS)
def test_it_costs_less_than_the_search(quant_type: str, blocksize: int, double_quant: bool):
    inputs = max(256, blocksize)
    moments = moments_of(inputs, tokens=1024).mean()
    factor = factor_of(moments, blocksize)
    weight = weight_of(32, inputs, dtype=torch.float32)
    searched = search(weight, quant_type, blocksize, double_quant)
    costs = [layer_cost(weight, searched, moments)]
    for sweeps in (0, 1, 2):
        (result,) = round_calibrated([weight], [searched], factor, sweeps)
        costs.append(layer_cost(weight, result, moments))
    assert costs[1] < 0.75 * costs[0]
    assert costs == sorted(costs, reverse=True)


def test_a_weight_of_levels_stays_as_it_is():
    levels = nf4conv.quantize_4bit(torch.zeros(64))[1].code
    weight = levels[torch.randint(0, 16, (16, 64), generator=torch.Generator().manual_seed(0))]
    weight[:, 0] = 1
    factor = factor_of(torch.eye(64), 64)
    searched = search(weight, "nf4", 64, double_quant=False)
    (result,) = round_calibrated([weight], [searched], factor)
    assert torch.equal(result.values(), weight)


def test_dead_inputs_and_few_tokens_are_damped():
    moments = moments_of(128, tokens=5)
    moments.sums[7] = 0
    moments.sums[:, 7] = 0
    factor = factor_of(moments.mean(), 64)
    assert factor.upper.isfinite().all()
    weight = weight_of(32, 128)
    searched = search(weight)
    (result,) = round_calibrated([weight], [searched], factor)
    costs = [layer_cost(weight, one, moments.mean()) for one in (result, searched)]
    assert costs[0] < 0.5 * costs[1]


def test_the_damping_grows_until_the_factor_holds():
    indefinite = torch.diag(torch.tensor([-1e-3] + [1.0] * 63))
    indefinite[0, 0] = 1e-9
    indefinite[0, 1] = indefinite[1, 0] = 0.5
    factor = factor_of(indefinite, 64)
    assert factor.damping > 0.01
    damped = factor.moments.double()
    damped.diagonal().add_(factor.damping * indefinite.diagonal().double().mean())
    product = factor.upper.double() @ damped @ factor.upper.double().T
    assert torch.allclose(product, torch.eye(64, dtype=torch.float64), atol=1e-4)


def test_groups_of_inputs_are_ordered_by_energy():
    factor = factor_of(torch.diag(torch.arange(1.0, 129)), 64)
    assert factor.order.tolist() == list(range(127, -1, -1))
    mixed = torch.ones(128)
    mixed[3] = 100
    factor = factor_of(torch.diag(mixed), 32)
    assert factor.order[0] == 3
    assert sorted(factor.order[:32].tolist()) == list(range(32))


def test_moments_of_few_tokens_are_blended():
    layer = moments_of(32, tokens=1000)
    few = moments_of(32, tokens=16, seed=1)
    enough = moments_of(32, tokens=64, seed=2)
    none = SecondMoments.zeros(32, CPU)
    assert enough.blended(layer) is enough
    assert none.blended(layer) is layer
    expected = 0.25 * few.mean() + 0.75 * layer.mean()
    assert torch.allclose(few.blended(layer).mean(), expected)


def test_nan_in_activations_is_refused():
    moments = moments_of(64).mean()
    moments[3, 4] = float("nan")
    with pytest.raises(CodecError, match="not finite"):
        factor_of(moments, 64)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_levels_are_the_values_of_codes(quant_type: str):
    values, cuts, codes = ascending(quant_type)
    stored = nf4conv.quantize_4bit(torch.zeros(64), quant_type)[1].code
    assert stored[list(codes)].tolist() == list(values)
    assert list(values) == sorted(values)
    assert list(cuts) == sorted(cuts)
    levels = levels_of(quant_type, CPU)
    assert torch.equal(levels.decode(levels.ranks(levels.values)), levels.values)
    halves = torch.linspace(-1.1, 1.1, 5001)
    nearest = (halves[:, None] - levels.values).abs().amin(dim=1)
    chosen = (halves - levels.decode(levels.ranks(halves))).abs()
    assert torch.allclose(chosen, nearest, atol=1e-6)


def test_a_step_leaves_the_threads_of_torch_as_they_were():
    """A step computes on one thread; what runs behind it has all of them again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert steps._one_thread()(torch.get_num_threads)() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
