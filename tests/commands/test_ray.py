"""`--ray` on a real cluster of this machine: several nodes, one of which is lost half-way. `make
test-others`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import contents, write_source
from test_spread import OPTIONS, SLOW, looks_finished

import nf4conv

ray = pytest.importorskip("ray", reason="make test-others")

ROOT = Path(nf4conv.__file__).parents[1]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Three nodes of one core beside a head that takes no tasks; in all their processes a read
    takes long.
    """
    from ray.cluster_utils import Cluster

    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "slow"), str(ROOT)]))
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    made.nodes = [made.add_node(num_cpus=1) for _ in range(3)]
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    made.shutdown()


def start(source: Path, out: Path) -> subprocess.Popen[str]:
    """A driver; its paths are relative, for its folder is one that all see."""
    command = [
        "quantize",
        source.name,
        out.name,
        "--ray",
        "--max-shard-size",
        "60kB",
        "--json",
        "--quiet",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "nf4conv", *command], cwd=source.parent, **pipes)


def at_work(folder: Path) -> list[Path]:
    """The private folders of parts that have begun and not ended: of each node, one."""
    return [path for path in folder.glob("*.*.*") if path.is_dir()]


def test_a_node_is_lost(tmp_path: Path, cluster):
    source = write_source(tmp_path / "source", layers=24)
    nf4conv.quantize(source, tmp_path / "single", **OPTIONS, device="cpu")
    driver = start(source, tmp_path / "out")
    work = tmp_path / "out" / ".nf4conv"
    while len(at_work(work)) < 3 or len([*work.glob("shards/*")]) < 4:
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.02)
    cluster.remove_node(cluster.nodes[1], allow_graceful=False)
    assert len(at_work(work)) == 3, "a node was lost while it had nothing to do"
    assert not looks_finished(tmp_path / "out")
    output, errors = driver.communicate(timeout=240)
    assert driver.returncode == 0, errors
    report = json.loads(output)
    assert report["totals"]["bytes_after"] == sum(
        path.stat().st_size for path in tmp_path.glob("single/*.safetensors")
    )
    assert contents(tmp_path / "out") == contents(tmp_path / "single")


@pytest.mark.usefixtures("cluster")
def test_an_error_is_told_once_and_not_tried_again(source: Path, tmp_path: Path):
    file = source / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-2] + b"\xc0\x7f")  # a NaN, which only a task finds
    driver = start(source, tmp_path / "out")
    output, errors = driver.communicate(timeout=120)
    assert driver.returncode == 2
    assert "NaN" in json.loads(output)["error"]
    assert [
        line for line in errors.splitlines() if line.startswith("Error:")
    ] == errors.splitlines()[-1:]
    assert "retried" not in errors
