"""A short run of the fuzzing target: the same cases each time. `make test-all` tries others.

It runs as a program: its processes are forked from one that no other test has used.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.oracle

PROGRAM = Path(__file__).parent / "helpers/fuzz.py"


def test_mutated_inputs_fail_by_one_line_or_not_at_all():
    words = ["--seed", "20780", "--cases", "180", "--seconds", "40", "--jobs", "2"]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words], capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = re.search(r"([\d,]+) cases of (\d+) kinds .*, exit codes (.*), 0 failures", done.stdout)
    assert found is not None
    assert int(found[2]) >= 30
    assert "× 0" in found[3], "nothing gets past the first checks"
    assert "× 2" in found[3], "nothing is refused"
