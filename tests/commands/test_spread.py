"""A run spread over processes, here two on the CPU, and over tasks of Ray: the bytes and the report
of a single run.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents, write_source
from safetensors.torch import load_file, save_file

import nf4conv
from nf4conv.commands.spread import find_places, make_part
from nf4conv.errors import OptionError, OutputError, PlanError, SourceError
from nf4conv.options import RunOptions

OPTIONS = {"max_shard_size": 60_000}
ONE = {"device": "cpu", "workers": 2, "buffer_size": 2 * 65536}
TWO = {**ONE, "device": "cpu,cpu"}
OF_THE_RUN = {
    *("out", "loading", "push", "seconds", "pipeline_seconds", "seconds_by_activity"),
    *("host_baseline_bytes", "host_peak_bytes", "verification"),
}
"""Fields of a report that differ from run to run, or name the output."""

SLOW = """
import os, time
read = os.preadv

def read_slowly(*given):
    time.sleep(0.05)
    return read(*given)

os.preadv = read_slowly
"""


class Run:
    """`nf4conv quantize` by two worker processes, in a process group of its own; every read takes
    as long as abroad.
    """

    def __init__(self, source: Path, out: Path, site: str = SLOW) -> None:
        (source.parent / "slow").mkdir(exist_ok=True)
        (source.parent / "slow" / "sitecustomize.py").write_text(site)
        path = os.pathsep.join(
            [str(source.parent / "slow"), str(Path(nf4conv.__file__).parents[1])]
        )
        options = "--device cpu,cpu --max-shard-size 60kB --workers 1 --json"
        self.out = out
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nf4conv", "quantize", source, out, *options.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )
        self.group = self.process.pid

    def workers(self) -> list[int]:
        """Process numbers of those that wait for parts, or carry them out."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                if (
                    b"spawn_main" in (process / "cmdline").read_bytes()
                    and os.getpgid(int(process.name)) == self.group
                ):
                    found.append(int(process.name))
        return found

    def wait_for_shards(self, count: int) -> None:
        while len([*self.out.glob(".nf4conv/shards/*")]) < count:
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr, once it has ended and all of its workers have."""
        output, errors = self.process.communicate(timeout=300)
        deadline = time.monotonic() + 120
        while self.workers():
            assert time.monotonic() < deadline, "workers are left"
            time.sleep(0.05)
        return self.process.returncode, output, errors


def looks_finished(out: Path) -> bool:
    return any((out / name).exists() for name in ("config.json", "model.safetensors.index.json"))


@pytest.mark.parametrize("run", [TWO, {**TWO, "verify": True}], ids=["plain", "verified"])
def test_two_processes_make_what_one_makes(tmp_path: Path, source: Path, run: dict[str, Any]):
    single = nf4conv.quantize(source, tmp_path / "single", **OPTIONS, **{**run, "device": "cpu"})
    read: list[int] = []
    report = nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **run, progress=read.append)
    assert contents(tmp_path / "out") == contents(tmp_path / "single")
    assert {k: v for k, v in asdict(report).items() if k not in OF_THE_RUN} == {
        k: v for k, v in asdict(single).items() if k not in OF_THE_RUN
    }
    assert report.seconds_by_activity.keys() == single.seconds_by_activity.keys()
    assert report.seconds >= report.pipeline_seconds > 0
    again = report.totals.bytes_before + report.totals.bytes_after if "verify" in run else 0
    assert sum(read) == report.totals.bytes_before + again
    if "verify" in run:
        assert report.verification is not None
        assert single.verification is not None
        assert report.verification == single.verification
    once_more = nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **run)
    assert once_more.already_complete
    assert once_more.seconds_by_activity == {}


def test_overwriting(tmp_path: Path, source: Path):
    other = {"max_shard_size": 60_000, "quant_type": "fp4"}
    nf4conv.quantize(source, tmp_path / "out", **other, **ONE)
    nf4conv.quantize(source, tmp_path / "single", **OPTIONS, **ONE)
    over = {**TWO, "overwrite": True}
    report = nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **over)
    assert not report.already_complete
    assert contents(tmp_path / "out") == contents(tmp_path / "single")


def kill_a_worker(run: Run) -> None:
    os.kill(run.workers()[0], signal.SIGKILL)


ENDS = [
    (
        kill_a_worker,
        2,
        "Error: a worker process was killed, perhaps for want of memory; the same command "
        "resumes\n",
    ),
    (
        lambda run: os.killpg(run.group, signal.SIGINT),
        130,
        "Error: interrupted; the same command resumes\n",
    ),
    (lambda run: run.process.kill(), -9, ""),
]


def assert_error_object(output: str, line: str) -> None:
    """With --json, an error is an object on stdout too."""
    if not line:
        assert output == ""
        return
    found = json.loads(output)
    assert f"Error: {found['error']}\n" == line
    assert found["exit_code"] == 2


def test_the_source_is_never_emptied(source: Path):
    before = contents(source)
    with pytest.raises(OutputError, match="is the source folder"):
        nf4conv.quantize(source, source, **TWO, **OPTIONS, overwrite=True)
    assert contents(source) == before


def test_however_a_run_ends_nobody_is_left_and_it_resumes(tmp_path: Path):
    source, out = write_source(tmp_path / "source", layers=24), tmp_path / "out"
    nf4conv.quantize(source, tmp_path / "single", **OPTIONS, **ONE)
    finished = 0
    for end, code, line in ENDS:
        run = Run(source, out)
        run.wait_for_shards(finished + 2)
        assert len(run.workers()) == 2
        end(run)
        ended, output, errors = run.end()
        assert (ended, errors) == (code, line)
        assert_error_object(output, line if code == 2 else "")
        assert not looks_finished(out)
        finished = len([*out.glob(".nf4conv/shards/*")])
    code, output, errors = Run(source, out).end()
    assert (code, errors) == (0, "")
    assert json.loads(output)["shards_resumed"] == finished >= 6
    assert contents(out) == contents(tmp_path / "single")


SLOW_TO_START = """
import sys, time
from pathlib import Path

if any("spawn_main" in word for word in sys.orig_argv):
    Path(__file__).with_name("begun").touch()
    time.sleep(1)
"""


def test_an_interrupt_while_workers_start_is_said_once(tmp_path: Path, source: Path):
    """A terminal interrupts them too, before they could say what they do then."""
    run = Run(source, tmp_path / "out", SLOW_TO_START)
    while not (tmp_path / "slow" / "begun").exists():
        assert run.process.poll() is None, run.process.communicate()
        time.sleep(0.02)
    os.killpg(run.group, signal.SIGINT)
    assert run.end() == (130, "", "Error: interrupted; the same command resumes\n")


def test_an_error_of_one_worker_is_that_of_the_run(tmp_path: Path, source: Path):
    file = source / "model-00002-of-00002.safetensors"
    tensors = load_file(file)
    tensors["model.layers.4.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(tensors, file)
    with pytest.raises(SourceError, match=r"model\.layers\.4\.mlp\.up_proj\.weight"):
        nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **TWO)
    assert not looks_finished(tmp_path / "out")
    code, output, errors = Run(source, tmp_path / "out").end()
    assert (code, errors.count("\n")) == (2, 1)
    assert_error_object(output, errors)
    assert errors.startswith(f"Error: {file}: model.layers.4.mlp.up_proj.weight: ")


@pytest.mark.parametrize(
    "device", ["cuda:0,cpu", "cuda:8,cuda:9", "cuda:0,cuda:0", "cpu,gpu", "cuda:0,"]
)
def test_devices_that_are_not_there(tmp_path: Path, source: Path, device: str):
    with pytest.raises(
        PlanError, match=f"^--device {device}: expected GPUs of this machine, each once: "
    ):
        nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **{**ONE, "device": device})
    assert not (tmp_path / "out").exists()


def test_a_part_is_for_one_process(tmp_path: Path, source: Path):
    with pytest.raises(PlanError, match=r"^--part 1/2 is for one process: "):
        nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **TWO, part="1/2")
    assert not (tmp_path / "out").exists()


def test_places_share_all_cores():
    first, second = (place.cores for place in find_places("cpu,cpu"))
    usable = os.sched_getaffinity(0)
    assert first | second == usable
    assert not first & second or len(usable) == 1


@pytest.mark.gpu
def test_all_gpus(tmp_path: Path, source: Path):
    """With one GPU it is a plain run."""
    report = nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **{**ONE, "device": "cuda:all"})
    nf4conv.quantize(source, tmp_path / "single", **OPTIONS, **{**ONE, "device": "cuda:0"})
    assert report.device == ", ".join(
        f"cuda:{number}" for number in range(torch.cuda.device_count())
    )
    assert contents(tmp_path / "out") == contents(tmp_path / "single")
    for place in find_places("cuda:all"):
        name, cores = place.device, place.cores
        assert name.startswith("cuda:")
        assert cores <= os.sched_getaffinity(0)


def test_without_ray(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        PlanError, match=r"^--ray needs one more package: pip install 'nf4conv\[ray\]'$"
    ):
        nf4conv.quantize(source, tmp_path / "out", **OPTIONS, **ONE, ray=True)


class ForeignError(ValueError):
    """An error of a module that the other process need not have."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OptionError("--dtype int4: expected float16"), OptionError),
        (SourceError("a.bin: torn", path="a.bin"), SourceError),
        (ForeignError("torn"), ValueError),
    ],
)
def test_errors_of_parts_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
):
    """The driver of several processes gets them pickled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def fail() -> None:
        raise error

    made = make_part(tmp_path, fail, fail, tmp_path / "out", RunOptions(part="1/2"))
    travelled = pickle.loads(pickle.dumps(made))  # noqa: S301
    assert type(travelled) is kind
    assert str(travelled) == str(error)
    assert getattr(travelled, "path", None) == getattr(error, "path", None)
