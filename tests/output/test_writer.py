"""A shard gets its final name when it is complete, checked and synced, and not before."""

import os
import random
import threading
from pathlib import Path

import pytest
from safetensors import safe_open

from nf4conv.errors import OutputError, SourceError
from nf4conv.output.writer import ShardWriter, write_file
from nf4conv.sources.header import build_header

ENTRIES = [("a", "F32", (2,), 0, 8), ("b", "U8", (3,), 8, 11)]


def writer(folder: Path, header_size: int = 256, data_size: int = 8) -> ShardWriter:
    return ShardWriter(folder / "x.partial", folder / "x.safetensors", header_size, data_size)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_literal_bytes(tmp_path):
    shard = writer(tmp_path, header_size=160)
    shard.write(4, memoryview(b"5678"))
    shard.write(0, memoryview(b"1234"))
    assert shard.finish(ENTRIES, b"abc") == 171
    text = (
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}}'
    )
    header = (152).to_bytes(8, "little") + text + b" " * (152 - len(text))
    assert (tmp_path / "x.safetensors").read_bytes() == header + b"12345678abc"
    assert names(tmp_path) == ["x.safetensors"]


def test_the_name_comes_last(tmp_path):
    shard = writer(tmp_path)
    shard.write(0, memoryview(b"12345678"))
    assert names(tmp_path) == ["x.partial"]
    shard.close()
    shard.close()
    assert names(tmp_path) == ["x.partial"]


def test_what_an_earlier_try_wrote_is_forgotten(tmp_path):
    """A tensor that the plan leaves unwritten shows as zeros, never as an earlier run's bytes."""
    (tmp_path / "x.partial").write_bytes(b"\xff" * 10_000)
    shard = writer(tmp_path)
    shard.finish(ENTRIES, b"abc")
    assert (tmp_path / "x.safetensors").read_bytes()[256:] == bytes(8) + b"abc"


def test_many_threads_write_at_once(tmp_path):
    count, size = 400, 1000
    order = list(range(count))
    random.Random(0).shuffle(order)
    shard = writer(tmp_path, data_size=count * size)

    def write(places: list[int]) -> None:
        for place in places:
            shard.write(place * size, memoryview(place.to_bytes(2, "big") * (size // 2)))

    threads = [threading.Thread(target=write, args=(order[number::8],)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shard.finish([("w", "U8", (count * size,), 0, count * size)], b"")
    with safe_open(tmp_path / "x.safetensors", "numpy") as opened:
        stored = opened.get_tensor("w").tobytes()
    assert stored == b"".join(place.to_bytes(2, "big") * (size // 2) for place in range(count))


@pytest.mark.parametrize(
    "entries",
    [ENTRIES[:1], [ENTRIES[0], ("b", "U8", (2,), 9, 11)], [*ENTRIES, ("c", "U8", (1,), 11, 12)]],
    ids=["too little", "a hole", "too much"],
)
def test_a_file_that_is_not_what_its_header_says_gets_no_name(tmp_path, entries):
    shard = writer(tmp_path)
    with pytest.raises(SourceError, match=r"x.partial: "):
        shard.finish(entries, b"abc")
    assert names(tmp_path) == ["x.partial"]


def test_a_disk_that_reads_back_something_else_gets_no_name(tmp_path, monkeypatch):
    shard = writer(tmp_path)
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        fsync(descriptor)
        swapped = build_header([("a", "F32", (2,), 0, 8), ("c", "U8", (3,), 8, 11)], reserve=256)
        os.pwrite(descriptor, swapped, 0)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(
        OutputError, match=r"x.safetensors: the header read back is not the one written"
    ):
        shard.finish(ENTRIES, b"abc")
    assert names(tmp_path) == ["x.partial"]


def test_errors_name_the_file(tmp_path):
    with pytest.raises(OutputError, match=r"missing/x.partial: No such file or directory"):
        writer(tmp_path / "missing")
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(OutputError, match=r"x.safetensors: Is a directory"):
        writer(tmp_path).finish(ENTRIES, b"abc")


def test_a_small_file_is_there_whole_or_not_at_all(tmp_path):
    file = tmp_path / "config.json"
    write_file(file, [b"one", b"two"])
    assert file.read_bytes() == b"onetwo"

    def breaking():
        yield b"th"
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match=r"config.json: No space left on device"):
        write_file(file, breaking())
    assert file.read_bytes() == b"onetwo"
