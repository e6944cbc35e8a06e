"""The definition in float64, plain torch and the kernels choose the same codes and scales.

Where there is no GPU, the kernels run in Triton's interpreter. Outputs in which a decision was too
close for float32 are ties; they may differ, and are few.
"""

from dataclasses import replace
from types import ModuleType

import pytest
import rounding_reference as reference
import torch
from test_rounding import moments_of, weight_of

import nf4conv.calibrate.rounding.kernels as kernel_steps
import nf4conv.calibrate.rounding.steps as plain_steps
from nf4conv.calibrate.rounding import calibrated
from nf4conv.calibrate.rounding.draft import Draft
from nf4conv.calibrate.rounding.factor import Factor
from nf4conv.calibrate.rounding.factor import factor as factor_of
from nf4conv.calibrate.rounding.levels import levels_of
from nf4conv.calibrate.rounding.rounded import search

# 1 / 0 is meant
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

MOST_TIES = 0.25
"""Part of the outputs that may be ties: each makes some thousand decisions."""


def problem(
    quant_type: str, blocksize: int, double_quant: bool, inputs: int, outputs: int
) -> tuple[Draft, torch.Tensor, Factor]:
    weight = weight_of(outputs, inputs)
    factor = factor_of(moments_of(inputs, tokens=1000).mean(), blocksize)
    found = search(weight, quant_type, blocksize, double_quant)
    draft = Draft.beside([found.state], factor)
    return draft, calibrated.ordered([weight], factor), factor


def choose(draft: Draft, target: torch.Tensor, factor: Factor, sweeps: int) -> None:
    calibrated.choose(draft, target.clone(), factor)
    gradient = factor.moments @ (target - draft.values())
    for _ in range(sweeps):
        calibrated.sweep(draft, gradient, factor)


def choose_there(draft: Draft, target: torch.Tensor, factor: Factor) -> Draft:
    """Returns what the device of the kernels chooses in a draft."""
    moved = draft._changed(lambda tensor: tensor.to(DEVICE))
    moved.levels = levels_of(draft.levels.quant_type, DEVICE)
    there = replace(
        factor,
        order=factor.order.to(DEVICE),
        moments=factor.moments.to(DEVICE),
        upper=factor.upper.to(DEVICE),
    )
    choose(moved, target.to(DEVICE), there, 1)
    return moved


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
    draft, target, factor = problem(quant_type, blocksize, double_quant, 128, 150)
    defined = reference.choose_all(target, factor, draft, sweeps)
    choose(draft, target, factor, sweeps)
    assert_same_but_ties(draft, defined)


@pytest.mark.parametrize(
    ("quant_type", "blocksize", "double_quant"),
    [("nf4", 64, True), ("fp4", 32, False)],
)
def test_kernels_choose_as_defined(
    quant_type: str, blocksize: int, double_quant: bool, monkeypatch: pytest.MonkeyPatch
):
    draft, target, factor = problem(quant_type, blocksize, double_quant, 64, 33)
    defined = reference.choose_all(target, factor, draft, 1)

    def kernels_for(device: torch.device) -> ModuleType:
        assert device.type == DEVICE.type
        return kernel_steps

    monkeypatch.setattr(calibrated, "steps_for", kernels_for)
    assert_same_but_ties(choose_there(draft, target, factor), defined)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("quant_type", "blocksize", "double_quant"),
    [("nf4", 64, True), ("nf4", 64, False), ("fp4", 32, True), ("nf4", 128, True)],
)
def test_compiled_kernels_choose_as_defined(quant_type: str, blocksize: int, double_quant: bool):
    draft, target, factor = problem(quant_type, blocksize, double_quant, 256, 250)
    defined = reference.choose_all(target, factor, draft, 1)
    assert calibrated.steps_for(DEVICE) is kernel_steps
    assert_same_but_ties(choose_there(draft, target, factor), defined)


def test_a_cpu_needs_no_triton():
    assert calibrated.steps_for(CPU) is plain_steps
