"""Kernels for few rows of x: their choice is near the fastest that was measured, and shapes fit a
multiprocessor.
"""

import json
import re
from pathlib import Path

import pytest
from own_process import CANNOT_COMPILE, NEEDS_COMPILER

if CANNOT_COMPILE:  # the modules below import Triton's compiler
    pytest.skip(NEEDS_COMPILER, allow_module_level=True)

from nf4conv.codec.quant_state import Form
from nf4conv.inference.kernels.product import balancing
from nf4conv.inference.kernels.product.shapes import HELD_SHAPES, SHAPES, Held, Shape

FORM = Form("nf4", 64, True)
PROCESSORS = 132
MEASURED = json.loads((Path(__file__).parents[2] / "tests/golden/row_plans_h200.json").read_text())[
    "cases"
]


def name_of(shape: Shape | Held, split_shift: int) -> str:
    """Returns the name under which a shape and a number of parts of k were measured."""
    programs = f"{shape.programs} programs"
    if isinstance(shape, Held):
        warps = "" if shape.warps == 8 else f" of {shape.warps} warps"
        return f"held, {shape.steps} steps{warps}, {programs}"
    if shape.wide:
        return f"wide, {programs}"
    return f"{shape.span} k, {programs}, {1 << split_shift} parts"


def test_chooses_what_was_fast() -> None:
    """Within 4 % of the fastest, and within 1 % of what was chosen before."""
    for case in MEASURED:
        found = re.fullmatch(r"(\d+) rows, (\d+) x (\d+), .*", case["case"])
        rows, n, k = map(int, found.groups())
        shape, division = balancing.plan_rows(rows, n, k, FORM, PROCESSORS, True)
        split_shift = division.split_shift
        times = {name: found for name, found in case["µs"].items() if name != "nn.Linear"}
        chosen = times[name_of(shape, split_shift)]
        assert chosen <= 1.04 * min(times.values())
        assert chosen <= 1.01 * times["present"]
        for pace in balancing.PACES.get(rows, ()):
            if (pace[0].span, pace[0].programs) == (shape.span, shape.programs):
                found = balancing.estimate(pace, n, k, PROCESSORS, split_shift)
                assert abs(found / chosen - 1) < 0.1


@pytest.mark.parametrize("processors", [20, 78, 132, 148])
def test_a_row_does_not_depend_on_how_many_stand_beside_it(processors: int) -> None:
    for n, k in ((5120, 5120), (6144, 4096), (300, 192)):
        for first, last in ((3, 4), (5, 8), (9, 16), (17, 32)):
            plans = [
                balancing.plan_rows(m, n, k, FORM, processors, True) for m in range(first, last + 1)
            ]
            assert all(one == plans[0] for one in plans)


def test_other_gpus_have_two_programs_on_a_multiprocessor() -> None:
    for m in (1, 2, 4, 8, 16, 32, 64):
        for n, k in ((5120, 5120), (11008, 4096), (6144, 4096)):
            shape, _ = balancing.plan_rows(m, n, k, FORM, 108, False)
            assert shape.programs == 2


def test_shapes_fit_a_multiprocessor() -> None:
    """An H200 has 65,536 registers, and 227 KiB for programs, which take 1 KiB more each."""
    shapes: list[Shape | Held] = [*SHAPES, *HELD_SHAPES]
    shapes += [pace[0] for paces in balancing.PACES.values() for pace in paces]
    for shape in shapes:
        assert shape.registers * 32 * shape.warps * shape.programs <= 65536, shape
        shared = 32768 + shape.shared_bytes
        if isinstance(shape, Held) or shape.wide:
            shared += 1024
        assert shared <= 48 << 10, shape  # what Triton declares
        assert (shared + 1024) * shape.programs <= 228 << 10, shape
