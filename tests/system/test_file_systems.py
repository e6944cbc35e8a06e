"""File systems and users that are not as usual: no locks, renames that fail, no rights, no more
threads, and names that no system has.
"""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
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


# --- a user without rights ------------------------------------------------------------------------


@pytest.fixture
def common() -> Iterator[Path]:
    """A folder that a user without rights may enter and write to."""
    folder = Path(tempfile.mkdtemp(prefix="nf4conv-nobody-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def as_nobody(*words: object) -> subprocess.CompletedProcess[str]:
    """Runs a command as a user who owns nothing; as this one, if this one is not root."""
    more: dict[str, Any] = {}
    if os.geteuid() == 0:
        more = {"user": 65534, "group": 65534, "extra_groups": []}
    home = Path(tempfile.gettempdir(), "no such home")
    environment = os.environ | {"HOME": str(home), "XDG_CACHE_HOME": str(home)}
    packages = Path(torch.__file__).parents[1]
    environment |= {"PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{packages}"}
    command = ["-m", "nf4conv", *map(str, words), "--device", "cpu"]
    # that of root may be in root's home, which nobody else may enter
    system = f"/usr/bin/python3.{sys.version_info.minor}"
    for python in (sys.executable, system):
        with suppress(PermissionError, FileNotFoundError):
            return subprocess.run(
                [python, *command],
                capture_output=True,
                text=True,
                check=False,
                env=environment,
                **more,
            )
    pytest.skip("nobody but root may enter the folder of this Python, and the system has none")


def test_a_user_who_is_not_root(source: Path, common: Path, whole: dict[str, bytes]):
    readable = Path(shutil.copytree(source, common / "source"))
    for path in readable.iterdir():
        path.chmod(0o644)
    done = as_nobody("quantize", readable, common / "out", "--max-shard-size", "60kB")
    assert done.returncode == 0, done.stderr
    found = contents(common / "out")
    assert found.keys() == whole.keys()
    weights = [name for name in found if name.endswith(".safetensors")]
    assert all(found[name] == whole[name] for name in weights)
    secret = readable / "model-00001-of-00002.safetensors"
    secret.chmod(0)
    closed = common / "closed"
    closed.mkdir(mode=0o555)
    for words in ((readable, common / "new"), (common / "out", closed / "new")):
        done = as_nobody("quantize", *words)
        assert done.returncode == 2
        errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
        assert len(errors) == 1, done.stderr
        assert "Permission denied" in errors[0]
        assert "Traceback" not in done.stderr


# --- threads and names ----------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "a\0b"),
        ("quantize", "a\0b", "OUT"),
        ("quantize", "SRC", "o\0ut"),
        ("quantize", "SRC", "OUT", "--lora", "a\0b"),
        ("quantize", "SRC", "OUT", "--calibrate", "a\0b.npy"),
        ("quantize", "SRC", "OUT", "--subfolder", "a\0b"),
        ("quantize", "SRC", "OUT", "--cache-dir", "a\0b"),
        ("dequantize", "a\0b", "OUT"),
        ("verify", "SRC", "--source", "a\0b"),
        ("verify", "SRC", "--report", "a\0b"),
        ("evaluate", "SRC", "--source", "SRC", "--text", "a\0b.npy"),
    ],
    ids=repr,
)
def test_zero_characters_in_names(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
):
    """No argument of a program can hold one, but those of the Python API can."""
    monkeypatch.delenv("NF4CONV_DEBUG", raising=False)
    names = {"SRC": str(source), "OUT": str(tmp_path / "out")}
    done = command(*(names.get(word, word) for word in words))
    assert "bug" not in done.stderr, done.stderr
    if done.exit_code:
        assert done.exit_code in (1, 2)
        assert not (tmp_path / "out/config.json").exists()
