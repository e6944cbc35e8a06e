"""`nf4conv compare`: do two checkpoints hold the same tensors, and if not, how far are they apart?

Both are seen as what their encoded tensors decode to, so that a checkpoint can be compared with one in another format.

Pipeline(byte tasks)     tensors that are stored alike
Pipeline(value tasks)    those whose bytes differ, and those that are not stored alike
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from nf4conv import __version__
from nf4conv.checkpoint.header import TensorInfo
from nf4conv.checkpoint.pairing import alike
from nf4conv.checkpoint.selection import is_wanted
from nf4conv.checkpoint.source import Source, open_source
from nf4conv.codec.layout import DTYPE_NAMES, QUANT_STATE_PREFIX
from nf4conv.errors import PlanError
from nf4conv.options import CompareOptions, RunOptions, SourceOptions
from nf4conv.output import ignore
from nf4conv.pipeline import make_pipeline
from nf4conv.results import TensorDifference, decibels, place_of, relative_error

IDENTICAL: Final = "identical"
EQUAL: Final = "equal in value"
DIFFERENT: Final = "different"
ONLY_A: Final = "only in A"
ONLY_B: Final = "only in B"
SHAPE: Final = "another shape"

_STATUSES: Final = (ONLY_A, ONLY_B, SHAPE, DIFFERENT, EQUAL, IDENTICAL)
_WITHOUT_VALUES: Final = ("C64",)
"""Dtypes of which only the bytes are compared."""

TensorPairs = Mapping[str, tuple[TensorInfo | None, TensorInfo | None]]


@dataclass(frozen=True)
class ComparisonPlan:
    """Two checkpoints whose headers have been looked at.

    Attributes:
        a: the one.
        b: the other.
        options: what was asked for.
        tensors: (in A, in B) of every name; None where there is none.
    """

    a: str
    b: str
    options: CompareOptions
    tensors: TensorPairs

    @property
    def pairs(self) -> Mapping[str, tuple[TensorInfo, TensorInfo]]:
        """Those that are in both, in one shape."""
        return {name: (a, b) for name, (a, b) in self.tensors.items() if a and b and a.shape == b.shape}

    @property
    def bytes_to_read(self) -> int:
        """If no tensor has to be read a second time, for its values."""
        return sum(a.nbytes + b.nbytes for a, b in self.pairs.values())


@dataclass(frozen=True)
class ComparisonReport:
    """What a comparison found.

    Attributes:
        a: the one checkpoint.
        b: the other.
        passed: the verdict.
        tensors: a row for each: name, place, status, format and shape in both, whether that is let pass, and where
            the bytes differ, how many values do, and how far they are apart.
        kinds: the same added up by kind of module.
        counts: tensors by status.
        settings: options, device and versions.
        seconds: wall clock.
    """

    a: str
    b: str
    passed: bool
    tensors: tuple[Mapping[str, Any], ...]
    kinds: tuple[Mapping[str, Any], ...]
    counts: Mapping[str, int]
    settings: Mapping[str, Any]
    seconds: float

    @property
    def verdict(self) -> str:
        """One line."""
        total = len(self.tensors)
        if self.counts.get(IDENTICAL) == total:
            return f"identical: {total:,} tensors, every byte"
        counted = ", ".join(f"{count:,} {status}" for status, count in self.counts.items())
        errors = [row["relative_error"] for row in self.tensors if row["relative_error"] is not None]
        worst = f"; largest relative error {max(errors):.4g}" if errors else ""
        if not self.passed and self.counts.keys() <= {EQUAL, IDENTICAL}:
            worst += " (--tolerance 0 lets these pass)"
        return f"{'within tolerance' if self.passed else 'DIFFERENT'}: {counted}{worst}"


def plan_comparison(
    a: str | Path, b: str | Path, options: CompareOptions | None = None, where: SourceOptions | None = None
) -> ComparisonPlan:
    """Look at the headers of two checkpoints; torch is not imported.

    Args:
        a: a folder, a weight file, or "org/name" on the Hugging Face Hub.
        b: another.
        options: what to look at, and what to let pass.
        where: revision, subfolder and the like, of both.

    Raises:
        SourceError: one of them cannot be read.
        PlanError: the request makes no sense.
    """
    options = options or CompareOptions()
    check_options(options)
    first, second = open_source(a, where), open_source(b, where)
    return make_plan(str(first), str(second), options, pair_tensors(first, second, options))


def check_options(options: CompareOptions) -> None:
    """Refuse, before anything is opened, what makes no sense: with a PlanError."""
    if options.tolerance is not None and not options.tolerance >= 0:
        raise PlanError(f"--tolerance {options.tolerance}: expected a relative error such as 0.1")


def make_plan(a: str, b: str, options: CompareOptions, tensors: TensorPairs) -> ComparisonPlan:
    """Complete a plan.

    Raises:
        PlanError: there is nothing to compare.
    """
    if not tensors:
        raise PlanError("--include and --exclude leave no tensor to compare")
    return ComparisonPlan(a, b, options, tensors)


def pair_tensors(a: Source | None, b: Source | None, options: CompareOptions) -> TensorPairs:
    """The wanted tensors of two checkpoints, of which one may be absent."""
    first, second = (() if side is None else side.tensors for side in (a, b))
    in_a, in_b = (
        {name: tensor for name, tensor in side.items() if is_wanted(name, options.include, options.exclude)}
        for side in (alike(first, second), alike(second, first))
    )
    return {name: (in_a.get(name), in_b.get(name)) for name in [*in_a, *in_b]}


def compare_checkpoints(
    a: str | Path,
    b: str | Path,
    options: CompareOptions | None = None,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
    where: SourceOptions | None = None,
) -> ComparisonReport:
    """Compare two checkpoints tensor by tensor, whatever format each is in.

    Args:
        a: a folder, a weight file, or "org/name" on the Hugging Face Hub.
        b: another.
        options: what to look at, and what to let pass.
        run: how to use the machine.
        progress: told how many more bytes have been read, from any thread.
        where: revision, subfolder and the like, of both.

    Raises:
        SourceError: one of them cannot be read.
        PlanError: the request makes no sense.
    """
    from nf4conv.components import plan_comparing  # which builds on this

    return execute_comparison(plan_comparing(a, b, options, where), run, progress)


def execute_comparison(
    plan: ComparisonPlan, run: RunOptions | None = None, progress: Callable[[int], None] | None = None
) -> ComparisonReport:
    """Carry out a plan; arguments, result and errors as `compare_checkpoints`."""
    from nf4conv.difference import byte_tasks, value_tasks
    from nf4conv.worker import TorchEngine

    started = time.perf_counter()
    pipeline = make_pipeline(TorchEngine((run or RunOptions()).device), run or RunOptions(), progress or ignore)
    results = {
        name: TensorDifference(a, b, True if _is_stored_alike(a, b) else None) for name, (a, b) in plan.pairs.items()
    }
    pipeline.run(byte_tasks([result for result in results.values() if result.is_identical], pipeline.piece))
    unlike = [result for result in results.values() if not result.is_identical and _has_values(result)]
    pipeline.run(value_tasks(unlike, pipeline.piece))
    found = (
        _row(name, results[name]) if name in results else _unpaired_row(name, a, b)
        for name, (a, b) in plan.tensors.items()
    )
    rows = tuple({**row, "passed": _passes(row, plan.options.tolerance)} for row in found)
    counts = Counter(row["status"] for row in rows)
    return ComparisonReport(
        a=plan.a,
        b=plan.b,
        passed=all(row["passed"] for row in rows),
        tensors=rows,
        kinds=tuple(_kinds(rows)),
        counts={status: counts[status] for status in _STATUSES if counts[status]},
        settings={**asdict(plan.options), "device": pipeline.device, "nf4conv": __version__, "torch": version("torch")},
        seconds=time.perf_counter() - started,
    )


def _is_stored_alike(a: TensorInfo, b: TensorInfo) -> bool:
    """Whether equal bytes are all that is needed for equal tensors."""
    if a.dtype != b.dtype or a.encoding is None or b.encoding is None:
        return a.dtype == b.dtype and a.encoding is b.encoding
    return a.encoding[::2] == b.encoding[::2] and _layout(a) == _layout(b)


def _layout(tensor: TensorInfo) -> list[tuple[object, ...]]:
    """Roles, dtypes and shapes of what a tensor is decoded from; codes may be [n, 1] or [1, n]."""
    parts = () if tensor.encoding is None else tensor.encoding.parts
    return [(role, part.dtype, [size for size in part.shape if size != 1]) for role, part in parts]


def _has_values(result: TensorDifference) -> bool:
    return result.a.dtype not in _WITHOUT_VALUES and result.b.dtype not in _WITHOUT_VALUES


def _row(name: str, result: TensorDifference) -> dict[str, Any]:
    found = result.difference
    status = IDENTICAL if result.is_identical else DIFFERENT
    error = None
    if found is not None:
        status = DIFFERENT if found.differing else EQUAL
        error = relative_error(found.squared_difference, found.squared_values)
    elif not result.is_identical and result.a.elements == 0:
        status = EQUAL
    return {
        **_described(name, result.a, result.b),
        "status": status,
        "differing": None if found is None else found.differing,
        "relative_error": error,
        "snr_db": None if error is None else decibels(error),
        "largest": None if found is None else found.largest,
        "squared_difference": None if found is None else found.squared_difference,
        "squared_values": None if found is None else found.squared_values,
    }


def _unpaired_row(name: str, a: TensorInfo | None, b: TensorInfo | None) -> dict[str, Any]:
    figures = ("differing", "relative_error", "snr_db", "largest", "squared_difference", "squared_values")
    status = ONLY_B if a is None else ONLY_A if b is None else SHAPE
    return {**_described(name, a, b), "status": status, **dict.fromkeys(figures)}


def _described(name: str, a: TensorInfo | None, b: TensorInfo | None) -> dict[str, Any]:
    tensor = a or b
    assert tensor is not None
    return {
        "name": name,
        **place_of(name)._asdict(),
        "elements": tensor.elements,
        "format_a": None if a is None else _format(a),
        "format_b": None if b is None else _format(b),
        "shape_a": None if a is None else list(a.shape),
        "shape_b": None if b is None else list(b.shape),
    }


def _format(tensor: TensorInfo) -> str:
    """How a tensor is stored, in a few words."""
    if tensor.encoding is None:
        return DTYPE_NAMES.get(tensor.dtype, tensor.dtype)
    roles = [role for role, _ in tensor.encoding.parts]
    tag = next((role.removeprefix(QUANT_STATE_PREFIX) for role in roles if role.startswith(QUANT_STATE_PREFIX)), None)
    if tag is None:
        return tensor.encoding.method
    return f"{tag}{'+' if 'nested_absmax' in roles else ''}/{tensor.encoding.block[0]}"


def _passes(row: Mapping[str, Any], tolerance: float | None) -> bool:
    status: str = row["status"]
    if status == IDENTICAL or tolerance is None:
        return status == IDENTICAL
    error: float | None = row["relative_error"]
    return status == EQUAL or (error is not None and error <= tolerance)


def _kinds(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Totals of the tensors of one kind in one stack of layers."""
    groups: defaultdict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["stack"], row["kind"]].append(row)
    for (stack, kind), members in groups.items():
        compared = [row for row in members if row["relative_error"] is not None]
        squares = (math.fsum(row[name] for row in compared) for name in ("squared_difference", "squared_values"))
        yield {
            "stack": stack,
            "kind": kind,
            "tensors": len(members),
            "elements": sum(row["elements"] for row in members),
            "identical": sum(row["status"] == IDENTICAL for row in members),
            "differing": sum(row["differing"] or 0 for row in compared),
            "relative_error": relative_error(*squares) if compared else None,
            "worst": max((row["relative_error"] for row in compared), default=None),
        }
