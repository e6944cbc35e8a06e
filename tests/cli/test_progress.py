"""A bar says what is done last, and shows at once what is kept of an earlier run."""

import io
import os
import sys
from pathlib import Path

import pytest
from checkpoints import contents, write_source

import nf4conv
from nf4conv.errors import OutputError
from nf4conv.report.text.progress_bar import ProgressBar, Step
from nf4conv.sources.unfinished import finished_shards

OPTIONS = {"max_shard_size": 60_000}
RUN = {"device": "cpu", "workers": 2}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Stands for stderr; to be called in the test, because pytest sets its own before it."""
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    return shown


def test_the_last_words_stay(monkeypatch: pytest.MonkeyPatch):
    terminal = on_a_terminal(monkeypatch)
    with ProgressBar(hidden=False) as advance:
        advance.begin([Step("quantizing", 1000, "uploading to me/x")])
        advance(1000)
    states = [state for state in terminal.getvalue().split("\r") if "%|" in state]
    assert states[-1].startswith("uploading to me/x: 100%|")
    assert not [state for state in states if state.startswith("quantizing: 100%|")][1:]


def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A source, and an output that a run left behind with a finished shard."""
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    pwrite = os.pwrite

    def failing(descriptor: int, data: memoryview, position: int) -> int:
        if any(out.glob("*.safetensors")):
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, position)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", failing)
        with pytest.raises(OutputError):
            nf4conv.quantize(source, out, **OPTIONS, **RUN)
    return source, out


def test_what_is_kept_counts_as_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, out = interrupted(tmp_path, monkeypatch)
    assert finished_shards(out)
    told: list[int] = []
    plan = nf4conv.plan_quantize(source, **OPTIONS, **RUN, progress=told.append)
    plan.execute(out)
    assert sum(told) == plan.totals.bytes_before
    nf4conv.quantize(source, tmp_path / "once", **OPTIONS, **RUN)
    assert contents(out) == contents(tmp_path / "once")
