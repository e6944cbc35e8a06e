"""Kernels for few rows of x: their choice is near the fastest that was measured, and candidates fit
a multiprocessor, divide all of a product, and compile.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from own_process import CANNOT_COMPILE, NEEDS_COMPILER, run_compiling

if CANNOT_COMPILE:  # the module below imports Triton's compiler
    pytest.skip(NEEDS_COMPILER, allow_module_level=True)

from benchmarks import row_plans
from nf4conv.inference.kernels.product import balancing
from nf4conv.inference.kernels.product.shapes import Held

PROCESSORS = 132
MEASURED = json.loads(
    (Path(__file__).parents[2] / "benchmarks/results/row_plans_h200.json").read_text()
)["cases"]


def product_of(case: dict[str, Any]) -> tuple[int, tuple[int, ...], int]:
    """Returns the rows of x, those of the weights, and the columns of a case."""
    rows, heights, k = re.fullmatch(r"(\d+) rows, (.*) x (\d+), .*", case["case"]).groups()
    return int(rows), tuple(map(int, heights.split(" + "))), int(k)


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case["case"])
def test_chooses_what_was_fast(case: dict[str, Any]) -> None:
    """Within 4 % of the fastest, and within 1 % of what was chosen before."""
    rows, heights, k = product_of(case)
    shape, divisions = balancing.plan_rows(rows, heights, k, row_plans.FORM, PROCESSORS, True)
    split_shift = divisions[0].split_shift
    times = {name: found for name, found in case["µs"].items() if name != "nn.Linear"}
    chosen = times[row_plans.Plan(shape, split_shift).name]
    assert chosen <= 1.04 * min(times.values())
    assert chosen <= 1.01 * times["present"]
    for pace in balancing.PACES.get(rows, ()):
        if (pace.shape.span, pace.shape.programs) == (shape.span, shape.programs):
            found = balancing.estimate(pace, heights, k, PROCESSORS, split_shift)
            assert abs(found / chosen - 1) < 0.1


@pytest.mark.parametrize("processors", [20, 78, 132, 148])
def test_a_row_does_not_depend_on_how_many_stand_beside_it(processors: int) -> None:
    for heights, k in (((5120,), 5120), ((4096, 1024, 1024), 4096), ((300,), 192)):
        for first, last in ((3, 4), (5, 8), (9, 16), (17, 32)):
            plans = [
                balancing.plan_rows(m, heights, k, row_plans.FORM, processors, True)
                for m in range(first, last + 1)
            ]
            assert all(one == plans[0] for one in plans)


def test_other_gpus_have_two_programs_on_a_multiprocessor() -> None:
    for m in (1, 2, 4, 8, 16, 32, 64):
        for n, k in ((5120, 5120), (11008, 4096), (6144, 4096)):
            shape, _ = balancing.plan_rows(m, (n,), k, row_plans.FORM, 108, False)
            assert shape.programs == 2


@pytest.mark.parametrize("case", row_plans.CASES, ids=lambda case: case.name)
def test_fits_a_multiprocessor(case: row_plans.Case) -> None:
    """An H200 has 65,536 registers, and 227 KiB for programs, which take 1 KiB more each."""
    for plan in row_plans.plans(case.rows, case.k):
        shape = plan.shape
        assert case.rows <= shape.rows, plan.name
        assert shape.registers * 32 * shape.warps * shape.programs <= 65536, plan.name
        shared = 32768 + shape.shared_bytes
        if isinstance(shape, Held) or shape.wide:
            shared += 1024
        assert shared <= 48 << 10, plan.name  # what Triton declares
        assert (shared + 1024) * shape.programs <= 228 << 10, plan.name


@pytest.mark.parametrize("case", row_plans.CASES, ids=lambda case: case.name)
def test_divides_all_of_a_product(case: row_plans.Case) -> None:
    for plan in row_plans.plans(case.rows, case.k):
        shape, name = plan.shape, plan.name
        divisions = plan.divisions(case.heights, case.k, PROCESSORS)
        assert len({one.split_shift for one in divisions}) == 1, name
        # of several weights each may have one program more than its part of all
        most = shape.programs * PROCESSORS + len(divisions)
        assert sum(one.programs for one in divisions) <= most, name
        for n, one in zip(case.heights, divisions, strict=True):
            if isinstance(shape, Held):
                assert one.programs * one.share + one.longer == -(-n // 8), name
                assert case.k <= shape.columns_most, name
                continue
            assert (one.steps << one.split_shift) * shape.span >= case.k, name
            if shape.wide:
                assert one.programs * one.share >= n, name
            else:
                assert one.share == -(-n // shape.unit_rows) << one.split_shift, name
                assert 1 <= one.programs <= one.share, name


def test_a_dry_run_compiles_them(tmp_path: Path) -> None:
    """In a process of its own: Triton cannot compile where kernels are interpreted."""
    command = ["-m", "benchmarks.row_plans", "--dry-run", "--only", "rows, 5120 x"]
    done = run_compiling(*command, TRITON_CACHE_DIR=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 do not compile" in done.stdout
    assert len(list(tmp_path.rglob("*.cubin"))) >= 6
