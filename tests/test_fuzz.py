"""A short run of the fuzzing target (`make fuzz`), from another seed each day, which is printed."""

import time

import pytest
from fuzz import KINDS, fuzz


def test_mutated_checkpoints_fail_by_one_line_or_not_at_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NF4CONV_DEBUG", "1")
    seed = int(time.time()) // 86400 * 1000
    print(f"seed {seed}")
    kinds, exits, faults = fuzz(seed, cases=5 * len(KINDS), seconds=60, jobs=2)
    assert len(kinds) >= 12
    assert not faults, "\n\n".join(faults)
    assert exits[0], "nothing gets past the first checks"
    assert exits[2], "nothing is refused"
