"""The run that proves everything on a GPU: its processes share tests, and lose none."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

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


def outcomes(file: Path) -> dict[str, str]:
    """Returns what became of each test."""
    found = {}
    for case in ElementTree.parse(file).iter("testcase"):
        outcome = [part.tag for part in case if part.tag in ("failure", "error", "skipped")]
        found[case.attrib["name"].split("::")[-1]] = outcome[0] if outcome else "passed"
    return found


def test_no_test_is_lost(tmp_path: Path) -> None:
    """Though one ends its process; and what failed beside others runs once more, alone."""
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "benchmarks.gpu_acceptance", "--out", tmp_path / "out"]
    command += ["--seconds", "200", "--workers", "2", "--only", "tests"]
    command += ["--tests", tmp_path / "test_some.py"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 1
    expected = {f"test_passes[{number}]": "passed" for number in range(20)}
    expected |= {"test_fails": "failure", "test_fails_beside_others": "failure"}
    expected |= {"test_ends_its_process": "error", "test_skips": "skipped"}
    assert outcomes(tmp_path / "out/tests.xml") == expected
    again = outcomes(tmp_path / "out/again.xml")
    assert again["test_fails_beside_others"] == "passed"
    assert (again["test_fails"], again["test_ends_its_process"]) == ("failure", "error")
