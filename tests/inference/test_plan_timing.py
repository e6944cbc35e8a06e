"""Scripts that time candidates on a GPU: what they do before and around that, without one."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from own_process import compiles, run_compiling

from benchmarks import timing
from nf4conv.codec.quant_state import Addresses

SCRIPT = """
from functools import partial

import torch

from benchmarks.plan_timing import Candidate, Case, alone, main
from nf4conv.inference.kernels.product.launches import prepare_product
from nf4conv.codec.quant_state import Form


def prepare(device):
    shape = torch.Size((1, 4096))
    return alone(prepare_product(shape, torch.bfloat16, device, 4096, Form("nf4", 64, True)))


def fail(device):
    raise ValueError("out of resources")


main(__doc__, [Case(1, (4096,), 4096, (Candidate("same", prepare), Candidate("fails", fail)))])
"""


@compiles
def test_a_dry_run_compiles_all_candidates(tmp_path: Path) -> None:
    """In a process of its own: Triton cannot compile where kernels are interpreted."""
    done = run_compiling("-c", SCRIPT, "--dry-run", TRITON_CACHE_DIR=tmp_path)
    assert done.returncode == 1, done.stderr  # one does not compile
    lines = done.stdout.splitlines()
    assert lines[0] == "2 candidates of 1 cases, 1 do not compile"
    assert lines[1].endswith("fails: ValueError: out of resources")
    assert [one.name for one in tmp_path.rglob("*.cubin")] == ["product_kernel.cubin"]


Multiply = Callable[[torch.Tensor, Sequence[Addresses]], list[torch.Tensor]]


def give(factor: float) -> Multiply:
    """Stands for a kernel: returns x's first columns, times a factor."""
    return lambda x, weights: [x[:, :32] * factor for _ in weights]


def unprepared(error: Exception, device: torch.device) -> Multiply:  # noqa: ARG001
    raise error


def timed_once(calls: list[Callable[[], object]]) -> Callable[[], float]:
    calls[0]()
    return lambda: 6.0


def test_records_are_made_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lent machine has neither git nor, sometimes, a commit on the command line."""
    records = pytest.importorskip("benchmarks.records", exc_type=ImportError)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "found.json"
    records.save({"versions": records.versions(None)}, file)
    found = json.loads(file.read_text())["versions"]
    assert (found["commit"], found["torch"]) == ("", torch.__version__)
    assert records.versions("abc")["commit"] == "abc"


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_timing = pytest.importorskip("benchmarks.plan_timing", exc_type=ImportError)
    monkeypatch.setattr(timing, "L2_BYTES", 1000)
    monkeypatch.setattr(plan_timing, "graph", timed_once)
    monkeypatch.setattr(plan_timing, "_present", lambda *_: give(1))
    candidates = (
        plan_timing.Candidate("right", lambda _: give(1.005)),
        plan_timing.Candidate("wrong", lambda _: give(1.1)),
        plan_timing.Candidate("not a number", lambda _: give(float("nan"))),
        plan_timing.Candidate("fails", partial(unprepared, RuntimeError("no room"))),
        plan_timing.Candidate("not compiled", partial(unprepared, AssertionError())),
    )
    case = plan_timing.Case(2, (32, 32), 64, candidates)
    failures = {plan_timing.full_name(case, candidates[-1]): "ValueError"}
    found = plan_timing.measured(case, failures, torch.device("cpu"))
    json.dumps(found)
    assert set(found["µs"]) == {"present", "nn.Linear", "right"}
    assert set(found["wrong"]) == {"wrong", "not a number", "fails"}
    assert found["wrong"]["fails"] == "RuntimeError: no room"
    assert found["best"] in ("present", "right")
    assert found["floor"] == round((2 * 32 * 64 / 2 + 64 * (1 + 4 / 256)) / 4.1e6, 2)
