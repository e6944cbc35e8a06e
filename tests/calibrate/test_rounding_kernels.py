"""The definition in float64, plain torch and the kernels choose the same codes and scales.

Where there is no GPU, the kernels run in Triton's interpreter. Outputs in which a decision was too
close for float32 are ties; they may differ, and are few.
"""

from types import ModuleType

import pytest
import rounding_reference as reference
import torch
from test_rounding import moments_of, weight_of

import nf4conv.calibrate.rounding.kernels as kernel_steps
import nf4conv.calibrate.rounding.steps as plain_steps
from nf4conv.calibrate import rounding
from nf4conv.calibrate.rounding import calibrated
from nf4conv.calibrate.rounding.draft import Draft
from nf4conv.calibrate.rounding.levels import Levels, levels_of
from nf4conv.calibrate.rounding.scales import StorableScales

# 1 / 0 is meant
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

MOST_TIES = 0.25
"""Part of the outputs that may be ties: each makes some thousand decisions."""


def problem(
    quant_type: str, blocksize: int, double_quant: bool, inputs: int, outputs: int
) -> tuple[torch.Tensor, rounding.Factor, StorableScales, Levels]:
    weight = weight_of(outputs, inputs)
    factor = rounding.factor(moments_of(inputs, tokens=1000).mean(), blocksize)
    found = rounding.search(weight, quant_type, blocksize, double_quant)
    storable = StorableScales.beside([found.state]).in_order(calibrated.groups_of(factor))
    target = calibrated.ordered([weight], factor)
    return target, factor, storable, levels_of(quant_type, CPU)


def drafted(
    target: torch.Tensor,
    factor: rounding.Factor,
    storable: StorableScales,
    levels: Levels,
    sweeps: int,
) -> Draft:
    draft = calibrated.first_draft(target.clone(), factor, storable, levels)
    gradient = factor.moments @ (target - draft.values(levels))
    for _ in range(sweeps):
        calibrated.sweep(draft, gradient, factor, storable, levels)
    return draft


def moved(
    target: torch.Tensor, factor: rounding.Factor, storable: StorableScales
) -> tuple[torch.Tensor, rounding.Factor, StorableScales]:
    """Returns the same on the device of the kernels."""
    there = rounding.Factor(
        factor.order.to(DEVICE),
        factor.moments.to(DEVICE),
        factor.upper.to(DEVICE),
        factor.blocksize,
        factor.damping,
    )
    if storable.offset is None:
        return target.to(DEVICE), there, storable
    on_device = StorableScales(storable.offset.to(DEVICE), storable.maxima.to(DEVICE))
    return target.to(DEVICE), there, on_device


def assert_same_but_ties(draft: Draft, defined: reference.Chosen) -> None:
    sure = defined.margins > reference.CLOSE
    assert (~sure).float().mean() <= MOST_TIES
    different = (draft.ranks.cpu().long() != defined.ranks).any(dim=0)
    assert not (different & sure).any()
    scales = draft.scales.cpu().double()
    assert torch.allclose(scales[:, sure], defined.scales[:, sure], rtol=1e-5, atol=0)


@pytest.mark.parametrize("sweeps", [0, 2])
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("blocksize", [32, 64, 128])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_plain_torch_chooses_as_defined(
    quant_type: str, blocksize: int, double_quant: bool, sweeps: int
):
    target, factor, storable, levels = problem(quant_type, blocksize, double_quant, 128, 150)
    defined = reference.choose_all(target, factor, storable, levels, sweeps)
    draft = drafted(target, factor, storable, levels, sweeps)
    assert_same_but_ties(draft, defined)


@pytest.mark.parametrize(
    ("quant_type", "blocksize", "double_quant"),
    [("nf4", 64, True), ("fp4", 32, False)],
)
def test_kernels_choose_as_defined(
    quant_type: str, blocksize: int, double_quant: bool, monkeypatch: pytest.MonkeyPatch
):
    target, factor, storable, levels = problem(quant_type, blocksize, double_quant, 64, 33)
    defined = reference.choose_all(target, factor, storable, levels, 1)

    def kernels_for(device: torch.device) -> ModuleType:
        assert device.type == DEVICE.type
        return kernel_steps

    monkeypatch.setattr(calibrated, "steps_for", kernels_for)
    there = moved(target, factor, storable)
    draft = drafted(*there, levels_of(quant_type, DEVICE), 1)
    assert_same_but_ties(draft, defined)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("quant_type", "blocksize", "double_quant"),
    [("nf4", 64, True), ("nf4", 64, False), ("fp4", 32, True), ("nf4", 128, True)],
)
def test_compiled_kernels_choose_as_defined(quant_type: str, blocksize: int, double_quant: bool):
    target, factor, storable, levels = problem(quant_type, blocksize, double_quant, 256, 250)
    defined = reference.choose_all(target, factor, storable, levels, 1)
    assert calibrated.steps_for(DEVICE) is kernel_steps
    there = moved(target, factor, storable)
    draft = drafted(*there, levels_of(quant_type, DEVICE), 1)
    assert_same_but_ties(draft, defined)


def test_a_cpu_needs_no_triton():
    assert calibrated.steps_for(CPU) is plain_steps
