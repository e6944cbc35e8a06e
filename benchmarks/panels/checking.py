"""Compiles and checks plans in processes of their own: one that ends its process, or hangs,
is told of, and the others go on. What was compiled is in Triton's folder for the processes behind.

    python -m benchmarks.panels.checking FILE   (what check_all starts: FILE lists plans)
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import torch

import nf4conv
from benchmarks.panels.candidates import name_of
from benchmarks.panels.compiling import compiled, needs_of
from nf4conv.codec.quant_state import decoding_of
from nf4conv.inference.kernels.product.panels.plans import PANELS, Plan
from nf4conv.inference.kernels.product.panels.prepare import prepare_panel

ROOT: Final = Path(__file__).parent.parent.parent

LONGEST: Final = 90
"""Seconds after which compiling and checking a plan hangs."""

MOST_ERROR: Final = 4e-3
"""Of a product in bfloat16, relative: rounding weights and results makes 2.4e-3."""

RUNS: Final = 4

GPU_LOST: Final = 3
"""Exit status of a process that has told of a plan, but can do no more."""


def variant_of(plan: Plan) -> Plan:
    """Returns the plan that stands for all that share its machine code."""
    return plan._replace(splits=2 if plan.splits > 1 else 1)


def check(plan: Plan) -> str:
    """Compiles a plan and returns what is wrong with it, or nothing.

    On a GPU it multiplies, several times; without one, what it needs is looked at.
    """
    if not torch.cuda.is_available():
        needs = needs_of(compiled(plan, torch.bfloat16).asm["cubin"])
        return f"spills {needs.spilled} bytes" if needs.spilled > 0 else ""
    columns = plan.panel.columns
    # ten turns at least: as many as the parts of two clusters of five programs
    for m, n, k in ((columns - 7, 300, 1344), (min(2 * columns + 5, 512), 517, 1280)):
        wrong = _check_product(plan, m, n, k)
        if wrong:
            return f"{m}, {n}, {k}: {wrong}"
    return ""


def _check_product(plan: Plan, m: int, n: int, k: int) -> str:
    """Multiplies and returns what is wrong, or nothing."""
    device = torch.device("cuda", 0)
    packed, state = nf4conv.quantize_4bit(torch.randn(n, k, device=device))
    x = torch.randn(m, k, device=device).bfloat16()
    decoding = decoding_of(state)
    multiply = prepare_panel(x.shape, x.dtype, device, n, decoding.form(), plan)
    exact = x.double() @ nf4conv.dequantize_4bit(packed, state, dtype=torch.float32).double().T
    results: list[torch.Tensor] = []
    for _ in range(RUNS):
        for size in (m * n, 2 * plan.splits * m * n):  # what a result may come to lie in
            torch.full((size,), float("nan"), dtype=x.dtype, device=device)
        results.append(multiply(x, decoding.addresses(packed)))
        torch.cuda.synchronize()
        error = relative_error(results[-1], exact)
        if not error <= MOST_ERROR:
            return f"relative error {error:.2e}"
    same = all(torch.equal(one, results[0]) for one in results)
    return "" if same else "results differ from run to run"


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the norm of the error over the norm of what is exact."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def _described(plan: Plan) -> dict[str, int]:
    """Returns a plan for JSON."""
    panel, cluster, splits = plan
    return {"panel": PANELS.index(panel), "cluster": cluster, "splits": splits}


def _named(described: dict[str, int]) -> Plan:
    """Returns the plan that was described."""
    panel = PANELS[described["panel"]]
    return Plan(panel, described["cluster"], described["splits"])


@dataclass
class Share:
    """Plans that a process checks one after the other.

    Attributes:
        command: what checks the plans that the file behind it lists.
        folder: for its files.
        number: of the share.
        waiting: what is to be checked, in order.
        found: what is wrong with each that was, or nothing.
        process: which checks those that wait.
        lines: how many lines of the process were read.
        since: when the last of them came.
    """

    command: Sequence[str]
    folder: Path
    number: int
    waiting: list[Plan]
    found: dict[Plan, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    lines: int = 0
    since: float = 0

    def start(self) -> None:
        listed = self.folder / f"{self.number}.json"
        listed.write_text(json.dumps([_described(one) for one in self.waiting]))
        command = [*self.command, str(listed)]
        with self._file("told").open("wb") as told, self._file("log").open("wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=told, stderr=log)
        self.lines = 0
        self.since = time.time()

    def look(self) -> None:
        """Reads what the process has found; goes on behind a plan that it did not survive."""
        if not self.waiting or self.process is None:
            return
        ended = self.process.poll() is not None
        for line in self._file("told").read_text().splitlines()[self.lines :]:
            if line.endswith("}"):
                self._settle(json.loads(line)["wrong"])
                self.lines += 1
        late = time.time() - self.since > LONGEST
        if self.waiting and (ended or late):
            self.end()
            if late:
                self._settle("took too long")
            elif self.process.returncode != GPU_LOST:
                log = self._file("log").read_text(errors="replace").strip()
                self._settle(f"ended its process: {log[-300:]}")
            if self.waiting:
                self.start()

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _settle(self, wrong: str) -> None:
        self.found[self.waiting.pop(0)] = wrong
        self.since = time.time()

    def _file(self, kind: str) -> Path:
        return self.folder / f"{self.number}.{kind}"


def check_all(
    asked: Sequence[Plan],
    processes: int,
    ends: float,
    folder: Path,
    say: Callable[[str], None],
    command: Sequence[str] = (sys.executable, "-m", "benchmarks.panels.checking"),
) -> dict[Plan, str]:
    """Checks plans in several processes until a time.

    Returns:
        For each that was checked, what is wrong, or nothing.
    """
    shares = [Share(command, folder, i, list(asked[i::processes])) for i in range(processes)]
    for share in shares:
        if share.waiting:
            share.start()
    while any(share.waiting for share in shares) and time.time() < ends:
        time.sleep(0.2)
        for share in shares:
            share.look()
    for share in shares:
        share.end()
    found = {one: wrong for share in shares for one, wrong in share.found.items()}
    say(f"{len(found)} of {len(asked)} variants checked")
    for one, wrong in found.items():
        if wrong:
            say(f"  {name_of(one)}: {wrong}")
    return found


def main(listed: Path, told: IO[str]) -> None:
    """Checks the plans of a file in order, and tells what is wrong with each."""
    for described in json.loads(listed.read_text()):
        plan = _named(described)
        try:
            wrong = check(plan)
        except Exception as error:  # noqa: BLE001 - of Triton, of the driver, of torch
            wrong = f"{type(error).__name__}: {str(error)[:300]}"
        print(json.dumps({"wrong": wrong}), file=told, flush=True)
        if wrong and not _gpu_works():
            sys.exit(GPU_LOST)


def _gpu_works() -> bool:
    """Returns whether this process can go on: after a fault nothing runs in it."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.stdout)
