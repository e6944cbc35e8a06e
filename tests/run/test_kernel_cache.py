"""Compiled kernels on disk: used only if this user wrote them whole and nobody else could."""

import json
import os
import pwd
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nf4conv.codec.kernels import launch
from nf4conv.run.device.on_driver import kernels
from nf4conv.run.device.on_driver.kernels import Purpose, load_bundles

CONTENT = {"kernels": {}, "tables": {"a": "AAAA"}, "numbers": {"b": 1}}
PURPOSE = Purpose("encoder", ("bfloat16", "nf4", 64, "absmax"))


class Gpu:
    """A device with the properties that kernels are chosen by."""

    ordinal = 0

    def __init__(self) -> None:
        self.is_in_use = False

    def use(self) -> None:
        self.is_in_use = True

    def capability(self) -> tuple[int, int]:
        return 9, 0


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    kernels._keep(tmp_path / "cache/kernels.json", CONTENT)
    return tmp_path / "cache/kernels.json"


def test_what_was_kept_is_read_again_and_is_nobody_else_s(kept: Path):
    assert kernels._read(kept) == CONTENT
    assert kept.stat().st_mode & 0o777 == 0o600


def rewritten(edit: Callable[[Any], Any]) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(edit(json.loads(path.read_text()))))


DOUBTS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "deep": lambda path: path.write_text("[" * 100_000),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "another table": rewritten(lambda kept: kept | {"bundle": CONTENT | {"tables": {"a": "BBBB"}}}),
    "a key missing": rewritten(lambda kept: {"bundle": kept["bundle"]}),
    "writable by the group": lambda path: path.chmod(0o620),
    "writable by all": lambda path: path.chmod(0o602),
    "of another user": lambda path: os.chown(path, 12345, 12345),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_kernels_in_doubt_are_compiled_again(kept: Path, doubt: str):
    if doubt == "of another user" and os.geteuid():
        pytest.skip("only root may give a file away")
    DOUBTS[doubt](kept)
    assert kernels._read(kept) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be compiled")
def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch):
    """A container that runs under a number has no HOME, and no entry in the list of users."""

    def nobody(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert kernels.cache_folder() is None
    assert load_bundles(Gpu(), [PURPOSE]) is None  # type: ignore[arg-type]


def test_kernels_are_loaded_on_the_device_they_are_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpu, loaded = Gpu(), []
    kernels._keep(tmp_path / f"nf4conv/{kernels._key(gpu.capability(), PURPOSE)}.json", CONTENT)
    remember = lambda content: loaded.append((content, gpu.is_in_use))  # noqa: E731
    monkeypatch.setattr(kernels, "load_kernels", remember)
    assert load_bundles(gpu, [PURPOSE]) == {PURPOSE: None}  # type: ignore[arg-type]
    assert loaded == [(CONTENT, True)]


def test_triton_keeps_nothing_at_a_home_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    launch._find_triton_a_folder()
    assert "TRITON_CACHE_DIR" not in os.environ
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launch._find_triton_a_folder()
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    assert folder.parent == tmp_path
    assert folder.is_dir()
