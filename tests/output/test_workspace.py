"""The output folder during a run: whose it is, what of it is kept, and what is left when the run is
over.
"""

import multiprocessing
import os
import re
from pathlib import Path

import pytest
from checkpoints import contents

from nf4conv.errors import OutputError, SourceError
from nf4conv.output.workspace import Workspace
from nf4conv.sources.header import read_header
from nf4conv.sources.reader import read_chunks
from nf4conv.sources.unfinished import WORK_FOLDER

RUN = {
    "version": "1",
    "torch": "2",
    "source files": {"a": [1, 2]},
    "--blocksize": 64,
    "--include": ("a", "b"),
}
OCCUPIED = "exists and is not empty; choose another folder, or --overwrite"


def workspace(out: Path, run: dict[str, object] = RUN, *, overwrite: bool = False) -> Workspace:
    return Workspace(out, run, overwrite=overwrite)


def write_shard(space: Workspace, name: str, value: int = 7) -> None:
    writer = space.open_shard(name, 128, 4)
    writer.write(0, memoryview(bytes([value] * 4)))
    size = writer.finish([("w", "U8", (4,), 0, 4)], b"")
    space.record(name, size, writer.digest)


def interrupted(out: Path, *names: str) -> None:
    with workspace(out) as space:
        for name in names:
            write_shard(space, name)


def test_a_run_from_beginning_to_end(tmp_path):
    out = tmp_path / "not" / "yet" / "there"
    with workspace(out) as space:
        assert not space.finished
        write_shard(space, "model.safetensors")
        space.write("code/own.py", [b"1"])
        record = ".nf4conv/shards/model.safetensors.json"
        assert {*contents(out)} == {
            ".nf4conv/lock",
            ".nf4conv/run.json",
            record,
            "code/own.py",
            "model.safetensors",
        }
        space.complete({"config.json": b"{}"})
    assert contents(out) == {
        "model.safetensors": (out / "model.safetensors").read_bytes(),
        "code/own.py": b"1",
        "config.json": b"{}",
    }
    assert not (out / WORK_FOLDER).exists()
    [tensor] = read_header(out / "model.safetensors")
    assert (tensor.name, tensor.shape) == ("w", (4,))


def test_what_is_finished_is_found_again(tmp_path):
    interrupted(tmp_path / "out", "a.safetensors", "b.safetensors")
    (tmp_path / "out" / WORK_FOLDER / "c.safetensors.partial").write_bytes(b"half")
    with workspace(tmp_path / "out") as space:
        assert set(space.finished) == {"a.safetensors", "b.safetensors"}
        space.complete({})
    assert set(contents(tmp_path / "out")) == {"a.safetensors", "b.safetensors"}


@pytest.mark.parametrize("harm", ["missing", "longer", "shorter", "header", "space", "data"])
def test_what_is_not_as_it_was_left_is_made_again(tmp_path, harm):
    """A bit that has flipped is seen although size and time of change are as they were."""
    interrupted(tmp_path / "out", "a.safetensors", "b.safetensors")
    shard = tmp_path / "out/a.safetensors"
    raw, status = bytearray(shard.read_bytes()), shard.stat()
    if harm == "longer":
        raw += b"!"
    elif harm == "shorter":
        del raw[-1]
    elif harm != "missing":
        raw[{"header": 0, "space": 100, "data": -1}[harm]] ^= 16
    shard.write_bytes(raw)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    if harm == "missing":
        shard.unlink()
    with workspace(tmp_path / "out") as space:
        assert set(space.finished) == {"b.safetensors"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "2"}, 'version (version was "1", is "2")'),
        ({"torch": "3"}, 'torch (torch was "2", is "3")'),
        (
            {"source files": {"a": [1, 3]}},
            'source files (source files was {"a": [1, 2]}, is {"a": [1, 3]})',
        ),
        ({"--include": ("b", "a")}, '--include (--include was ["a", "b"], is ["b", "a"])'),
        ({"--blocksize": 128, "torch": "3"}, 'torch, --blocksize (torch was "2", is "3")'),
        ({"--new": True}, "--new (--new was not given, is true)"),
    ],
    ids=["version", "torch", "source", "option", "two", "unknown before"],
)
def test_another_job_is_refused_and_told_why(tmp_path, change, message):
    interrupted(tmp_path / "out", "a.safetensors")
    before = contents(tmp_path / "out")
    with pytest.raises(OutputError) as caught:
        workspace(tmp_path / "out", RUN | change)
    assert str(caught.value) == (
        f"{tmp_path / 'out'}: holds an unfinished run that differs in {message}; "
        "repeat that command to resume it, or --overwrite to start anew"
    )
    assert contents(tmp_path / "out") == before
    with workspace(tmp_path / "out", RUN | change, overwrite=True) as space:
        assert not space.finished
        assert set(contents(tmp_path / "out")) == {".nf4conv/lock", ".nf4conv/run.json"}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b"null", b'{"fingerprint": 1}', b"\xff", b"[" * 100_000],
    ids=lambda content: repr(content[:40]),
)  # fmt: skip
def test_a_damaged_record_is_one_clear_line(tmp_path, content):
    interrupted(tmp_path / "out", "a.safetensors")
    record = tmp_path / "out" / WORK_FOLDER / "run.json"
    record.write_bytes(content)
    with pytest.raises(OutputError) as caught:
        workspace(tmp_path / "out")
    assert (
        str(caught.value)
        == f"{record}: is damaged, so the run cannot be resumed; --overwrite starts anew"
    )
    assert (tmp_path / "out/a.safetensors").exists()
    workspace(tmp_path / "out", overwrite=True).__exit__(None, None, None)


def hold(
    out: Path, held: "multiprocessing.synchronize.Event", done: "multiprocessing.synchronize.Event"
) -> None:
    with workspace(out):
        held.set()
        done.wait(60)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_another_process_works_in_is_refused(tmp_path, overwrite):
    context = multiprocessing.get_context("fork")
    held, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path / "out", held, done))
    other.start()
    assert held.wait(60)
    with pytest.raises(OutputError, match="out: another nf4conv is writing here"):
        workspace(tmp_path / "out", overwrite=overwrite)
    done.set()
    other.join(60)
    workspace(tmp_path / "out").__exit__(None, None, None)  # free as soon as the other has gone


def test_a_killed_process_holds_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    held, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path / "out", held, done))
    other.start()
    assert held.wait(60)
    other.kill()
    other.join(60)
    workspace(tmp_path / "out").__exit__(None, None, None)


def test_overwrite_takes_the_place_of_a_checkpoint_and_of_nothing_else(tmp_path):
    (tmp_path / "old/sub").mkdir(parents=True)
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside/keep").write_text("keep")
    for name in ("config.json", "model.safetensors", "sub/file"):
        (tmp_path / "old" / name).write_text("old")
    (tmp_path / "old/link").symlink_to(tmp_path / "aside")
    with pytest.raises(OutputError, match=OCCUPIED):
        workspace(tmp_path / "old")
    with workspace(tmp_path / "old", overwrite=True):
        assert set(contents(tmp_path / "old")) == {".nf4conv/lock", ".nf4conv/run.json"}
    assert (tmp_path / "aside/keep").read_text() == "keep"  # a link goes, what it points to stays


def test_a_run_that_died_in_its_very_last_step_is_finished(tmp_path):
    """Killed between the removal of the record and that of its folder: everything is there, and
    stays.
    """
    with workspace(tmp_path / "out") as space:
        write_shard(space, "a.safetensors")
        space.complete({"config.json": b"{}"})
    expected = contents(tmp_path / "out")
    (tmp_path / "out" / WORK_FOLDER).mkdir()
    with pytest.raises(OutputError, match=OCCUPIED):
        workspace(tmp_path / "out")
    assert contents(tmp_path / "out") == expected
    assert not (tmp_path / "out" / WORK_FOLDER).exists()


def test_everything_is_durable_before_the_folder_can_pass_for_a_checkpoint(tmp_path, monkeypatch):
    """After a power cut no config.json may stand beside shards whose names the disk has not seen
    yet.
    """
    out = tmp_path / "out"
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def logged_fsync(descriptor: int) -> None:
        events.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def logged_replace(self: Path, target: Path) -> Path:
        events.append(f"name {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(Path, "replace", logged_replace)
    with workspace(out) as space:
        write_shard(space, "a.safetensors")
        space.complete({"config.json": b"{}"})
    events = [re.sub(r"\.[0-9a-f]{16}\.", ".", event) for event in events]
    assert [event for event in events if not event.endswith(("run.json", "run.json.partial"))] == [
        "sync a.safetensors.partial", "name a.safetensors", "sync out",
        "sync .a.safetensors.json.partial", "name a.safetensors.json", "sync out",
        "sync .config.json.partial", "name config.json", "sync out",
    ]  # fmt: skip


def test_a_file_that_vanished_is_a_fault_of_the_source(tmp_path):
    with (
        workspace(tmp_path / "out") as space,
        pytest.raises(SourceError, match=r"gone.json: No such file"),
    ):
        space.write("gone.json", read_chunks(tmp_path / "gone.json"))


@pytest.mark.parametrize("place", ["file/out", "x" * 300])
def test_a_folder_that_cannot_be_made(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"(Not a directory|File name too long)$"):
        workspace(tmp_path / place)


def test_room_is_asked_for_what_is_still_to_be_written(tmp_path):
    interrupted(tmp_path / "out", "a.safetensors")
    partial = tmp_path / "out" / WORK_FOLDER / "b.safetensors.partial"
    partial.write_bytes(b"\1" * 10**6)
    with workspace(tmp_path / "out") as space:
        space.check_space(10**6)
        with pytest.raises(
            OutputError,
            match=r"out: the result takes 1,000,000,000,000,000,000 bytes but the disk has",
        ):
            space.check_space(10**18)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"name": "b.safetensors", "si', b"\xff\x00", b"[" * 100_000, b"7", b"{}",
     b'{"name": "b.safetensors"}'],
    ids=["empty", "begun", "half", "no text", "deep", "a number", "nothing", "a name"],
)  # fmt: skip
def test_a_damaged_record_of_a_shard_is_none(tmp_path, content):
    interrupted(tmp_path / "out", "a.safetensors", "b.safetensors")
    (tmp_path / "out" / WORK_FOLDER / "shards/b.safetensors.json").write_bytes(content)
    with workspace(tmp_path / "out") as space:
        assert set(space.finished) == {"a.safetensors"}
        write_shard(space, "b.safetensors")
    with workspace(tmp_path / "out") as space:
        assert set(space.finished) == {"a.safetensors", "b.safetensors"}


def test_the_link_of_a_stranger_is_not_written_through(tmp_path):
    """In a folder that others can write to."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "out" / WORK_FOLDER).mkdir(parents=True)
    (tmp_path / "out" / WORK_FOLDER / "a.safetensors.partial").symlink_to(victim)
    with workspace(tmp_path / "out") as space:
        (tmp_path / "out/config.json").symlink_to(victim)
        write_shard(space, "a.safetensors")
        space.complete({"config.json": b"{}"})
    assert victim.read_text() == "precious"
    assert (tmp_path / "out/config.json").read_bytes() == b"{}"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_work_folder_that_is_a_link_is_left_alone(tmp_path, overwrite):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/thesis.txt").write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / WORK_FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match=r"out/\.nf4conv: is a link"):
        workspace(tmp_path / "out", overwrite=overwrite)
    assert contents(tmp_path / "elsewhere") == {"thesis.txt": b"precious"}


def race(
    out: Path, barrier: "multiprocessing.synchronize.Barrier", results: "multiprocessing.Queue[str]"
) -> None:
    """Ends a run, while the other process begins one, many times."""
    for number in range(60):
        place = out / str(number)
        barrier.wait(60)
        try:
            if multiprocessing.current_process().name == "finisher":
                with workspace(place) as space:
                    write_shard(space, "a.safetensors")
                    barrier.wait(60)
                    space.complete({"config.json": b"{}"})
                results.put("")
            else:
                barrier.wait(60)
                for _ in range(40):
                    with pytest.raises(
                        OutputError, match=rf"{OCCUPIED}|another nf4conv is writing here"
                    ):
                        workspace(place)
                results.put("")
        except BaseException as error:  # noqa: BLE001 - told to the parent
            results.put(repr(error))


def test_a_run_that_comes_while_another_ends_takes_nothing_from_it(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    for name in ("finisher", "other"):
        context.Process(
            target=race, args=(tmp_path, barrier, results), name=name, daemon=True
        ).start()
    assert [results.get(timeout=120) for _ in range(120)] == [""] * 120
    for place in tmp_path.iterdir():
        assert set(contents(place)) == {"a.safetensors", "config.json"}
        assert not (place / WORK_FOLDER).exists()


def test_what_makes_a_folder_a_checkpoint_is_deleted_first(tmp_path, monkeypatch):
    """Killed at any deletion, --overwrite leaves nothing that a loader would take for whole."""
    out = tmp_path / "out"
    names = ["a.txt", "config.json", "model.safetensors.index.json", "z.safetensors"]
    names += ["part/config.json", "part/z.bin"]
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("")
    seen: list[set[str]] = []
    unlink = os.unlink

    def watched(path: object, **options: object) -> None:
        seen.append(set(contents(out)) & {*names})
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", watched)
    workspace(out, overwrite=True).__exit__(None, None, None)
    assert len(seen) >= len(names)
    for left in seen:
        assert not left & {"config.json", "model.safetensors.index.json"} or left >= {
            "z.safetensors",
            "a.txt",
        }
        assert "part/config.json" not in left or "part/z.bin" in left
        assert "config.json" not in left or left == {*names}
