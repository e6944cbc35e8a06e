"""Proves and measures on a GPU what no other machine can, within minutes: every test that is marked
gpu, in processes that share them; then, alone on the GPU, how fast products and decoding are.

    python -m benchmarks.gpu_acceptance --out FOLDER [--seconds 560] [--workers N] [--commit HASH]
        [--tests FILE...] [--only STEP...] [--scratch FOLDER]

A test that ends its process, or hangs, is reported, and another process goes on behind it. Tests
that failed run once more, alone: some may have lacked memory beside others. A step that would last
too long is ended; what it had found is in the folder, where acceptance.json tells of all steps.
The exit status is 1 unless all tests passed, and all steps ended well.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent

LONGEST_TEST: Final = 180
"""Seconds after which a test hangs."""

MOST_RESTARTS: Final = 40

TESTS_SHARE: Final = 0.58
"""Of the time, for the tests at most: the steps behind them take about 270 s."""

AGAIN_SECONDS: Final = 60

MOST_PRINTED: Final = 15
"""Tests that did not pass: a caller may see the end of the output only."""

STEPS: Final = {
    "linear_models": (["benchmarks.linear_models", "--json", "{out}", "--commit", "{commit}"], 150),
    "linear_rows": (["benchmarks.linear_rows", "--json", "{out}", "--commit", "{commit}"], 150),
    "encoded": (
        ["benchmarks.encoded", "gguf Q6_K", "gguf Q8_0", "--runs", "2", "--folder", "{scratch}",
         "--out", "{out}"],
        110,
    ),
}  # fmt: skip
"""What is measured, in order of priority: the module with its options, and seconds at most."""


@dataclass
class Acceptance:
    """What was found so far; written to a file again and again.

    Attributes:
        file: where to.
        ends: until when there is time.
        tests: by name, what became of a test.
        again: the same of those that ran once more.
        steps: by name, how a step ended.
    """

    file: Path
    ends: float
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    again: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)

    def left(self) -> float:
        """Returns how many seconds are left."""
        return self.ends - time.time()

    def write(self) -> None:
        content = {"steps": self.steps, "again": self.again, "tests": self.tests}
        self.file.write_text(json.dumps(content, indent=1) + "\n")


def with_path(*folders: Path) -> dict[str, str]:
    """Returns this process's environment, with folders from which modules are imported first."""
    paths = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)))


class Worker:
    """A process that claims tests, as tests/helpers/claiming.py says."""

    def __init__(self, claims: Path, files: list[str], number: int) -> None:
        environment = with_path(ROOT, ROOT / "tests" / "helpers") | {"CLAIMS": str(claims)}
        # as many processes as cores: none may have a thread for each core
        environment |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-p", "claiming", "-q", "--no-header",
                   "-p", "no:cacheprovider", "--continue-on-collection-errors",
                   f"--basetemp={claims}/files-{number}", *files]  # fmt: skip
        self.log = claims / f"log-{number}"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.results = claims / f"results-{self.process.pid}"

    def lines(self) -> list[dict[str, Any]]:
        if not self.results.exists():
            return []
        whole = self.results.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def end(self) -> None:
        """Ends the process with all that it started, if it runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def files_with_tests() -> list[str]:
    """Returns the files that have tests for a GPU: all processes collect these and no others."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from claiming import WHOLE

    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [one for one in files if one.stem in WHOLE or "mark.gpu" in one.read_text()]
    return [str(one.relative_to(ROOT)) for one in found]


class Pool:
    """Processes that share tests, and what became of each test.

    Attributes:
        found: by name of a test, "outcome", and if it ran, "seconds" and what a failure "told".
    """

    def __init__(self, files: list[str], workers: int, asked: list[str]) -> None:
        """Starts the processes.

        Args:
            files: with the tests.
            workers: how many processes.
            asked: the tests; if empty, all that are for a GPU.
        """
        self.files = files
        self.claims = Path(tempfile.mkdtemp(prefix="claims-"))
        if asked:
            (self.claims / "asked").write_text("\n".join(asked))
        self.found: dict[str, dict[str, Any]] = {}
        self.made: list[Worker] = []
        self.running: list[Worker] = []
        self.most = workers + MOST_RESTARTS
        for _ in range(workers):
            self.start()

    def start(self) -> None:
        self.made.append(Worker(self.claims, self.files, len(self.made)))
        self.running.append(self.made[-1])

    def watch(self) -> None:
        """Takes down what was found; starts other processes for those that have died or hang."""
        for worker in list(self.running):
            current = follow(worker, self.found)
            hangs = current.get("since", time.time()) < time.time() - LONGEST_TEST
            # a child that a failed test has left would keep a process from ending
            if worker.process.poll() is not None or hangs or current["done"]:
                self.running.remove(worker)
                how = "hung" if hangs else f"ended its process: {worker.process.poll()}"
                worker.end()
                self.go_on(worker, how)

    def go_on(self, worker: Worker, how: str) -> None:
        """Starts another process if one has not ended well."""
        current = follow(worker, self.found)
        told = worker.log.read_text(errors="replace")[-1500:]
        if current["done"]:
            return
        if "name" in current:
            self.found[current["name"]] = {"outcome": how, "told": told}
        else:
            print(f"between two tests, a process {how}\n{told}", flush=True)
        give_back(worker, self.claims)
        if len(self.made) < self.most:
            self.start()

    def end(self) -> None:
        """Ends all processes."""
        for worker in self.running:
            worker.end()
            current = follow(worker, self.found)
            if "name" in current:
                self.found[current["name"]] = {"outcome": "no time was left"}
        shutil.rmtree(self.claims, ignore_errors=True)


def run_tests(acceptance: Acceptance, pool: Pool, seconds: float) -> None:
    """Lets processes run their tests, until there are none or the time has passed."""
    ends = time.time() + seconds
    try:
        while pool.running and time.time() < ends:
            time.sleep(1)
            pool.watch()
            acceptance.write()
    finally:
        pool.end()
        acceptance.write()


def follow(worker: Worker, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Takes down what a process has found, and returns the name of the test that it runs, since
    when, and whether it is done.
    """
    current: dict[str, Any] = {"done": False}
    for line in worker.lines():
        for name in line.get("collected", ()):
            found.setdefault(name, {"outcome": "not run"})
        if "begun" in line:
            current = {"done": False, "name": line["begun"], "since": line["at"]}
        elif "ended" in line:
            result = {key: line[key] for key in ("outcome", "seconds", "told")}
            found[line["ended"]] = result
            current = {"done": False}
        elif "done" in line:
            current = {"done": True}
    return current


def give_back(worker: Worker, claims: Path) -> None:
    """Lets others claim the group that a process has not ended: what it had begun is known."""
    last = [line["claim"] for line in worker.lines() if "claim" in line][-1:]
    for name in last:
        (claims / name).unlink(missing_ok=True)


class Collection:
    """A process that collects the tests of all files: none that is marked gpu may be forgotten."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q",
                   "-p", "no:cacheprovider"]  # fmt: skip
        self.file = Path(tempfile.mkdtemp()) / "collected"
        with self.file.open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=with_path(ROOT), stdout=file, stderr=subprocess.DEVNULL
            )

    def add_missing(self, tests: dict[str, dict[str, Any]]) -> None:
        """Adds tests that were not collected elsewhere."""
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        lines = self.file.read_text().splitlines()
        found = [line for line in lines if line.startswith("tests/") and "::" in line]
        for name in found:
            tests.setdefault(name, {"outcome": "not run"})
        print(f"{len(found)} tests are marked gpu, {len(tests)} were chosen", flush=True)


def run_step(acceptance: Acceptance, name: str, chosen: argparse.Namespace) -> None:
    """Runs a benchmark in a process of its own, until it has ended or there is no time left."""
    words, most = STEPS[name]
    places = {"out": chosen.out / f"{name}.json", "commit": chosen.commit}
    places["scratch"] = chosen.scratch
    command = [sys.executable, "-m", *(word.format(**places) for word in words)]
    environment = with_path(ROOT)
    environment |= {"PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "0"}
    seconds = min(most, acceptance.left())
    log = chosen.out / f"{name}.log"
    start = time.time()
    how = "no time was left"
    if seconds > 5:
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        try:
            how = f"exit {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            how = "took too long"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    acceptance.steps[name] = {"how": how, "seconds": round(time.time() - start, 1)}
    acceptance.write()
    print(name, acceptance.steps[name], flush=True)
    if log.exists():
        print(log.read_text(errors="replace")[-1800:], flush=True)


def counted(tests: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Returns how many tests had each outcome."""
    counts: dict[str, int] = {}
    for result in tests.values():
        outcome = result["outcome"].split(":")[0]
        counts[outcome] = counts.get(outcome, 0) + 1
    return counts


def print_tests(acceptance: Acceptance) -> None:
    """Prints the counts, the slowest, why some were skipped, and every test that did not pass."""
    slowest = sorted(acceptance.tests.items(), key=lambda one: -one[1].get("seconds", 0))[:8]
    for name, result in slowest:
        print(f"{result.get('seconds', 0):7.1f} s  {name}")
    reasons: dict[str, int] = {}
    others = []
    for name, result in acceptance.tests.items():
        if result["outcome"] == "skipped":
            reasons[result["told"][-80:]] = reasons.get(result["told"][-80:], 0) + 1
        elif result["outcome"] != "passed":
            others.append(name)
    print("skipped:", reasons)
    for name in others[:MOST_PRINTED]:
        first = acceptance.tests[name]
        alone = acceptance.again.get(name, {"outcome": "not tried"})["outcome"]
        print(f"{first['outcome']}, alone {alone}: {name}\n    {first.get('told', '')[-200:]!r}")
    if len(others) > MOST_PRINTED:
        print(f"and {len(others) - MOST_PRINTED} more in {acceptance.file.name}")
    print("tests:", counted(acceptance.tests), "again:", counted(acceptance.again), flush=True)


def prove(acceptance: Acceptance, chosen: argparse.Namespace) -> None:
    """Runs all tests, and those that failed once more, alone."""
    start = time.time()
    files = chosen.tests or files_with_tests()
    collection = None if chosen.tests else Collection()
    pool = Pool(files, chosen.workers, [])
    acceptance.tests = pool.found
    run_tests(acceptance, pool, TESTS_SHARE * chosen.seconds)
    if collection is not None:
        collection.add_missing(acceptance.tests)
    failed = [name for name, one in acceptance.tests.items() if is_doubtful(one)]
    if failed:
        pool = Pool(
            [file for file in files if any(Path(file).name in name for name in failed)], 1, failed
        )
        acceptance.again = pool.found
        run_tests(acceptance, pool, min(AGAIN_SECONDS, acceptance.left()))
    acceptance.steps["tests"] = {"how": "ended", "seconds": round(time.time() - start, 1)}
    acceptance.write()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for what was found")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--workers", type=int, default=max(2, min(16, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--commit", default="unknown", help="recorded")
    parser.add_argument("--tests", nargs="*", help="files; by default all that have tests")
    parser.add_argument("--only", nargs="*", default=["tests", *STEPS], help="steps to run")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    acceptance = Acceptance(chosen.out / "acceptance.json", time.time() + chosen.seconds)
    if "tests" in chosen.only:
        prove(acceptance, chosen)
        print_tests(acceptance)
    for name in STEPS:
        if name in chosen.only:
            run_step(acceptance, name, chosen)
    print("steps:", acceptance.steps, flush=True)
    whole = all(one["outcome"] in ("passed", "skipped") for one in acceptance.tests.values())
    ended = all(one["how"] in ("ended", "exit 0") for one in acceptance.steps.values())
    sys.exit(0 if whole and ended else 1)


def is_doubtful(result: dict[str, Any]) -> bool:
    """Returns whether a test is to run once more: it failed, or its process ended."""
    return result["outcome"] == "failed" or result["outcome"].startswith("ended")


if __name__ == "__main__":
    main()
