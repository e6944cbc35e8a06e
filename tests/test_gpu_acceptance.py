"""The run that proves everything on a GPU: its processes share tests, and lose none."""

import json
import os
import subprocess
import sys
from pathlib import Path

from claiming import WHOLE

from benchmarks.gpu_acceptance import files_with_tests

ROOT = Path(__file__).parent.parent

TESTS = """
import os
import pathlib
import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("number", range(20))
def test_passes(number):
    pass


def test_fails():
    assert 1 == 2


def test_fails_beside_others(tmp_path):
    once = pathlib.Path(__file__).with_name("once")
    if not once.exists():
        once.touch()
        raise RuntimeError("CUDA error: out of memory")


def test_ends_its_process():
    os._exit(9)


def test_skips():
    pytest.skip("there is no second GPU")
"""


def test_no_test_is_lost(tmp_path: Path) -> None:
    """Though one ends its process, and one leaves a GPU that nothing runs on."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    files = [tmp_path / "test_some.py", tmp_path / "test_broken.py"]
    command = [sys.executable, "-m", "benchmarks.gpu_acceptance", "--out", tmp_path / "out"]
    command += ["--seconds", "200", "--workers", "2", "--only", "tests", "--tests", *files]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 1
    found = json.loads((tmp_path / "out/acceptance.json").read_text())
    outcomes = {name.split("::")[-1]: one["outcome"] for name, one in found["tests"].items()}
    passed = {name for name, outcome in outcomes.items() if outcome == "passed"}
    assert passed == {f"test_passes[{number}]" for number in range(20)}
    others = {name: outcome for name, outcome in outcomes.items() if name not in passed}
    broken = next(name for name in others if "test_broken" in name)
    assert others.pop(broken) == "failed"
    assert others == {
        "test_fails": "failed",
        "test_fails_beside_others": "failed",
        "test_ends_its_process": "ended its process: 9",
        "test_skips": "skipped",
    }
    again = {name.split("::")[-1]: one["outcome"] for name, one in found["again"].items()}
    assert again["test_fails"] == "failed"
    assert again["test_fails_beside_others"] == "passed"


def test_the_files_that_run_whole_are_there() -> None:
    found = {Path(file).stem for file in files_with_tests()}
    assert found >= set(WHOLE)
    assert {"test_linear_gpu", "test_panels_gpu", "test_experts_gpu"} <= found
