"""The search for faster panels, without a GPU: its kernels, its dry run, and what it survives."""

import json
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
from own_process import run_compiling

from benchmarks.panels import checking, costs

ROOT = Path(__file__).parent.parent

CHECKER = """
import json, os, pathlib, sys, time
for number, one in enumerate(json.loads(pathlib.Path(sys.argv[1]).read_text())):
    if one["splits"] == 2:
        os._exit(9)
    if one["splits"] == 3:
        time.sleep(600)
    lost = one["splits"] == 4
    print(json.dumps({"wrong": "a fault" if lost else ""}), flush=True)
    if lost:
        sys.exit(3)
"""


def run(*command: object) -> str:
    """Returns what a program prints; Triton compiles in it."""
    done = run_compiling(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_candidates_multiply() -> None:
    """Their PTX, executed: x as it is and in order, clusters and splits, both dtypes."""
    assert len(run("tests/candidates_emulator.py").splitlines()) == 7


def test_dry_run(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    options = ["--shapes", "4096x4096", "--rows", "128", "--variants", "2", "--processes", "2"]
    command = ["-m", "benchmarks.panel_plans", "--json", file, "--dry-run", "--seconds", "550"]
    told = run(*command, *options)
    found = json.loads(file.read_text())
    assert list(found["checked"].values()) == ["", ""], told  # they compile and spill nothing
    (size,) = found["sizes"]
    assert (size["shape"], size["rows"], size["wrong"]) == ([4096, 4096], 128, {})
    assert {"cuBLAS", "today"} < set(size["µs"])
    assert "1 sizes" in told
    assert size["best"]["name"] in size["µs"]


def test_goes_on_behind_what_ends_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends its process, one that hangs, and one behind which nothing runs any more."""
    monkeypatch.setattr(checking, "LONGEST", 8)  # a busy machine starts Python in less
    plan = costs.present(64, 4096, 4096).plan
    asked = [costs.Candidate("brisk", plan._replace(splits=splits)) for splits in range(1, 8)]
    checker = tmp_path / "checker.py"
    checker.write_text(CHECKER)
    told: list[str] = []
    command = [sys.executable, str(checker)]
    found = checking.check_all(asked, 2, time.time() + 60, tmp_path, told.append, command)
    wrong = [found[one].split(":")[0] for one in asked]
    assert wrong == ["", "ended its process", "took too long", "a fault", "", "", ""]
    assert len(told) == 4


def test_estimates_are_near_what_was_measured() -> None:
    """Of today's choices: within a sixth each."""
    rows = json.loads((ROOT / "benchmarks/results/linear_rows_h200.json").read_text())["rows"]
    panels = [row for row in rows if row["rows"] > 32]
    assert len(panels) == 49
    for row in panels:
        n, k = row["shape"]
        found = costs.estimate(costs.present(row["rows"], n, k), row["rows"], n, k)
        assert abs(found / row["nf4conv"] - 1) < 1 / 6, row


def test_candidates_of_all_ways() -> None:
    for m, n, k in ((33, 4096, 4096), (512, 11008, 4096), (100, 300, 192)):
        found = costs.candidates(m, n, k, 16)
        assert len(set(found)) == len(found)
        assert {one.way for one in found} <= set(get_args(costs.Way)) - {"ordered", "brisk"}
        assert costs.present(m, n, k) not in found
        for one in found:
            assert one.plan.panel.shared_bytes <= costs.MOST_SHARED
            assert one.plan.cluster * one.plan.splits <= -(-k // 128)
