"""The search for faster plans, without a GPU: its dry run, and what it survives."""

import json
import sys
import time
from pathlib import Path

import pytest
from own_process import run_compiling

from benchmarks.panels import candidates, checking

ROOT = Path(__file__).parents[2]

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
    plan = candidates.present(64, 4096, 4096)
    asked = [plan._replace(splits=splits) for splits in range(1, 8)]
    checker = tmp_path / "checker.py"
    checker.write_text(CHECKER)
    told: list[str] = []
    command = [sys.executable, str(checker)]
    found = checking.check_all(asked, 2, time.time() + 60, tmp_path, told.append, command)
    wrong = [found[one].split(":")[0] for one in asked]
    assert wrong == ["", "ended its process", "took too long", "a fault", "", "", ""]
    assert len(told) == 4


def test_candidates() -> None:
    for m, n, k in ((33, 4096, 4096), (512, 11008, 4096), (100, 300, 192)):
        found = candidates.candidates(m, n, k, 16)
        assert len(set(found)) == len(found) <= 16
        assert candidates.present(m, n, k) not in found
        estimates = [candidates.estimated(one, m, n, k) for one in found]
        assert estimates == sorted(estimates)
        assert estimates[0] >= candidates.estimated(candidates.present(m, n, k), m, n, k)
        for one in found:
            assert one.cluster * one.splits <= -(-k // 128)
