"""Runs commands on thousands of mutated inputs of many kinds. A command may refuse one with an
error of one line, and it must end in time.

    python tests/helpers/fuzz.py [--cases N] [--seconds N] [--seed N] [--jobs N] [--kind NAME]

A case is a number, which decides the kind, the mutations and the command. So
`--seed NUMBER --cases 1` repeats one. Child processes are forked from one that has imported
everything, and run up to 200 cases each, with a limit of memory, and a limit of time for each
case. NF4CONV_DEBUG is set: an error that is not meant for the user then leaves a traceback. These
are failures:

    a traceback, or an error of more than one line
    an exit code other than 0, 1 and 2
    memory or time above the limit
    a folder that looks finished after a failure
    a result that our own verify does not pass, or weights that are not the right ones
    a file outside OUT that was changed
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

# cases take sources from frozen inputs
sys.path.append(str(Path(__file__).parents[1] / "golden"))

# of processor time that a case may take; by the clock, ten times as many; most cases take 0.02 s
SECONDS = 20
# bytes that a case may take beside those of the interpreter and torch
MEMORY = 1_500_000_000
BATCH = 200


def prepare(home: Path) -> None:
    """Settles what libraries read from the environment when they are imported."""
    os.environ |= {
        "NF4CONV_DEBUG": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(home),
        "XDG_CACHE_HOME": str(home),
        "HF_ENDPOINT": "http://127.0.0.1:9",  # where nobody answers
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def write_templates(templates: Path, names: list[str]) -> None:
    """Writes what is mutated, and imports everything that the commands need."""
    import torch
    from fuzz_cases import KINDS
    from fuzz_templates import run

    torch.set_num_threads(1)
    torch.manual_seed(0)
    templates.mkdir()
    for name in names:
        KINDS[name].write(templates / name)
    warm = templates.with_name("warm")
    KINDS["plain"].write(warm)
    run("quantize", warm, templates.with_name("warm out"), "--dry-run")


def report(record: dict[str, Any]) -> None:
    """Tells the parent process something, even if this one dies next."""
    print(json.dumps(record), flush=True)


def run_case(number: int, kind: str, templates: Path, work: Path) -> str | None:
    """Runs a case. Returns what is wrong with it, or None."""
    from fuzz_cases import KINDS, states, write_beside
    from fuzz_templates import run

    chosen = random.Random(number)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    write_beside(work)
    report({"number": number, "kind": kind, "arguments": ["before it"]})
    made = KINDS[kind].make(chosen, templates / kind, work)
    report({"number": number, "kind": kind, "arguments": [str(word) for word in made.words]})
    watched = (work, templates / kind)
    caches = work / "cache"
    before = states(watched, made.out)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(10 * SECONDS)
    try:
        done = run(*made.words)
        report({"exit": done.exit_code})
        after = states(watched, made.out)
        changed = [
            path
            for path in sorted(before.keys() | after.keys())
            if before.get(path) != after.get(path) and not Path(path).is_relative_to(caches)
        ]
        found = fault_of(done, made) or made.judge(done)
        # the folder in which everything is gets OUT
        changed = [path for path in changed if Path(path) not in (work, made.out.parent)]
        if changed:
            found = f"changed outside OUT: {changed}"
    except BaseException:  # noqa: BLE001 - to be reported, whatever it is
        found = traceback.format_exc()
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)
    return found


def is_one_error(stderr: str) -> bool:
    """Returns whether a command said one error, in one line of reasonable length."""
    said = [line.rpartition("\r")[2] for line in stderr.splitlines()]
    lines = [line for line in said if not line.startswith(("Note: ", "Warning: "))]
    errors = [line for line in lines if line.startswith("Error: ")]
    return len(errors) == 1 and lines[-1] == errors[0] and len(errors[0]) <= 3000


def fault_of(done: Any, made: Any) -> str | None:
    """Returns what is wrong with how a command ended, or None."""
    from nf4conv.sources.unfinished import is_model

    if done.exit_code not in (0, 1, 2):
        return f"exit code {done.exit_code}"
    if done.exit_code == 2 and not is_one_error(done.stderr):
        return f"not one line, but {done.stderr[:2000]!r}"
    if "out of memory" in done.stderr:
        return str(done.stderr)
    if done.exit_code and is_model(made.out) and not made.may_be_whole:
        return "looks finished"
    return None


def run_batch(numbers: range, kinds: list[str], templates: Path) -> None:
    """Runs some cases in this process, and prints their failures as JSON."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**33, 2**33))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    work = Path(tempfile.mkdtemp(dir=templates.parent, prefix="work-"))
    for number in numbers:
        found = run_case(number, kinds[number % len(kinds)], templates, work / "case")
        if found is not None:
            report({"number": number, "fault": found})
    shutil.rmtree(work, ignore_errors=True)
    report({"finished": numbers.start})


class Batch:
    """A forked process that runs some cases and writes what it does to a file."""

    def __init__(self, numbers: range, kinds: list[str], templates: Path) -> None:
        self.numbers = numbers
        self._output = templates.with_name(f"{numbers.start} output")
        self._errors = templates.with_name(f"{numbers.start} errors")
        sys.stdout.flush()
        self._child = os.fork()
        if self._child == 0:
            self._become_child(kinds, templates)

    def _become_child(self, kinds: list[str], templates: Path) -> None:
        for path, number in ((self._output, 1), (self._errors, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        try:
            run_batch(self.numbers, kinds, templates)
        except BaseException:  # noqa: BLE001 - the child must not return into the parent's code
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def wait(self) -> tuple[int, str, str]:
        """Returns its status, output and errors."""
        _, status = os.waitpid(self._child, 0)
        code = os.waitstatus_to_exitcode(status)
        return code, self._output.read_text(), self._errors.read_text(errors="replace")


def failures_of(
    batch: Batch, kinds: Counter[str], exits: Counter[int]
) -> tuple[list[str], int | None]:
    """Returns what went wrong in a batch, and the case in which its process died, if it did.

    Counts the cases in `kinds` and `exits`.
    """
    status, output, errors = batch.wait()
    described: dict[int, str] = {}
    faults: list[str] = []
    last = -1
    for line in output.splitlines():
        record: dict[str, Any] = {}
        with suppress(ValueError):  # what a library has printed
            record = json.loads(line)
        if "kind" in record:
            last = record["number"]
            described[last] = f"{record['kind']}: {' '.join(record['arguments'])}"
        elif "exit" in record:
            kinds[described[last].partition(":")[0]] += 1
            exits[record["exit"]] += 1
        elif "fault" in record:
            number = record["number"]
            faults.append(f"case {number}: {described[number]}\n{record['fault']}")
    if status == 0:
        return faults, None
    reason = f"status {status}"
    if -status in (signal.SIGPROF, signal.SIGALRM):
        reason = f"no end in {SECONDS} s"
    case_name = described.get(last, "before the first")
    faults.append(f"case {last}: {case_name}\n{reason}: {errors[-2000:]}")
    return faults, last if described else None


def fuzz(
    numbers: range, seconds: float, jobs: int, names: list[str], folder: Path
) -> tuple[Counter[str], Counter[int], list[str]]:
    """Runs cases, in `jobs` processes at a time.

    Returns how many cases of each kind ran, how many ended with each exit code, and what went
    wrong.
    """
    kinds: Counter[str] = Counter()
    exits: Counter[int] = Counter()
    faults: list[str] = []
    templates = folder / "templates"
    write_templates(templates, names)
    deadline = time.monotonic() + seconds
    waiting = [numbers[start : start + BATCH] for start in range(0, len(numbers), BATCH)]
    waiting.reverse()  # they are taken from the end
    running: list[Batch] = []
    while running or (waiting and time.monotonic() < deadline):
        while waiting and len(running) < jobs and time.monotonic() < deadline:
            running.append(Batch(waiting.pop(), names, templates))
        batch = running.pop(0)
        found, died_at = failures_of(batch, kinds, exits)
        faults += found
        for fault in found:
            number = fault.split()[1].removesuffix(":")
            kind = names[int(number) % len(names)]
            again = f"repeat: make test-all FUZZ='--cases 1 --seed {number} --kind \"{kind}\"'"
            print(f"{fault}\n    {again}\n", flush=True)
        print(f"{kinds.total():,} cases so far, {len(faults)} failures", flush=True)
        if died_at is not None and died_at + 1 < batch.numbers.stop:
            waiting.append(range(died_at + 1, batch.numbers.stop))
    return kinds, exits, faults


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kind", action="append", default=[])
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    started = time.monotonic()
    room = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=room, prefix="nf4conv-fuzz-") as folder:
        prepare(Path(folder, "home"))
        from fuzz_cases import KINDS  # imports everything, by the environment that is now settled

        names = options.kind or list(KINDS)
        numbers = range(seed, seed + options.cases)
        kinds, exits, faults = fuzz(numbers, options.seconds, options.jobs, names, Path(folder))
    took = time.monotonic() - started
    print("\n".join(f"{count:6,} {name}" for name, count in sorted(kinds.items())))
    codes = ", ".join(f"{count:,} × {code}" for code, count in sorted(exits.items()))
    print(
        f"{kinds.total():,} cases of {len(kinds)} kinds in {took:.0f} s, exit codes {codes}, "
        f"{len(faults)} failures"
    )
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
