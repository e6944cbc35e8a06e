"""--part: the bytes of a single run, however many parts, in whatever order, whoever finishes; what
does not fit is refused.
"""

import errno
import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import command_line
import pytest
from checkpoints import contents, write_source
from hub_server import Hub, Repo

import nf4conv
import nf4conv.plan.fingerprint as fingerprint_module
import nf4conv.plan.writing as writing_module
from nf4conv.errors import OutputError, PlanError, SourceError, VerificationError
from nf4conv.output.shared_folder import SharedFolder
from nf4conv.sources.unfinished import finished_shards

OPTIONS = {"max_shard_size": 60_000}
RUN = {"device": "cpu", "workers": 2, "buffer_size": 2 * 65536}
REPO = "some-org/source"
POINTS = 4
Contents = dict[str, bytes]


def written(folder: Path) -> Path:
    write_source(folder, layers=8)
    (folder / "README.md").write_text("---\nlicense: mit\n---\nWritten by its authors.\n")
    (folder / "processor").mkdir()
    (folder / "processor/own.py").write_text("")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path / "source")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    """What a single run makes of the source."""
    folder = tmp_path_factory.mktemp("single")
    nf4conv.quantize(written(folder / "source"), folder / "out", **OPTIONS, **RUN)
    return contents(folder / "out")


def part(
    source: str | Path, out: Path, name: str, options: dict[str, Any] = OPTIONS, **others: Any
) -> Any:
    return nf4conv.quantize(source, out, **options, **RUN, part=name, **others)


def names_of(count: int) -> list[str]:
    """Returns the names of all parts, in any order, some of them twice."""
    chosen = random.Random(count)
    names = [f"{number}/{count}" for number in range(1, count + 1)]
    names += chosen.sample(names, (count + 1) // 2)
    chosen.shuffle(names)
    return names


@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_the_bytes_are_those_of_a_single_run(
    source: Path, tmp_path: Path, count: int, verify: bool
):
    single = nf4conv.quantize(source, tmp_path / "single", **OPTIONS, **RUN, verify=verify)
    before = 0
    missing = 1
    for name in names_of(count):
        report = part(source, tmp_path / "out", name, verify=verify)
        assert report.already_complete is (missing == 0)
        if missing:
            assert report.part == name
            missing = report.shards_missing
        before += report.totals.bytes_before if report.seconds_by_activity.get("read") else 0
        assert (tmp_path / "out/config.json").exists() is (missing == 0)
    assert missing == 0
    assert before >= single.totals.bytes_before
    assert contents(tmp_path / "out") == contents(tmp_path / "single")
    again = nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **RUN, verify=verify)
    assert again.already_complete
    assert again.totals.bytes_after == single.totals.bytes_after
    assert contents(tmp_path / "out") == contents(tmp_path / "single")


def test_all_parts_at_once_and_each_of_them_twice(source: Path, tmp_path: Path, expected: Contents):
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda name: part(source, tmp_path / "out", name), ["1/3", "2/3", "3/3"] * 2))
    assert contents(tmp_path / "out") == expected


def test_a_run_without_a_part_makes_what_is_missing(
    source: Path, tmp_path: Path, expected: Contents
):
    missing = part(source, tmp_path / "out", "2/3").shards_missing
    report = nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **RUN)
    assert (report.shards_missing, report.already_complete) == (0, False)
    assert 0 < report.shards_resumed < missing
    assert contents(tmp_path / "out") == expected


def part_killed_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    out: Path,
    name: str,
    options: dict[str, Any] = OPTIONS,
    **others: Any,
) -> None:
    """Makes all shards of a part, which ends before it writes the last files."""

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SharedFolder, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            part(source, out, name, options, **others)


@pytest.mark.parametrize("name", [None, "1/2", "2/2"])
def test_whoever_comes_next_finishes_what_a_killed_part_has_left(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str | None,
    expected: Contents,
):
    part(source, tmp_path / "out", "1/2")
    part_killed_at_its_end(monkeypatch, source, tmp_path / "out", "2/2")
    assert not (tmp_path / "out/config.json").exists()
    report = nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **RUN, part=name)
    assert report.shards_missing == 0
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
def test_the_source_is_gone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
):
    """All shards are there. Whoever asks for something else gets the error of the source."""
    single = nf4conv.quantize(source, tmp_path / "single", **OPTIONS, **RUN, verify=verify)
    part(source, tmp_path / "out", "1/2", verify=verify)
    part_killed_at_its_end(monkeypatch, source, tmp_path / "out", "2/2", verify=verify)
    before = contents(tmp_path / "out")
    source.rename(tmp_path / "elsewhere")
    for other in ({**OPTIONS, "blocksize": 128}, {**OPTIONS, "include": ("*q_proj*",)}):
        with pytest.raises(SourceError):
            nf4conv.quantize(source, tmp_path / "out", **other, **RUN)
    with pytest.raises(SourceError):
        nf4conv.dequantize(source, tmp_path / "out", **RUN)
    assert contents(tmp_path / "out") == before
    report = nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **RUN)
    assert contents(tmp_path / "out") == contents(tmp_path / "single")
    assert (report.totals.packed, report.totals.copied) == (
        single.totals.packed,
        single.totals.copied,
    )
    assert (report.totals.bytes_before, report.totals.bytes_after) == (
        single.totals.bytes_before,
        single.totals.bytes_after,
    )
    with pytest.raises(SourceError):
        nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **RUN)


def test_what_others_have_finished_meanwhile_is_complete(
    source: Path, tmp_path: Path, expected: Contents
):
    """Another process makes the same part, and takes away the folder in which this one writes."""
    calls = []

    def interfere(count: int) -> None:
        calls.append(count)
        if len(calls) == 1:
            part(source, tmp_path / "out", "1/1")

    report = nf4conv.quantize(
        source,
        tmp_path / "out",
        **OPTIONS,
        **{**RUN, "workers": 1},
        part="1/1",
        progress=interfere,
    )
    assert report.already_complete
    assert contents(tmp_path / "out") == expected


def test_a_dequantization(source: Path, tmp_path: Path):
    nf4conv.quantize(source, tmp_path / "packed", **OPTIONS, **RUN)
    options = {"max_shard_size": 150_000}
    nf4conv.dequantize(tmp_path / "packed", tmp_path / "single", **options, **RUN)
    for name in names_of(3):
        nf4conv.dequantize(tmp_path / "packed", tmp_path / "out", **options, **RUN, part=name)
    assert contents(tmp_path / "out") == contents(tmp_path / "single")


def interrupted(*words: str) -> list[dict[str, Any]]:
    """Returns what came of runs that helpers/interruptions.py has killed and begun again."""
    program = str(Path(__file__).parents[1] / "helpers/interruptions.py")
    command = [sys.executable, program, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("scenario", ["parts", "streamed-parts"])
def test_killed_at_any_operation_and_repeated(tmp_path: Path, scenario: str):
    """Three parts, one after the other; at a few of all operations, which `make test-all`
    tries one by one.
    """
    results = interrupted(scenario, str(tmp_path), str(POINTS))
    assert len(results) == POINTS
    for result in results:
        assert result["status"] == 0, result
        assert not result["differing"], result
        assert result["looks finished and is not"] is False, result


def test_parts_at_once_that_are_killed_at_random_and_begun_again(tmp_path: Path):
    """1, 2, 3 and 7 of them, one twice, each in a process of its own; with and without --stream."""
    results = interrupted("--at-once", str(tmp_path))
    assert [(result["parts"], result["streamed"]) for result in results] == [
        (count, streamed) for streamed in (False, True) for count in (1, 2, 3, 7)
    ]
    assert [result["differing"] for result in results] == [[]] * len(results)
    assert all(result["killed"] for result in results)


# --- from the Hub ---------------------------------------------------------------------------------


@pytest.fixture
def where(hub: Hub, source: Path, tmp_path: Path) -> dict[str, Any]:
    """The source, published."""
    hub.repos[REPO] = Repo()
    hub.repos[REPO].commit(contents(source))
    return {"stream": True, "cache_dir": tmp_path / "cache"}


@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_source_that_is_streamed(where: dict[str, Any], tmp_path: Path, count: int, verify: bool):
    nf4conv.quantize(REPO, tmp_path / "single", **OPTIONS, **RUN, verify=verify, **where)
    for name in names_of(count):
        part(REPO, tmp_path / "out", name, verify=verify, **where)
    assert contents(tmp_path / "out") == contents(tmp_path / "single")


@pytest.mark.parametrize(
    "size", [40_000, 10**6], ids=["more parts than files", "parts of whole files"]
)
def test_no_byte_is_fetched_by_two_parts(
    hub: Hub, where: dict[str, Any], source: Path, tmp_path: Path, size: int
):
    for number in range(1, 6):
        options = {**OPTIONS, "max_shard_size": size}
        part(REPO, tmp_path / "out", f"{number}/5", options, **where)
    files = {path.name: path.stat().st_size for path in source.glob("*.safetensors")}
    fetched, whole = dict.fromkeys(files, 0), dict.fromkeys(files, 0)
    for request in hub.requests:
        name = request.line.rpartition("/")[2]
        if request.line.startswith("GET /cdn/") and name in files:
            first, _, last = (request.range or "").removeprefix("bytes=").partition("-")
            whole[name] += request.range is None
            if first != "0":  # which is the header, as every part reads it
                fetched[name] += int(last) - int(first) + 1 if first else files[name]
    assert set(whole.values()) == ({0} if size == 40_000 else {1})
    assert all(0.9 * files[name] < fetched[name] <= files[name] for name in files)


# --- what does not fit together -------------------------------------------------------------------


STATING_THE_VERSION: tuple[Any, ...] = (fingerprint_module, writing_module)


def other_weights(source: Path) -> None:
    """Changes the weights but not the headers, as more training does."""
    shard = source / "model-00001-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


def renamed_tensor(source: Path) -> None:
    for path in source.iterdir():
        if path.is_file():
            path.write_bytes(path.read_bytes().replace(b"layers.0.", b"layers.9."))


def other_version(source: Path) -> None:  # noqa: ARG001 - as the others
    for module in STATING_THE_VERSION:
        module.__version__ = "0.0.9"


def edited(name: str, text: str) -> Callable[[Path], object]:
    return lambda source: (source / name).write_text(text)


CHANGES: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "weights": (other_weights, {}, "source, last files "),
    "headers": (renamed_tensor, {}, "source headers"),
    "tokenizer": (edited("tokenizer.json", "[]"), {}, "last files "),
    "card": (edited("README.md", "another"), {}, "last files "),
    "config": (edited("config.json", '{"model_type": "llama"}'), {}, "source config, "),
    "version": (other_version, {}, "version, "),
    "verify": (lambda _: None, {"verify": True}, "--verify "),
    "tolerance": (lambda _: None, {"verify": True, "tolerance": 0.2}, "--verify, --tolerance "),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_part_of_another_plan_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
):
    for module in STATING_THE_VERSION:
        monkeypatch.setattr(module, "__version__", module.__version__)  # restored at the end
    out = tmp_path / "out"
    part(source, out, "1/3")
    before = contents(out)
    alter, options, name = CHANGES[change]
    alter(source)
    with pytest.raises(
        OutputError,
        match=rf"out: holds an unfinished run that differs in {name}.*; all parts take the",
    ):
        nf4conv.quantize(source, out, **OPTIONS, **RUN, part="2/3", **options)
    assert contents(out) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overwrite": True}, "--overwrite, which would delete what other parts make"),
        ({"part": "0/3"}, "--part 0/3: expected I/N with I from 1 to N"),
        ({"part": "4/3"}, "--part 4/3: expected I/N"),
        ({"part": "two"}, "--part two: expected I/N"),
    ],
    ids=str,
)
def test_what_does_not_go_with_parts_is_refused(
    source: Path, tmp_path: Path, options: dict[str, Any], message: str
):
    with pytest.raises(PlanError, match=message):
        nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **RUN, **{"part": "1/3"} | options)
    assert not (tmp_path / "out").exists()


def test_pushing_and_diffusers_pipelines_are_refused(source: Path, tmp_path: Path):
    for spread in (["--part", "1/2"], ["--ray"]):
        done = command_line.run(
            "quantize", source, tmp_path / "out", *spread, "--push-to-hub", "me/it"
        )
        assert done.exit_code == 2, spread
        said = "--push-to-hub does not go with --part, --ray or several GPUs"
        assert said in done.stderr, spread
    assert not (tmp_path / "out").exists()
    pipeline = tmp_path / "pipeline"
    shutil.copytree(source, pipeline / "text_encoder")
    index = {"_class_name": "AnyPipeline", "text_encoder": ["transformers", "LlamaModel"]}
    (pipeline / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(PlanError, match="one by one: --subfolder NAME, into OUT/NAME"):
        part(pipeline, tmp_path / "out", "1/2")
    where = {"subfolder": "text_encoder"}
    for name in ("1/2", "2/2"):
        part(pipeline, tmp_path / "out", name, **where)
    nf4conv.quantize(pipeline, tmp_path / "single", **OPTIONS, **RUN, **where)
    assert contents(tmp_path / "out") == contents(tmp_path / "single")


def test_a_single_run_and_parts_keep_out_of_each_other_s_folder(source: Path, tmp_path: Path):
    part(source, tmp_path / "parts", "1/2")
    nf4conv.quantize(source, tmp_path / "parts", **OPTIONS, **RUN, overwrite=True)
    shard = source / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-2] + b"\xc0\x7f")  # a NaN stops the run
    with pytest.raises(SourceError, match="NaN"):
        nf4conv.quantize(source, tmp_path / "single", **OPTIONS, **RUN)
    with pytest.raises(OutputError, match="holds an unfinished run that differs in"):
        part(source, tmp_path / "single", "1/2")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.txt").write_text("precious")
    with pytest.raises(OutputError, match="exists and is not empty"):
        part(source, tmp_path / "other", "1/2")


# --- what is damaged ------------------------------------------------------------------------------


def test_what_is_damaged_is_named_and_made_again(source: Path, tmp_path: Path, expected: Contents):
    out = tmp_path / "out"
    part(source, out, "2/2")
    shard = sorted(out.glob("*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(
        OutputError,
        match=rf"1 of \d+ files are not what was written, such as {shard.name}; the same",
    ):
        part(source, out, "1/2")
    assert not (out / "config.json").exists()
    nf4conv.quantize(source, out, **OPTIONS, **RUN)
    assert contents(out) == expected


def test_a_damaged_copy_of_what_stands_beside_the_weights(
    source: Path, tmp_path: Path, expected: Contents
):
    part(source, tmp_path / "out", "1/2")
    (tmp_path / "out/tokenizer.json").write_bytes(b"other")
    part(source, tmp_path / "out", "2/2")
    assert contents(tmp_path / "out") == expected


def test_what_a_part_finds_wrong_is_not_finished(source: Path, tmp_path: Path):
    with pytest.raises(VerificationError, match=r"out: verification failed: model\.layers"):
        part(source, tmp_path / "out", "1/2", verify=True, tolerance=0.01)
    shards = finished_shards(tmp_path / "out").values()
    assert not any(shard.verified["packed"] for shard in shards if shard.verified)


def test_no_file_system_needs_to_know_locks_or_links(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Contents
):

    def unknown(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unknown)
    monkeypatch.setattr(os, "link", unknown)
    part(source, tmp_path / "out", "2/3")
    with pytest.raises(OutputError, match="differs in --blocksize, "):
        part(source, tmp_path / "out", "1/3", {**OPTIONS, "blocksize": 128})
    for name in names_of(3):
        part(source, tmp_path / "out", name)
    assert contents(tmp_path / "out") == expected


# --- more parts than there are files --------------------------------------------------------------


def test_parts_beyond_the_files_have_nothing_to_do_and_say_so(source: Path, expected: Contents):
    files = len([name for name in expected if name.endswith(".safetensors")])
    plan = nf4conv.plan_quantize(source, **OPTIONS, part=f"{files + 1}/500000").made
    assert not plan.output.shards
    assert plan.notes[-1] == (
        f"part {files + 1} of 500,000 has nothing to do: {files} files make at most {files} parts; "
        f"--max-shard-size makes more of them"
    )
