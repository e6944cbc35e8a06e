"""Plants small faults in the package, one at a time, and says which of them the tests find.

    git worktree add ../planted && cd ../planted
    python tests/helpers/planted_faults.py --seed 1 --count 80 --json found.json [--kernels]

Each fault is written into nf4conv/ where it stands (never do that in a tree that is worth
something), the tests of its room and test_quick.py run until one fails, and the file is put back.
Faults are in all rooms, as many as these have lines; with --kernels they are in kernels of Triton
alone. planted_faults.json keeps the last run, and why nothing found what is left of it.
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
from typing import Final

ROOT: Final = Path(__file__).parents[2]

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

LONGEST: Final = 1200  # seconds that tests may take; a test that hangs has found the fault


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
        room = room_of(path)
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


def room_of(path: Path) -> str:
    """Returns the room of a module, "top" for those beside the rooms."""
    parts = path.relative_to(ROOT / "nf4conv").parts
    return parts[0] if len(parts) > 1 else "top"


def finder_of(fault: Fault) -> str | None:
    """Plants a fault and runs tests. Returns the one that fails, or None if all of them pass."""
    path = ROOT / fault.file
    room = ROOT / "tests" / room_of(path)
    right = path.read_bytes()
    wrong = f"({fault.wrong})".encode()
    known = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-qx", "-m", "not gpu and not browser and not slow"]
    command += ["tests/test_quick.py", *([str(room)] if room.is_dir() else [])]
    path.write_bytes(right[: fault.start] + wrong + right[fault.stop :])
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=known, capture_output=True, text=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return "no test ends"
    finally:
        path.write_bytes(right)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line[:6] in ("FAILED", "ERROR ")]
    return lines[0].split(" - ")[0] if lines else done.stdout[-300:] + done.stderr[-300:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    chosen = parser.parse_args()
    faults = []
    for fault in choose(chosen.seed, chosen.count, of_kernels=chosen.kernels):
        faults.append(asdict(fault) | {"found": finder_of(fault)})
        print(fault.file, fault.line, fault.kind, faults[-1]["found"], flush=True)
        found = sum(one["found"] is not None for one in faults)
        record = {"seed": chosen.seed, "planted": len(faults), "found": found, "faults": faults}
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
