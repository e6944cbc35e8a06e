"""Plants small faults in a copy of the package, and says which of them the tests find.

    git worktree add ../planted && cd ../planted
    python tests/helpers/planted_faults.py plant --seed 1 --count 80
    python tests/helpers/planted_faults.py reach -n 2 --dist loadgroup -m "not gpu and not browser"
    python tests/helpers/planted_faults.py find

`plant` rewrites nf4conv/ where it stands: never do that in a tree that is worth something. Every
fault stands beside the right expression, `(wrong if planted(7) else right)`, and is asleep unless
NF4CONV_PLANTED names it. So one run of all tests, by `reach`, tells which tests come by which
fault, in child processes too. `find` wakes one fault after the other, and runs the tests that come
by it, quick ones first, until one fails. Words behind `reach` are those of pytest.

planted/ then holds faults.json, reached.txt, tests.txt and found-1.json.

Kernels of Triton are left out, for Triton reads their source: `kernels` plants faults in these one
by one, and runs all tests of their room.
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "planted"

SWITCH: Final = '''\
"""Wakes the planted fault that NF4CONV_PLANTED names, or notes who comes by which."""

import os

_AWAKE = int(os.environ.get("NF4CONV_PLANTED", "0"))
_NOTES = os.environ.get("NF4CONV_REACHED")
_seen: set[tuple[int, str]] = set()


def planted(number: int) -> bool:
    if _NOTES is not None:
        key = (number, os.environ.get("PYTEST_CURRENT_TEST", "import").rsplit(" (", 1)[0])
        if key not in _seen:
            _seen.add(key)
            with open(_NOTES, "a") as notes:
                notes.write(f"{number} {key[1]}\\n")
    return number == _AWAKE
'''

COMPARISONS: Final = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
}

EASY: Final = ("isinstance", "getattr", "hasattr", "min", "max", "setattr", "issubclass", "gcd")
"""Functions whose arguments are not swapped: any test finds that, or none can."""

QUICK: Final = 30  # tests that are tried first
MOST: Final = 400  # tests that are tried at all, quick ones first
LONGEST: Final = 1200  # seconds that these tests may take; a test that hangs has found the fault


@dataclass(frozen=True)
class Fault:
    """An expression and the wrong one to take its place; offsets count UTF-8 bytes."""

    file: str
    line: int
    function: str
    kind: str
    right: str
    wrong: str
    start: int
    stop: int


def wrong_versions(source: str, node: ast.expr) -> Iterator[tuple[str, str]]:
    """Yields kinds of fault and wrong text in the place of an expression."""

    def text(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            other = COMPARISONS[type(op)]
            yield "comparison", f"({text(left)}) {other} ({text(right)})"
        case ast.BoolOp(op=op, values=[left, right]):
            other = "or" if isinstance(op, ast.And) else "and"
            yield "condition", f"({text(left)}) {other} ({text(right)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "condition", f"bool({text(operand)})"
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            other = "-" if isinstance(op, ast.Add) else "+"
            if not any(isinstance(side, ast.JoinedStr) for side in (left, right)):
                yield "sign", f"({text(left)}) {other} ({text(right)})"
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield "off by one", str(value + 1)
        case ast.Call(func=func, args=[first, second], keywords=[]) if text(func).rpartition(".")[
            2
        ] not in EASY and all(
            isinstance(argument, ast.Name | ast.Attribute) for argument in (first, second)
        ):
            yield "swapped arguments", f"{text(func)}({text(second)}, {text(first)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "condition", f"({text(orelse)}) if ({text(test)}) else ({text(body)})"


def candidates(path: Path) -> Iterator[Fault]:
    """Yields what could be planted in the functions of a module."""
    source = path.read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def fault(node: ast.expr, function: str, kind: str, wrong: str) -> Fault:
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        right = source.encode()[start:stop].decode()
        name = path.relative_to(ROOT).as_posix()
        return Fault(name, node.lineno, function, kind, right, wrong, start, stop)

    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in function.body:
            for node in _expressions(statement):
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                    yield fault(node.value, function.name, "dropped call", "None")
                elif isinstance(node, ast.expr):
                    for kind, wrong in wrong_versions(source, node):
                        yield fault(node, function.name, kind, wrong)


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what a fault may replace: nothing in text, types, errors or inner functions."""
    no_entry = (
        ast.JoinedStr, ast.FunctionDef, ast.ClassDef, ast.Raise, ast.Import, ast.ImportFrom,
        ast.Assert, ast.Yield, ast.YieldFrom, ast.Lambda,
    )  # fmt: skip
    if isinstance(node, no_entry):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "targets", "target", "patterns", "pattern"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _expressions(child)


def is_of_kernels(path: Path) -> bool:
    return "@triton.jit" in path.read_text()


def choose(seed: int, count: int, *, of_kernels: bool) -> list[Fault]:
    """Returns faults over all rooms, as many as they have lines, one in a function at most."""
    generator = random.Random(seed)
    by_room: dict[str, list[list[Fault]]] = defaultdict(list)
    lines: dict[str, int] = defaultdict(int)
    for path in sorted((ROOT / "nf4conv").rglob("*.py")):
        if is_of_kernels(path) != of_kernels:
            continue
        parts = path.relative_to(ROOT / "nf4conv").parts
        room = parts[0] if len(parts) > 1 else "top"
        lines[room] += len(path.read_text().splitlines())
        by_function: dict[str, list[Fault]] = defaultdict(list)
        for fault in candidates(path):
            by_function[fault.function].append(fault)
        by_room[room] += by_function.values()
    chosen = []
    for room, functions in sorted(by_room.items()):
        wanted = max(1, round(count * lines[room] / sum(lines.values())))
        for faults in generator.sample(functions, min(wanted, len(functions))):
            kinds = sorted({fault.kind for fault in faults})
            kind = generator.choice(kinds)  # else most would be of one kind
            chosen.append(generator.choice([fault for fault in faults if fault.kind == kind]))
    return chosen


def plant(faults: list[Fault]) -> None:
    """Writes all faults into the package, asleep, and their list into planted/."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / ".gitignore").write_text("*\n")
    (ROOT / "nf4conv" / "_planted.py").write_text(SWITCH)
    by_file: dict[str, list[tuple[int, Fault]]] = defaultdict(list)
    for number, fault in enumerate(faults, 1):
        by_file[fault.file].append((number, fault))
    for file, planted in by_file.items():
        content = (ROOT / file).read_bytes()
        for number, fault in sorted(planted, key=lambda entry: -entry[1].start):
            both = f"(({fault.wrong}) if _planted({number}) else ({fault.right}))"
            content = content[: fault.start] + both.encode() + content[fault.stop :]
        (ROOT / file).write_text(_with_import(content.decode()))
        compile((ROOT / file).read_text(), file, "exec")
    listed = [{"number": number} | asdict(fault) for number, fault in enumerate(faults, 1)]
    (FOLDER / "faults.json").write_text(json.dumps(listed, indent=1))


def _with_import(source: str) -> str:
    """Returns a module that knows `_planted`."""
    line = "from nf4conv._planted import planted as _planted\n"
    body = ast.parse(source).body
    behind = 0
    for statement in body[:2]:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if is_text or is_future:
            behind = statement.end_lineno or 0
    lines = source.splitlines(keepends=True)
    return "".join([*lines[:behind], line, *lines[behind:]])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes how long each test takes, and whether it passes: this module is a plugin of pytest."""
    notes = os.environ.get("NF4CONV_TESTS")
    # the controller of several processes hears of all tests once more
    is_heard_twice = "PYTEST_XDIST_WORKER" not in os.environ and hasattr(report, "node")
    if notes and report.when == "call" and not is_heard_twice:
        with Path(notes).open("a") as file:
            file.write(f"{report.duration:.3f} {report.outcome} {report.nodeid}\n")


def run_pytest(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    known = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    return subprocess.run(
        command, cwd=ROOT, env=known, capture_output=True, text=True, timeout=LONGEST
    )


def find(share: int, shares: int) -> None:
    """Wakes each fault of a share, and writes which test finds it."""
    faults = json.loads((FOLDER / "faults.json").read_text())
    times: dict[str, float] = {}
    failing = set()
    for line in (FOLDER / "tests.txt").read_text().splitlines():
        seconds, outcome, test = line.split(" ", 2)
        times[test] = float(seconds)
        if outcome == "failed":
            failing.add(test)
    reached = defaultdict(set)
    for line in (FOLDER / "reached.txt").read_text().splitlines():
        number, test = line.split(" ", 1)
        reached[int(number)].add(test)
    path = FOLDER / f"found-{share}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for fault in faults:
        number = fault["number"]
        if str(number) in found or number % shares != share - 1:
            continue
        tests = sorted((reached[number] & times.keys()) - failing, key=lambda test: times[test])
        found[str(number)] = fault | {"tests": len(tests), "found": _finder(number, tests)}
        path.write_text(json.dumps(found, indent=1))
        print(number, fault["file"], fault["line"], fault["kind"], found[str(number)]["found"])


def _finder(number: int, tests: list[str]) -> str | None:
    """Returns the first test that a fault makes fail; None if all of them pass."""
    for part in (tests[:QUICK], tests[QUICK:MOST]):
        if not part:
            continue
        words = FOLDER / f"words-{number}.txt"
        words.write_text("\n".join(part))
        try:
            done = run_pytest(["-x", f"@{words}"], NF4CONV_PLANTED=str(number))
        except subprocess.TimeoutExpired:
            return "no test ends"
        if done.returncode:
            lines = [line for line in done.stdout.splitlines() if line[:6] in ("FAILED", "ERROR ")]
            return lines[0].split(" - ")[0] if lines else done.stdout[-300:] + done.stderr[-300:]
    return None


def find_in_kernels(seed: int, count: int) -> None:
    """Plants faults in kernels, each alone, and runs the tests of their room."""
    found = []
    for fault in choose(seed, count, of_kernels=True):
        path = ROOT / fault.file
        right = path.read_bytes()
        path.write_bytes(right[: fault.start] + fault.wrong.encode() + right[fault.stop :])
        room = f"tests/{Path(fault.file).parts[1]}"
        try:
            done = run_pytest(["-x", "-m", "not gpu and not slow", room])
            lines = [line for line in done.stdout.splitlines() if line[:6] in ("FAILED", "ERROR ")]
            finder = lines[0].split(" - ")[0] if lines else None
        except subprocess.TimeoutExpired:
            finder = "no test ends"
        finally:
            path.write_bytes(right)
        found.append(asdict(fault) | {"found": finder})
        (FOLDER / "kernels.json").write_text(json.dumps(found, indent=1))
        print(fault.file, fault.line, fault.kind, finder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=["plant", "reach", "find", "kernels"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--share", default="1/1", help="I/N: the faults that `find` wakes")
    chosen, words = parser.parse_known_args()
    if chosen.step == "plant":
        plant(choose(chosen.seed, chosen.count, of_kernels=False))
    elif chosen.step == "reach":
        notes = {"NF4CONV_REACHED": str(FOLDER / "reached.txt")}
        notes |= {"NF4CONV_TESTS": str(FOLDER / "tests.txt")}
        paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])}
        os.environ.update(notes | paths | {"OMP_NUM_THREADS": "1"})
        command = [sys.executable, "-m", "pytest", "-q", "-p", "planted_faults", *words]
        subprocess.run(command, cwd=ROOT, check=False)
    elif chosen.step == "find":
        share, shares = (int(part) for part in chosen.share.split("/"))
        find(share, shares)
    else:
        find_in_kernels(chosen.seed, chosen.count)


if __name__ == "__main__":
    main()
