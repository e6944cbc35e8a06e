"""Nothing outside OUT is written or removed, whatever links and records are in it."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command_line
import pytest
from checkpoints import contents, write_source
from test_parts import part_killed_at_its_end

import nf4conv
from nf4conv.errors import Nf4convError, OutputError, SourceError
from nf4conv.sources.unfinished import WORK_FOLDER, describe_finished, finished_shards, record_name
from nf4conv.system import folders

OPTIONS = {"max_shard_size": 60_000}
RUN = {"device": "cpu", "workers": 1}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("here") / "source", layers=2)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of somebody else that looks as if a run had worked in it."""
    folder = tmp_path / "victim"
    (folder / "shards").mkdir(parents=True)
    (folder / "thesis.txt").write_text("precious")
    (folder / "shards/a.json").write_text("{}")
    (folder / "lock").write_text("")
    return folder


@pytest.fixture
def unfinished(source: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Returns what makes all shards of a folder in parts, and no last files."""

    def make(out: Path) -> None:
        nf4conv.quantize(source, out, **OPTIONS, **RUN, part="1/2")
        part_killed_at_its_end(monkeypatch, source, out, "2/2", OPTIONS)

    return make


GONE = Path("/there/is/no/source")
"""A run whose source this is finishes what parts have made, or nothing."""


# --- removing -------------------------------------------------------------------------------------


def test_a_folder_is_removed_with_all_that_is_in_it(tmp_path: Path):
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / "a/b/file").write_text("")
    (tmp_path / "a/other").write_text("")
    folders.remove(tmp_path, "a", "b")
    assert contents(tmp_path) == {"a/other": b""}
    folders.remove(tmp_path, "a", "missing")
    folders.remove(tmp_path, "missing", "too")
    folders.remove_contents(tmp_path, "a", keep=("other",))
    assert contents(tmp_path) == {"a/other": b""}
    folders.remove_contents(tmp_path, "a")
    assert not list((tmp_path / "a").iterdir())


def place_of(folder: Any) -> Path:
    """Returns the path of a folder, of which a handle may be given."""
    return Path(f"/proc/self/fd/{folder}").readlink() if isinstance(folder, int) else Path(folder)


def test_links_are_removed_and_not_followed(tmp_path: Path, victim: Path):
    before = contents(victim)
    (tmp_path / "out/inner").mkdir(parents=True)
    (tmp_path / "out/inner/link").symlink_to(victim)
    (tmp_path / "out/link").symlink_to(victim)
    (tmp_path / "out/file").symlink_to(victim / "thesis.txt")
    with pytest.raises(OSError, match="link"):
        folders.remove(tmp_path / "out", "link", "thesis.txt")
    with pytest.raises(OSError, match="link"):
        folders.remove_contents(tmp_path / "out", "link")
    folders.remove_contents(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
    assert contents(victim) == before


def test_a_link_that_comes_in_meanwhile_leads_nowhere(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
):
    """Between the look at a folder and the removal of what is in it."""
    inner = tmp_path / "out/inner"
    inner.mkdir(parents=True)
    (inner / "thesis.txt").write_text("ours")
    scan = os.scandir

    def swapped(place: Any) -> Any:
        found = scan(place)
        if place_of(place) == inner and not inner.is_symlink():
            inner.rename(tmp_path / "out/aside")
            inner.symlink_to(victim)
        return found

    monkeypatch.setattr(os, "scandir", swapped)
    with pytest.raises(OSError, match="directory"):  # a link is no folder to remove
        folders.remove(tmp_path / "out", "inner")
    assert (victim / "thesis.txt").read_text() == "precious"


# --- links in OUT ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "/shards"])
@pytest.mark.parametrize("command", ["gone", "part", "quantize", "overwrite"])
def test_work_folders_that_are_links_are_refused(
    source: Path,
    tmp_path: Path,
    victim: Path,
    unfinished: Callable[[Path], None],
    name: str,
    command: str,
):
    out = tmp_path / "out"
    unfinished(out)
    linked = Path(f"{out / WORK_FOLDER}{name}")
    shutil.copytree(linked, victim, dirs_exist_ok=True)
    shutil.rmtree(linked)
    linked.symlink_to(victim)
    before = contents(victim)
    run = {**RUN, "part": "1/2"} if command == "part" else RUN
    run = {**run, "overwrite": command == "overwrite"}
    place = GONE if command == "gone" else source
    with pytest.raises(OutputError, match=r"\.nf4conv.*: is a link, which no run of nf4conv"):
        nf4conv.quantize(place, out, **OPTIONS, **run)
    assert contents(victim) == before


def test_a_subfolder_that_is_a_link_is_not_written_into(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
):
    model = write_source(tmp_path / "model", layers=1)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/x.jinja").write_text("{{ x }}")
    out = tmp_path / "out"

    from nf4conv.output.folder import OutputFolder

    check = OutputFolder.check_space

    def add_link(folder: OutputFolder, needed: int) -> None:
        (out / "additional_chat_templates").symlink_to(victim)
        check(folder, needed)

    monkeypatch.setattr(OutputFolder, "check_space", add_link)
    before = contents(victim)
    with pytest.raises(OutputError, match="additional_chat_templates: is a link to another folder"):
        nf4conv.quantize(model, out, **OPTIONS, **RUN)
    assert contents(victim) == before
    assert not (out / "config.json").exists()


@pytest.mark.parametrize("target", ["missing", "out"])
@pytest.mark.parametrize("part", [None, "1/2"])
def test_a_link_that_leads_nowhere_is_refused_at_once(
    source: Path, tmp_path: Path, target: str, part: str | None
):
    (tmp_path / "out").symlink_to(tmp_path / target)
    with pytest.raises(OutputError, match="out: is a link that leads nowhere; remove it"):
        nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **RUN, part=part)


# --- records --------------------------------------------------------------------------------------


VALUES = (None, -1, 1.5, "", "../../victim", [], {}, {"a": None}, {"../x": 1}, True, "\0", [["x"]])


def test_tampered_plans_and_records_are_refused_in_one_line(
    tmp_path: Path, victim: Path, unfinished: Callable[[Path], None]
):
    """Every value of run.json, and of the record of a shard, is replaced by every odd one.

    Records name the run.json by which they were made; here they are forged to name the other.
    """
    unfinished(tmp_path / "whole")
    before = contents(victim)
    run = json.loads((tmp_path / "whole" / WORK_FOLDER / "run.json").read_text())
    shard = next((tmp_path / "whole" / WORK_FOLDER / "shards").iterdir()).name
    noted = json.loads((tmp_path / "whole" / WORK_FOLDER / "shards" / shard).read_text())
    cases: list[tuple[str, dict[str, Any]]] = []
    for value in VALUES:
        before_it = run["fingerprint"]
        last = before_it["last files"]
        changes: list[Any] = [{**before_it, "last files": {**last, key: value}} for key in last]
        changes += [{**before_it, key: value} for key in ("last files", "--verify")] + [value]
        cases += [("run.json", {"fingerprint": change}) for change in changes]
        cases += [(f"shards/{shard}", {**noted, key: value}) for key in noted]
    out = tmp_path / "out"
    for name, changed in cases:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", out)
        shards = {path.name: path.read_bytes() for path in out.glob("*.safetensors")}
        (out / WORK_FOLDER / name).write_text(json.dumps(changed))
        if name == "run.json":
            plan = hashlib.sha256((out / WORK_FOLDER / name).read_bytes()).hexdigest()
            for one, file in finished_shards(out).items():
                forged = describe_finished(one, file._replace(plan=plan))
                (out / WORK_FOLDER / "shards" / record_name(one)).write_bytes(forged)
        words = ["quantize", str(GONE), str(out), "--max-shard-size", "60kB"]
        done = command_line.run(*words)
        known = done.exception is None or isinstance(done.exception, SystemExit | Nf4convError)
        assert known, (name, changed, done.exception)
        assert contents(victim) == before
        assert shards == {path.name: path.read_bytes() for path in out.glob("*.safetensors")}


@pytest.mark.parametrize("key", ["size", "digest", "sha256", "source_bytes", "verified"])
def test_a_record_that_was_changed_counts_for_nothing(
    source: Path, tmp_path: Path, unfinished: Callable[[Path], None], key: str
):
    """Its shard is not finished then, and is made again."""
    unfinished(tmp_path / "out")
    record = next((tmp_path / "out" / WORK_FOLDER / "shards").iterdir())
    fields = json.loads(record.read_text())
    fields[key] = {"verified": {"worst": 0}, "sha256": "0" * 64}.get(key, 1)
    record.write_text(json.dumps(fields))
    with pytest.raises(SourceError):
        nf4conv.quantize(GONE, tmp_path / "out", **OPTIONS, **RUN)
    (tmp_path / "out" / fields["name"]).unlink()
    for number in (1, 2):
        nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **RUN, part=f"{number}/2")
    nf4conv.quantize(source, tmp_path / "whole", **OPTIONS, **RUN)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["pipe", "hole"])
@pytest.mark.parametrize("name", ["run.json", "shards"])
def test_records_that_are_no_files_of_their_size(
    tmp_path: Path, unfinished: Callable[[Path], None], kind: str, name: str
):
    """A pipe would never be read to its end, and a hole of gigabytes not into memory."""
    out = tmp_path / "out"
    unfinished(out)
    place = out / WORK_FOLDER / name
    record = next(place.iterdir()) if place.is_dir() else place
    record.unlink()
    if kind == "pipe":
        os.mkfifo(record)
    else:
        record.touch()
        os.truncate(record, 2**34)
    before = contents(out, "*.safetensors")
    with pytest.raises(Nf4convError):
        nf4conv.quantize(GONE, out, **OPTIONS, **RUN)
    assert contents(out, "*.safetensors") == before
