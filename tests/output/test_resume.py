"""kill -9 at any moment, then the same command again: the bytes of an uninterrupted run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints import contents, write_source

import nf4conv
from nf4conv.errors import OutputError, SourceError

POINTS = 12
OPTIONS = {"max_shard_size": 60_000}
RUN = {"device": "cpu", "workers": 2, "buffer_size": 2 * 65536}


def interrupted(folder: Path, scenario: str, points: int, *more: str) -> list[dict[str, Any]]:
    """Returns what came of interruptions at some operations."""
    program = Path(__file__).parents[1] / "helpers/interruptions.py"
    command = [sys.executable, str(program), scenario, str(folder), str(points), *more]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    results = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(results) == points
    for result in results:
        assert result["status"] == 0, (result, process.stderr)
        assert result["differing"] == [], result
        assert not result["looks finished and is not"], result
    return results


@pytest.mark.parametrize("scenario", ["quantize", "dequantize", "overwrite", "stream", "pipeline"])
def test_killed_at_any_operation_and_resumed_gives_the_same_bytes(tmp_path: Path, scenario: str):
    """At a few of all of them, which `make test-all` tries one by one."""
    interrupted(tmp_path, scenario, POINTS)


@pytest.mark.oracle
@pytest.mark.parametrize("scenario", ["push", "experts", "calibrated", "gguf", "integers"])
def test_other_runs_that_are_killed_end_in_the_same_bytes(tmp_path: Path, scenario: str):
    interrupted(tmp_path, scenario, 5)


def test_signals_end_a_run_and_the_next_goes_on(tmp_path: Path):
    """SIGHUP and SIGQUIT by default, SIGINT and SIGTERM as handled, KeyboardInterrupt in Python."""
    results = interrupted(tmp_path, "quantize", 15, "signals")
    ended = {
        result["killed"][3]: result["killed"][4] for result in results if result["killed"][4] != 0
    }
    assert set(ended) <= {"hang up", "quit", "interrupt", "stop", "raise"}
    assert len(ended) >= 3
    for how, status in ended.items():
        by_signal = {"hang up": signal.SIGHUP, "quit": signal.SIGQUIT}
        if how in by_signal:
            assert os.WIFSIGNALED(status)
            assert os.WTERMSIG(status) == by_signal[how]
        else:
            expected = {"interrupt": 130, "stop": 143, "raise": 3}[how]
            assert os.waitstatus_to_exitcode(status) == expected


def stop_after_the_first_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any] = OPTIONS
) -> tuple[Path, Path]:
    """A source, and an output that a run left behind with a finished shard."""
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    written = 0
    pwrite = os.pwrite

    def failing(descriptor: int, data: memoryview, position: int) -> int:
        nonlocal written
        if any(out.glob("*.safetensors")):
            raise OSError(28, "No space left on device")
        written += 1
        return pwrite(descriptor, data, position)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", failing)
        with pytest.raises(OutputError, match="No space left on device"):
            nf4conv.quantize(source, out, **options, **RUN)
    assert written
    assert not (out / "config.json").exists()
    return source, out


def assert_as_never_interrupted(source: Path, out: Path, options: dict[str, Any] = OPTIONS) -> None:
    whole = out.with_name("whole")
    nf4conv.quantize(source, whole, **options, **RUN)
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("storage", [None, "bfloat16"])
def test_finished_shards_are_not_made_again(tmp_path, monkeypatch, storage):
    options = {**OPTIONS, "quant_storage": storage}
    source, out = stop_after_the_first_shard(tmp_path, monkeypatch, options)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    report = nf4conv.quantize(source, out, **options, **RUN)
    assert report.shards_resumed == len(before) > 0
    assert all((out / name).stat().st_mtime_ns == stamp for name, stamp in before.items())
    assert_as_never_interrupted(source, out, options)


def test_a_damaged_finished_shard_is_made_again(tmp_path, monkeypatch):
    source, out = stop_after_the_first_shard(tmp_path, monkeypatch)
    for path in out.glob("*.safetensors"):
        status, content = path.stat(), bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert nf4conv.quantize(source, out, **OPTIONS, **RUN).shards_resumed == 0
    assert_as_never_interrupted(source, out)


def replaced_unseen(shard: Path) -> None:
    """Other weights of the same size, under the same header, with the same time of change."""
    status, content = shard.stat(), bytearray(shard.read_bytes())
    content[-100_000:] = bytes(byte ^ 1 for byte in content[-100_000:])
    shard.write_bytes(content)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    "shard", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
)
def test_a_source_that_was_replaced_unseen_gives_no_mixed_result(tmp_path, monkeypatch, shard):
    source, out = stop_after_the_first_shard(tmp_path, monkeypatch)
    replaced_unseen(source / shard)
    with pytest.raises(OutputError, match="differs in source files"):
        nf4conv.quantize(source, out, **OPTIONS, **RUN)
    nf4conv.quantize(source, out, **OPTIONS, **RUN, overwrite=True)
    assert_as_never_interrupted(source, out)


def test_a_source_that_was_replaced_after_it_was_planned_is_refused(source, tmp_path):
    plan = nf4conv.plan_quantize(source, **OPTIONS, **RUN)
    replaced_unseen(source / "model-00002-of-00002.safetensors")
    with pytest.raises(
        SourceError, match=r"00002.safetensors: changed since it was planned; run again"
    ):
        plan.execute(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["option", "touched source", "other weights", "config"])
def test_another_job_is_refused(tmp_path, monkeypatch, change):
    source, out = stop_after_the_first_shard(tmp_path, monkeypatch)
    options = OPTIONS
    message = r"differs in .*source files"
    shard = source / "model-00001-of-00002.safetensors"
    if change == "option":
        options, message = (
            {**OPTIONS, "blocksize": 128},
            r"--blocksize was not given, is 128",
        )
    elif change == "touched source":
        os.utime(shard, ns=(0, 0))
    elif change == "other weights":
        status = shard.stat()
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    else:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
        message = r"differs in .*source config"
    before = contents(out)
    with pytest.raises(OutputError, match=message):
        nf4conv.quantize(source, out, **options, **RUN)
    assert contents(out) == before
    nf4conv.quantize(source, out, **options, **RUN, overwrite=True)
    assert_as_never_interrupted(source, out, options)


def slow_command(source: Path, out: Path) -> subprocess.Popen[str]:
    """Runs the real command in a process that writes nothing before SOURCE.go is there, and slowly
    then, so that it can be caught midway.
    """
    go = source.with_suffix(".go")
    program = (
        "import os, time\n"
        "pwrite = os.pwrite\n"
        "def slow(*arguments):\n"
        f"    while not os.path.exists({str(go)!r}):\n"
        "        time.sleep(0.05)\n"
        "    time.sleep(0.05)\n"
        "    return pwrite(*arguments)\n"
        "os.pwrite = slow\n"
        "from nf4conv.cli import main\n"
        "main()\n"
    )
    options = ["--device", "cpu", "--max-shard-size", "60kB", "--workers", "2"]
    command = [sys.executable, "-c", program, "quantize", str(source), str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_work(out: Path) -> None:
    deadline = time.monotonic() + 300
    while not any(out.glob(".nf4conv/*.partial")):
        assert time.monotonic() < deadline, "the run did not start to write"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "Error: interrupted; the same command resumes"),
        (signal.SIGTERM, 143, "Error: stopped; the same command resumes"),
    ],
    ids=["ctrl-c", "sigterm"],
)
def test_a_signal_stops_with_one_line_and_the_run_resumes(source, tmp_path, number, code, line):
    out = tmp_path / "out"
    process = slow_command(source, out)
    wait_for_work(out)
    process.send_signal(number)
    source.with_suffix(".go").touch()  # what is in hand is finished
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, output, errors.strip()) == (code, "", line)
    assert not (out / "config.json").exists()
    nf4conv.quantize(source, out, **OPTIONS, **RUN)
    assert_as_never_interrupted(source, out)
