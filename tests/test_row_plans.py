"""Candidates for few rows of x: they fit a multiprocessor, divide all of a product, and compile."""

from pathlib import Path

import pytest
from own_process import CANNOT_COMPILE, NEEDS_COMPILER, run_compiling

if CANNOT_COMPILE:  # the module below imports Triton's compiler
    pytest.skip(NEEDS_COMPILER, allow_module_level=True)

from benchmarks import row_plans
from nf4conv.codec.kernels.product.shapes import Held

PROCESSORS = 132


def plans_of(case: row_plans.Case) -> dict[str, row_plans.Plan]:
    return dict(row_plans.plans(case.rows, case.heights, case.k))


@pytest.mark.parametrize("case", row_plans.CASES, ids=lambda case: case.name)
def test_fits_a_multiprocessor(case: row_plans.Case) -> None:
    """Of an H200, which has 65,536 registers and 227 KiB for 1 KiB and more of each program."""
    for name, plan in plans_of(case).items():
        shape = plan.shape
        assert case.rows <= shape.rows, name
        assert shape.registers * 32 * shape.warps * plan.per_processor <= 65536, name
        shared = 32768 + shape.shared_bytes
        if isinstance(shape, Held) or shape.wide:
            shared += 1024
        assert shared <= 48 << 10, name  # what Triton declares
        assert (shared + 1024) * plan.per_processor <= 228 << 10, name


@pytest.mark.parametrize("case", row_plans.CASES, ids=lambda case: case.name)
def test_divides_all_of_a_product(case: row_plans.Case) -> None:
    for name, plan in plans_of(case).items():
        divisions = plan.divisions(case.heights, case.k, PROCESSORS)
        assert len({one.split_shift for one in divisions}) == 1, name
        # of several weights each may have one program more than its part of all
        most = plan.per_processor * PROCESSORS + len(divisions)
        assert sum(one.programs for one in divisions) <= most, name
        for n, one in zip(case.heights, divisions, strict=True):
            if isinstance(plan.shape, Held):
                assert one.programs * one.share + one.longer == -(-n // 8), name
                assert case.k <= plan.shape.columns_most, name
                continue
            assert (one.steps << one.split_shift) * plan.shape.span >= case.k, name
            if plan.shape.wide:
                assert one.programs * one.share >= n, name
            else:
                assert one.share == -(-n // plan.shape.unit_rows) << one.split_shift, name
                assert 1 <= one.programs <= one.share, name


def test_a_dry_run_compiles_them(tmp_path: Path) -> None:
    """In a process of its own: Triton cannot compile where kernels are interpreted."""
    command = ["-m", "benchmarks.row_plans", "--dry-run", "--only", "1 rows, 5120 x"]
    done = run_compiling(*command, TRITON_CACHE_DIR=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 do not compile" in done.stdout
    assert len(list(tmp_path.rglob("*.cubin"))) >= 6
