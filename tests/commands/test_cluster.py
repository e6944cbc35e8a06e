"""The job files of docs/cluster.md do what it says: taken from there as they stand, and run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from checkpoints import contents, write_source

import nf4conv
from nf4conv.options import QuantizeOptions, RunOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
FILES = dict(
    re.findall(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
)
SMALL = ["--max-shard-size", "60kB", "--device", "cpu"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


@pytest.fixture
def single(tmp_path: Path, source: Path) -> dict[str, bytes]:
    """The output of one run on one machine."""
    options = QuantizeOptions(max_shard_size=60_000)
    nf4conv.quantize_checkpoint(source, tmp_path / "single", options, RunOptions(device="cpu"))
    return contents(tmp_path / "single")


@pytest.fixture
def environment(tmp_path: Path, source: Path) -> dict[str, str]:
    """SRC, OUT, and in PATH a `nf4conv` that makes many small files."""
    commands = tmp_path / "bin"
    commands.mkdir()
    program = f"{sys.executable} -m nf4conv"
    small = shlex.join(SMALL)
    (commands / "nf4conv").write_text(
        f'#!/bin/sh\nif [ "$1" = quantize ]; then exec {program} "$@" {small}; fi\nexec {program} '
        f'"$@"\n'
    )
    (commands / "nf4conv").chmod(0o755)
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "SRC": str(source),
        "OUT": str(tmp_path / "out"),
    }


def write_files(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text)


def run(
    command: list[str], environment: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif("TEST_SLURM" not in os.environ, reason="make test-slurm")
def test_slurm(tmp_path: Path, environment: dict[str, str], single: dict[str, bytes]):
    write_files(tmp_path)
    cluster = [str(ROOT / "tests" / "helpers" / "slurm.sh")]
    found = run([*cluster, "bash", "-e", "submit.sh", "--array=5-8"], environment, tmp_path)
    logs = "".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))
    assert found.returncode == 0, found.stderr + logs
    assert len([*tmp_path.glob("slurm-*_*.out")]) == 4
    assert contents(tmp_path / "out") == single


@pytest.mark.skipif("TEST_SLURM" not in os.environ, reason="make test-slurm")
def test_some_tasks_of_a_slurm_array_again(
    tmp_path: Path, environment: dict[str, str], single: dict[str, bytes]
):
    write_files(tmp_path)
    again = "NF4CONV_PARTS=3 sbatch --wait --array=0,2 quantize.sbatch; ! nf4conv finish $OUT && "
    again += "NF4CONV_PARTS=3 sbatch --wait --array=1 quantize.sbatch && nf4conv finish $OUT"
    cluster = str(ROOT / "tests/helpers/slurm.sh")
    found = run([cluster, "bash", "-c", again], environment, tmp_path)
    assert found.returncode == 0, found.stderr
    assert "run these parts of 3, and then this again: [2]" in found.stderr
    assert contents(tmp_path / "out") == single


def test_kubernetes(tmp_path: Path, environment: dict[str, str], single: dict[str, bytes]):
    """Runs the words of the containers in the order of the controller of indexed jobs, with a
    finish that comes too early.
    """
    parts, finish = (yaml.safe_load(FILES[name])["spec"] for name in ("parts.yaml", "finish.yaml"))
    (part,), (last,) = (job["template"]["spec"]["containers"] for job in (parts, finish))
    count = parts["completions"]
    assert parts["completionMode"] == "Indexed"
    assert part["env"] == [{"name": "NF4CONV_PARTS", "value": str(count)}]
    places = {"/shared/model": environment["SRC"], "/shared/model-nf4": environment["OUT"]}

    def start(container: dict[str, list[str]], **more: str) -> subprocess.CompletedProcess[str]:
        return run(
            [places.get(word, word) for word in container["command"]], environment | more, tmp_path
        )

    assert start(last).returncode == 2
    environment["NF4CONV_PARTS"] = "3"  # fewer than the page has, for the sake of time
    assert [start(part, JOB_COMPLETION_INDEX=index).returncode for index in ("1", "0")] == [0, 0]
    early = start(last)
    assert early.returncode == 2
    assert "run these parts of 3, and then this again: [3]" in early.stderr
    assert start(part, JOB_COMPLETION_INDEX="3").returncode == 2
    assert start(part, JOB_COMPLETION_INDEX="2").returncode == 0
    assert [start(last).returncode for _ in range(2)] == [0, 0]
    assert contents(tmp_path / "out") == single


@pytest.mark.skipif("KUBERNETES_VALIDATE" not in os.environ, reason="make test-kubernetes")
@pytest.mark.parametrize("name", ["parts.yaml", "finish.yaml"])
def test_kubernetes_knows_every_word(tmp_path: Path, name: str):
    write_files(tmp_path)
    command = [os.environ["KUBERNETES_VALIDATE"], "--strict", name]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    (tmp_path / name).write_text(FILES[name].replace("backoffLimit", "backOffLimit"))
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode != 0


def test_torchrun(tmp_path: Path, environment: dict[str, str], single: dict[str, bytes]):
    write_files(tmp_path)
    found = run(["bash", "-e", "torchrun.sh"], environment, tmp_path)
    assert found.returncode == 0, found.stderr
    assert contents(tmp_path / "out") == single
