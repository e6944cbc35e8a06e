"""Calibration says what it takes before it begins, refuses what has no room, and tells how far it
is.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import CPU, options_for
from click.testing import CliRunner

import nf4conv
from nf4conv.calibrate import calibrating, needs
from nf4conv.calibrate.needs import Needs
from nf4conv.cli import main
from nf4conv.errors import Nf4convError

SMALL = Needs(
    gpu_seconds=170.0,
    gpu_bytes=7 * 10**9,
    cpu_seconds=54_000.0,
    cpu_bytes=9 * 10**9,
    hidden_elements=10**9,
    disk_bytes=4 * 10**9,
)


def test_a_dry_run_says_time_memory_and_disk(model: Path, text: Path):
    asked = ["quantize", str(model), "out", "--calibrate", str(text), "--dry-run"]
    shown = CliRunner().invoke(main, asked)
    assert shown.exit_code == 0
    [line] = [line for line in shown.output.splitlines() if "calibrating takes about" in line]
    assert "on an H200" in line
    described = SMALL.described()
    assert "about 3 min on an H200, with 7.00 GB of its memory" in described
    assert "15 h on this machine's CPU, with 9.00 GB of memory" in described
    assert "4.00 GB of disk; and 4.00 GB of either for hidden states" in described


def test_what_is_needed_grows_with_tokens_outputs_and_what_is_kept(model: Path, text: Path):
    def needed(**changes: Any) -> Needs:
        plan = nf4conv.plan_quantize(model, **options_for(text, **changes)).made
        found: Needs = plan.calibration.needs
        return found

    plain = needed()
    every = needed(calibrate_output="all")
    assert needed(calibrate_output="qkv").disk_bytes < every.disk_bytes
    assert plain.disk_bytes < every.disk_bytes
    calibration = nf4conv.plan_quantize(model, **options_for(text)).made.calibration
    tokens = calibration.tokens + calibration.judging_tokens
    assert plain.hidden_elements == tokens * 64
    assert every.hidden_elements == 4 * tokens * 64
    assert needed(calibration_tokens=512).hidden_elements < plain.hidden_elements


def test_the_time_on_a_cpu_is_told_as_busy_as_it_is(monkeypatch: pytest.MonkeyPatch):
    def seconds() -> float:
        shapes = {"blocks": 2, "block_elements": 10**6, "matrices": [(1024, 1024)]}
        asked = {"finished_bytes": 10**6, "tokens": 65536, "width": 1024, "outputs": None}
        return needs.estimate(**shapes, **asked).cpu_seconds

    monkeypatch.setattr(needs, "_speed", lambda: 10e9)
    idle = seconds()
    monkeypatch.setattr(needs, "_speed", lambda: 1e9)
    assert seconds() == pytest.approx(10 * idle)


def test_hidden_states_get_half_of_the_memory_that_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(needs, "available_memory", lambda: 20 * 10**9)
    monkeypatch.setattr(needs, "resident", lambda: 10**9)
    assert SMALL.memory_left(torch.device("cpu")) == 6 * 10**9


def test_a_host_with_too_little_memory_is_refused(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def never(*_: object) -> None:
        raise AssertionError("a block was calibrated")

    monkeypatch.setattr(calibrating, "calibrate_block", never)
    monkeypatch.setattr(needs, "available_memory", lambda: 10**8)
    monkeypatch.setattr(needs, "resident", lambda: 0)
    with pytest.raises(
        Nf4convError, match=r"about 1\.5\d GB of host memory, and 100\.00 MB are free"
    ):
        nf4conv.quantize(model, tmp_path / "out", **options_for(text), **CPU)
    assert not (tmp_path / "out").exists()


def test_a_gpu_with_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 * 10**9, 8 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10**9)
    gpu = torch.device("cuda", 0)
    with pytest.raises(
        Nf4convError, match=r"7\.00 GB of its memory, and 6\.00 GB are free.*9\.00 GB"
    ):
        SMALL.memory_left(gpu)
    assert replace(SMALL, gpu_bytes=6 * 10**9).memory_left(gpu) > 0


@pytest.mark.parametrize(
    "changes", [{}, {"include": ("*layers.0.*",)}, {"calibrate_output": "qkv"}]
)
def test_all_of_the_work_is_told_also_after_a_kill(
    model: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
):
    options = options_for(text, **changes)
    told: list[int] = []
    planned = nf4conv.plan_quantize(model, **options, **CPU, progress=told.append)
    plan = planned.made
    calibrating_all = plan.calibration.bytes_to_read
    work = calibrating_all + plan.totals().bytes_before - plan.calibration.bytes_spared
    planned.execute(tmp_path / "whole")
    assert sum(told) == pytest.approx(work, rel=0.1)

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(calibrating, "with_calibrated_weights", kill)
        with pytest.raises(KeyboardInterrupt):
            planned.execute(tmp_path / "out")
    told.clear()
    planned.execute(tmp_path / "out")
    assert told[0] == calibrating_all
    assert sum(told) == pytest.approx(work, rel=0.1)
