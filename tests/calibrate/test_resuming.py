"""A calibration that was killed goes on, in another budget of memory too, and believes nothing
that is not what was written.
"""

import errno
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import (
    CPU,
    Killed,
    assert_same_weights,
    kill,
    make_text,
    options_for,
    record_of,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import nf4conv
from nf4conv.calibrate import calibrating, gradients, hidden, session
from nf4conv.calibrate.kept import KeptFiles
from nf4conv.errors import Nf4convError, OutputError


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how many bytes of memory hidden states may take."""

    def allow(nbytes: int) -> None:
        monkeypatch.setattr(session, "available_memory", lambda: 4 * nbytes)

    return allow


def stop_before(name: str, patched: pytest.MonkeyPatch) -> None:
    """Kills the run before a file is kept; an empty name, when all blocks are finished."""
    if not name:
        patched.setattr(calibrating, "with_calibrated_weights", kill)
        return
    original = KeptFiles.write

    def write(self: KeptFiles, wanted: str, *rest: Any) -> None:
        if wanted == name:
            raise Killed
        original(self, wanted, *rest)

    patched.setattr(KeptFiles, "write", write)


def killed(model: Path, out: Path, options: dict[str, Any], name: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        stop_before(name, patched)
        with pytest.raises(Killed):
            nf4conv.quantize(model, out, **options, **CPU)
    assert not (out / "config.json").exists()


@pytest.mark.parametrize("name", ["block-00000", "block-00001", ""])
def test_a_run_that_was_killed_ends_in_the_same_bytes(model, text, made, tmp_path, name):
    out = tmp_path / "out"
    killed(model, out, options_for(text), name)
    moved = shutil.copyfile(text, tmp_path / text.name)  # the text is known by its digest
    nf4conv.quantize(model, out, **options_for(moved), **CPU)
    assert_same_weights(made, out)
    assert record_of(out)["calibrated"] == record_of(made)["calibrated"]
    assert not (out / ".nf4conv").exists()


@pytest.mark.parametrize("name", ["outputs-00000", "block-00001"])
def test_a_backward_pass_that_was_killed_ends_in_the_same_bytes(
    model, text, with_outputs, tmp_path, name, monkeypatch
):
    out = tmp_path / "out"
    options = options_for(text, calibrate_output="qkv")
    killed(model, out, options, name)
    if name.startswith("block"):  # the pass is finished
        monkeypatch.setattr(gradients, "_run_forward", kill)
    nf4conv.quantize(model, out, **options, **CPU)
    assert_same_weights(with_outputs, out)


def test_an_interrupted_run_is_not_continued_with_another_text(model, text, tmp_path):
    killed(model, tmp_path / "out", options_for(text), "")
    other = make_text(tmp_path / "ids.npy", seed=1)
    with pytest.raises(OutputError, match="differs in"):
        nf4conv.quantize(model, tmp_path / "out", **options_for(other), **CPU)


@pytest.mark.parametrize("nbytes", [0, 40_000, 10**9])
def test_the_budget_of_memory_changes_no_byte(model, text, with_outputs, tmp_path, budget, nbytes):
    """None of the hidden states, some, or all are in memory; a run goes on with another budget."""
    options = options_for(text, calibrate_output="qkv")
    budget(nbytes)
    nf4conv.quantize(model, tmp_path / "whole", **options, **CPU)
    assert_same_weights(with_outputs, tmp_path / "whole")
    killed(model, tmp_path / "out", options, "block-00001")
    budget(10**9 - nbytes)
    nf4conv.quantize(model, tmp_path / "out", **options, **CPU)
    assert_same_weights(with_outputs, tmp_path / "out")


def test_a_disk_that_fills_is_one_line(model, text, tmp_path, budget, monkeypatch):
    """Hidden states are written, not mapped, so that no signal ends the process."""
    real = tempfile.TemporaryFile

    class Full:
        def __init__(self, **options: Any) -> None:
            self._file = real(**options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def write(self, _: memoryview) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hidden.tempfile, "TemporaryFile", Full)
    budget(0)
    with pytest.raises(OutputError, match=r"calibrated: No space left on device$"):
        nf4conv.quantize(model, tmp_path / "out", **options_for(text), **CPU)


def test_memory_that_does_not_suffice_is_one_line(model, text, made, tmp_path, monkeypatch):
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patched:
        patched.setattr(calibrating, "calibrate_block", fails)
        with pytest.raises(Nf4convError, match="the same command goes on") as error:
            nf4conv.quantize(model, tmp_path / "out", **options_for(text), **CPU)
    assert "\n" not in str(error.value)
    # the advice works
    nf4conv.quantize(model, tmp_path / "out", **options_for(text), **CPU)
    assert_same_weights(made, tmp_path / "out")
    fewer = options_for(text, calibration_tokens=512)
    killed(model, tmp_path / "other", options_for(text), "block-00001")
    with pytest.raises(OutputError, match="overwrite"):
        nf4conv.quantize(model, tmp_path / "other", **fewer, **CPU)
    nf4conv.quantize(model, tmp_path / "other", **fewer, **CPU, overwrite=True)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def other_gain(path: Path) -> None:
    """Facts that are none of the file's."""
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    record = json.loads(metadata["record"])
    record["facts"]["gains"] = dict.fromkeys(record["facts"]["gains"], 0.5)
    save_file(load_file(path), path, {**metadata, "record": json.dumps(record)})


def no_metadata(path: Path) -> None:
    save_file(load_file(path), path)


SPOILT: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a bit of a block": ("block-00000", flipped),
    "other gains": ("block-00000", other_gain),
    "no metadata": ("block-00000", no_metadata),
    "a bit of outputs": ("outputs-00001", flipped),
    "cut outputs": ("outputs-00001", cut),
}


@pytest.fixture(scope="module")
def interrupted(
    model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Path], None]:
    """Makes a copy of a run of which one block of two is finished."""
    whole = tmp_path_factory.mktemp("interrupted") / "out"
    killed(model, whole, options_for(text, calibrate_output="qkv"), "block-00001")

    def copy(out: Path) -> None:
        shutil.copytree(whole, out)

    return copy


@pytest.mark.parametrize("kind", SPOILT)
def test_what_is_not_what_was_written_is_made_again(
    model, text, with_outputs, interrupted, tmp_path, caplog, kind
):
    out = tmp_path / "out"
    interrupted(out)
    name, spoil = SPOILT[kind]
    file = out / f".nf4conv/calibrated/{name}.safetensors"
    spoil(file)
    options = options_for(text, calibrate_output="qkv")
    with caplog.at_level(logging.WARNING, "nf4conv"):
        nf4conv.quantize(model, out, **options, **CPU)
    assert_same_weights(with_outputs, out)
    assert record_of(out)["calibrated"] == record_of(with_outputs)["calibrated"]
    notes = [record.message for record in caplog.records if "made again" in record.message]
    assert len(notes) == 1
    assert notes[0].startswith(str(file))


@pytest.mark.parametrize("changes", [{}, {"calibrate_output": "qkv"}])
def test_all_of_the_work_is_told_also_after_a_kill(model, text, tmp_path, monkeypatch, changes):
    told: list[int] = []
    planned = nf4conv.plan_quantize(
        model, **options_for(text, **changes), **CPU, progress=told.append
    )
    plan = planned.made
    work = plan.calibration.bytes_to_read + plan.totals.bytes_before
    work -= plan.calibration.bytes_spared
    with monkeypatch.context() as patched:
        patched.setattr(calibrating, "with_calibrated_weights", kill)
        with pytest.raises(Killed):
            planned.execute(tmp_path / "out")
    told.clear()
    planned.execute(tmp_path / "out")
    assert told[0] == plan.calibration.bytes_to_read
    assert sum(told) == pytest.approx(work, rel=0.1)
