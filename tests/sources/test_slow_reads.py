"""Files that are not in the page cache: read by many threads, with the same bytes and the same
errors.
"""

import os
import random
import threading
import time
from pathlib import Path

import pytest
from checkpoints import contents, write_source
from test_resume import OPTIONS, RUN

import nf4conv
from nf4conv.errors import SourceError
from nf4conv.sources.reader import Reader, reading_speed

BLOCK = 2**20
LATENCY = 0.05


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read takes as long as over a network."""
    preadv = os.preadv

    def delayed(descriptor: int, views: list[memoryview], position: int) -> int:
        time.sleep(LATENCY)
        return preadv(descriptor, views, position)

    monkeypatch.setattr(os, "preadv", delayed)


def write(path: Path, blocks: int) -> bytes:
    content = random.Random(1).randbytes(blocks * BLOCK + 12_345)
    path.write_bytes(content)
    return content


@pytest.mark.usefixtures("slow")
def test_many_reads_are_in_flight_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No read ends before 32 are in flight."""
    content, preadv = write(tmp_path / "file", 64), os.preadv
    buffer = memoryview(bytearray(len(content)))
    changed = threading.Condition()
    in_flight = most = 0

    def waiting(descriptor: int, views: list[memoryview], position: int) -> int:
        nonlocal in_flight, most
        with changed:
            in_flight += 1
            most = max(most, in_flight)
            changed.notify_all()
            assert changed.wait_for(lambda: most >= 32, timeout=60)
        count = preadv(descriptor, views, position)
        with changed:
            in_flight -= 1
        return count

    with Reader() as reader:
        reader.read_into(tmp_path / "file", 0, buffer[:BLOCK])
        monkeypatch.setattr(os, "preadv", waiting)
        reader.read_into(tmp_path / "file", 7, buffer[7:])
    assert buffer == content
    assert most == 32


@pytest.mark.usefixtures("slow")
def test_the_speed_of_a_disk_is_measured_in_about_a_second(tmp_path: Path):
    files = [tmp_path / name for name in "ab"]
    for file in files:
        write(file, 160)
    speed = reading_speed(files)
    assert speed is not None
    assert speed < 16 * BLOCK / LATENCY  # a probe has 16 blocks
    assert reading_speed([*files, tmp_path / "on the Hub"]) is None


def test_what_is_slow_stays_so_while_many_reads_make_it_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Over a network, a long read takes as many round trips as several short ones."""
    content, preadv, longest = write(tmp_path / "file", 64), os.preadv, 0

    def delayed(descriptor: int, views: list[memoryview], position: int) -> int:
        nonlocal longest
        longest = max(longest, len(views[0]))
        time.sleep(0.004 * len(views[0]) / BLOCK)
        return preadv(descriptor, views, position)

    monkeypatch.setattr(os, "preadv", delayed)
    buffer = memoryview(bytearray(len(content)))
    with Reader() as reader:
        for _ in range(3):
            reader.read_into(tmp_path / "file", 0, buffer)
            assert buffer == content
    assert longest == BLOCK


@pytest.mark.usefixtures("slow")
def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content, preadv = write(tmp_path / "file", 3), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:300_000]], at))
    buffer = memoryview(bytearray(len(content)))
    with Reader() as reader:
        for start in (0, 100):
            reader.read_into(tmp_path / "file", start, buffer[start:])
            assert buffer == content


@pytest.mark.usefixtures("slow")
def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content, preadv = write(tmp_path / "file", 4), os.preadv

    def failing(descriptor: int, views: list[memoryview], position: int) -> int:
        if position >= 2 * BLOCK:
            raise OSError(5, "Input/output error")
        return preadv(descriptor, views, position)

    monkeypatch.setattr(os, "preadv", failing)
    with Reader() as reader:
        reader.read_into(tmp_path / "file", 0, memoryview(bytearray(BLOCK)))
        with pytest.raises(SourceError, match="file: Input/output error"):
            reader.read_into(tmp_path / "file", 0, memoryview(bytearray(len(content))))


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("left", [0, 4096, 2 * BLOCK, 2 * BLOCK + 4099])
def test_a_file_that_shrinks_once_it_is_open(tmp_path: Path, left: int):
    content = write(tmp_path / "file", 3)
    with Reader() as reader:
        reader.read_into(tmp_path / "file", 0, memoryview(bytearray(BLOCK)))
        os.truncate(tmp_path / "file", left)
        with pytest.raises(
            SourceError, match=r"file: ends at byte [\d,]+; it was cut off while being read"
        ):
            reader.read_into(tmp_path / "file", 0, memoryview(bytearray(len(content))))


def test_a_slow_checkpoint_becomes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, preadv = write_source(tmp_path / "source"), os.preadv
    nf4conv.quantize(source, tmp_path / "fast", **OPTIONS, **RUN)
    monkeypatch.setattr("nf4conv.sources.reader._BLOCK", 4096)
    monkeypatch.setattr(os, "preadv", lambda *read: (time.sleep(0.002), preadv(*read))[1])
    nf4conv.quantize(source, tmp_path / "slow", **OPTIONS, **RUN)
    assert contents(tmp_path / "slow") == contents(tmp_path / "fast")


@pytest.mark.parametrize("pages", [1, 2**30], ids=["small memory", "large memory"])
@pytest.mark.parametrize(
    "error", [None, OSError(5, "Input/output error"), AttributeError("macOS")], ids=repr
)
def test_a_result_that_memory_has_no_room_for_does_not_stay_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int, error: Exception | None
):
    source, sysconf = write_source(tmp_path / "source"), os.sysconf
    let_go: list[tuple[Path, int, int, int]] = []

    def advise(descriptor: int, start: int, size: int, what: int) -> None:
        let_go.append((Path(f"/proc/self/fd/{descriptor}").readlink(), start, size, what))
        if error is not None:
            raise error

    with monkeypatch.context() as patched:
        patched.setattr(
            os, "sysconf", lambda name: pages if name == "SC_PHYS_PAGES" else sysconf(name)
        )
        patched.setattr(os, "posix_fadvise", advise)
        nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **RUN)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert sorted(let_go) == (
        [(shard, 0, 0, os.POSIX_FADV_DONTNEED) for shard in shards] if pages == 1 else []
    )
    nf4conv.quantize(source, tmp_path / "whole", **OPTIONS, **RUN)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
