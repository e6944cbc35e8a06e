"""File systems that are not as usual: no locks, calls that fail; and no more threads."""

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from checkpoints import contents, write_source
from click.testing import CliRunner, Result

import nf4conv
from nf4conv.cli import main
from nf4conv.errors import OutputError

OPTIONS = {"max_shard_size": 60_000}
RUN = {"device": "cpu", "workers": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("here") / "source", layers=2)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    nf4conv.quantize(source, out, **OPTIONS, **RUN)
    return contents(out)


# --- a network file system ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_folder_that_cannot_be_locked_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OutputError, match=rf"cannot be locked \({os.strerror(number)}\)"):
        nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **RUN)
    assert not (tmp_path / "out/config.json").exists()


def test_a_folder_that_is_locked_says_so(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise BlockingIOError(errno.EWOULDBLOCK, "busy")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OutputError, match="another nf4conv is writing here"):
        nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **RUN)


@pytest.mark.parametrize("name", ["replace", "rename", "fsync", "link"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("at", [1, 3])
def test_an_operation_that_fails_ends_the_run_and_the_next_goes_on(
    source: Path,
    tmp_path: Path,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    number: int,
    at: int,
):
    """As on a network file system whose server went away, at the first such call or the third."""
    function = getattr(os, name)
    calls = 0

    def fail(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= at:
            raise OSError(number, os.strerror(number))
        return function(*arguments, **named)

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(os, name, fail)
        try:
            nf4conv.quantize(source, out, **OPTIONS, **RUN)
        except OutputError as error:
            assert "\n" not in str(error)  # noqa: PT017
            assert os.strerror(number) in str(error)  # noqa: PT017
            assert not (out / "config.json").exists()
        else:
            assert calls < at, "what failed was taken for done"
    nf4conv.quantize(source, out, **OPTIONS, **RUN)
    assert contents(out) == whole


# --- threads --------------------------------------------------------------------------------------


def command(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_a_system_that_starts_no_more_threads(
    source: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    words = ("quantize", source, out, "--device", "cpu", "--max-shard-size", "60kB")

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        patched.delenv("NF4CONV_DEBUG", raising=False)
        done = command(*words)
    assert done.exit_code == 2
    assert "Error: the system starts no more threads; try fewer --workers" in done.stderr
    assert not (out / "config.json").exists()
    assert command(*words).exit_code == 0
    assert contents(out) == whole
