"""Faults during a run: one clear line, no hang, nothing that looks finished, and the same command
resumes.
"""

import errno
import itertools
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import contents
from test_resume import OPTIONS, RUN

import nf4conv
from nf4conv.errors import Nf4convError, OutputError, SourceError
from nf4conv.sources.reader import Reader

SHARD = r"model-0000\d-of-0000\d.safetensors"
SHARD_OF_TWO = r"model-0000\d-of-00002.safetensors"


def assert_unfinished_and_resumable(source: Path, out: Path, whole: Path) -> None:
    assert not (out / "config.json").exists()
    assert not (out / "model.safetensors.index.json").exists()
    nf4conv.quantize(source, out, **OPTIONS, **RUN)
    nf4conv.quantize(source, whole, **OPTIONS, **RUN)
    assert contents(out) == contents(whole)


def fail_from(name: str, call: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a function of os raise an OSError from its call number `call` on."""
    real = getattr(os, name)
    calls = itertools.count(1)

    def failing(*args: object) -> object:
        if next(calls) >= call:
            raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(os, name, failing)


@pytest.mark.parametrize(
    ("name", "call", "number", "error", "match"),
    [
        *[
            ("pwrite", call, errno.ENOSPC, OutputError, rf"out/{SHARD}: No space left on device")
            for call in (1, 2, 5, 9, 14)
        ],
        ("fsync", 3, errno.EIO, OutputError, "Input/output error"),
        ("preadv", 4, errno.EIO, SourceError, rf"source/{SHARD_OF_TWO}: Input/output error"),
    ],
)
def test_a_system_call_that_fails(source, tmp_path, monkeypatch, name, call, number, error, match):
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        fail_from(name, call, number, patched)
        with pytest.raises(error, match=match):
            nf4conv.quantize(source, out, **OPTIONS, **RUN)
    assert_unfinished_and_resumable(source, out, tmp_path / "whole")


def test_short_reads_and_short_writes_are_continued(source, tmp_path, monkeypatch):
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:1000]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:700], at))
    nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **RUN)
    monkeypatch.undo()
    nf4conv.quantize(source, tmp_path / "whole", **OPTIONS, **RUN)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_source_that_shrinks_while_it_is_read(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shard = source / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    read_into = Reader.read_into

    def shrinking(self: Reader, path: Path, start: int, buffer: memoryview) -> None:
        if path == shard and shard.stat().st_size == len(content):
            os.truncate(shard, 40_000)
        read_into(self, path, start, buffer)

    with monkeypatch.context() as patched:
        patched.setattr(Reader, "read_into", shrinking)
        with pytest.raises(
            SourceError,
            match=r"model-00002-of-00002.safetensors: ends at byte [\d,]+; it was cut off",
        ):
            nf4conv.quantize(source, out, **OPTIONS, **RUN)
    assert not (out / "config.json").exists()
    shard.write_bytes(content)
    with pytest.raises(OutputError, match="differs in source files"):
        nf4conv.quantize(source, out, **OPTIONS, **RUN)


def test_a_source_that_is_rewritten_while_it_is_read(source, tmp_path, monkeypatch):
    """The bytes that were read are partly old and partly new. Neither the run nor a resumed one may
    make a checkpoint of them.
    """
    out = tmp_path / "out"
    shard = source / "model-00001-of-00002.safetensors"
    status = shard.stat()
    pwrite = os.pwrite

    def rewriting(descriptor: int, data: memoryview, position: int) -> int:
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        return pwrite(descriptor, data, position)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", rewriting)
        with pytest.raises(
            SourceError,
            match=r"00001-of-00002.safetensors: changed while it was read; start anew with",
        ):
            nf4conv.quantize(source, out, **OPTIONS, **RUN)
    assert not (out / "config.json").exists()
    with pytest.raises(OutputError, match="differs in source files"):
        nf4conv.quantize(source, out, **OPTIONS, **RUN)
    nf4conv.quantize(source, out, **OPTIONS, **RUN, overwrite=True)
    nf4conv.quantize(source, tmp_path / "whole", **OPTIONS, **RUN)
    assert contents(out) == contents(tmp_path / "whole")


def test_too_little_room_is_seen_before_the_first_byte(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    needed = nf4conv.plan_quantize(source, **OPTIONS).made.output.largest_size
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(
        OutputError, match=r"out: the result takes [\d,]+ bytes but the disk has only [\d,]+ free"
    ):
        nf4conv.quantize(source, out, **OPTIONS, **RUN)
    assert not any(out.rglob("*.partial"))
    assert not any(out.rglob("*.safetensors"))


def test_an_unexpected_error_in_a_worker_reaches_the_caller(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    calls = 0
    quantize_blocks = (
        sys.modules["nf4conv.codec.backends"].backend(torch.device("cpu")).quantize_blocks
    )

    def failing(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls >= 3:
            raise RuntimeError("a fault of the codec")
        quantize_blocks(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(
            sys.modules["nf4conv.codec.backends"].backend(torch.device("cpu")),
            "quantize_blocks",
            failing,
        )
        with pytest.raises(RuntimeError, match="a fault of the codec"):
            nf4conv.quantize(source, out, **OPTIONS, **RUN)
    assert_unfinished_and_resumable(source, out, tmp_path / "whole")


def test_memory_that_runs_out_is_one_clear_line(source, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def failing(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    module = sys.modules["nf4conv.codec.backends"].backend(torch.device("cpu"))
    with monkeypatch.context() as patched:
        patched.setattr(module, "quantize_blocks", failing)
        with pytest.raises(Nf4convError, match="cpu: out of memory; try fewer --workers"):
            nf4conv.quantize(source, out, **OPTIONS, **RUN)
    assert_unfinished_and_resumable(source, out, tmp_path / "whole")


def test_the_source_is_never_written_to(source, tmp_path):
    before = contents(source)
    for path in source.iterdir():
        path.chmod(0o444)
    nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **RUN)
    assert contents(source) == before
