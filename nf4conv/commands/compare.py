"""`nf4conv compare`: do two checkpoints or diffusers pipelines hold the same tensors, or how far
are they apart?

Both are seen as what their encoded tensors decode to, so that a checkpoint can be compared with one
in another format.

Pipeline(byte tasks)     tensors that are stored alike, in host memory
Pipeline(value tasks)    those whose bytes differ, and those that are not stored alike
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

from nf4conv import __version__
from nf4conv.check.pairing import alike
from nf4conv.choose.wishes import is_wanted, unmatched
from nf4conv.errors import DiffusersFolderError, NoDiffusersFolderError, PlanError
from nf4conv.format.layout import DTYPE_NAMES
from nf4conv.options import CompareOptions, RunOptions, SourceOptions
from nf4conv.plan.diffusers import for_submodel, is_included
from nf4conv.report.measured import TensorDifference
from nf4conv.report.places import by_kind, place_of
from nf4conv.report.results import ComparisonReport
from nf4conv.report.rows import (
    ComparedKind,
    ComparedRow,
    Status,
    decibels,
    format_name,
    relative_error,
)
from nf4conv.report.tolerance import check_tolerance
from nf4conv.run.checkpoint import ignore
from nf4conv.run.engines import compare_values, host_engine
from nf4conv.run.loop import make_pipeline
from nf4conv.run.same_bytes import byte_tasks
from nf4conv.sources.diffusers_folder import DiffusersFolder, open_diffusers
from nf4conv.sources.source import Source, open_source
from nf4conv.sources.tensors import Bitsandbytes4bit, TensorInfo

TensorPairs = Mapping[str, tuple[TensorInfo | None, TensorInfo | None]]


@dataclass(frozen=True)
class ComparisonPlan:
    """Two checkpoints whose headers have been looked at."""

    a: str  # the one
    b: str  # the other
    options: CompareOptions  # what was asked for
    tensors: TensorPairs  # (in A, in B) of every name; None where there is none
    notes: tuple[str, ...]  # what the user should know

    @property
    def pairs(self) -> Mapping[str, tuple[TensorInfo, TensorInfo]]:
        """Tensors that are in both checkpoints, in one shape."""
        return {
            name: (a, b) for name, (a, b) in self.tensors.items() if a and b and a.shape == b.shape
        }

    @property
    def bytes_to_read(self) -> int:
        """If no tensor has to be read a second time, for its values."""
        return sum(a.nbytes + b.nbytes for a, b in self.pairs.values())


def compare_checkpoints(
    a: str | Path,
    b: str | Path,
    options: CompareOptions | None = None,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
    where: SourceOptions | None = None,
) -> ComparisonReport:
    """Compare two checkpoints, or two diffusers pipelines, tensor by tensor, whatever format each
    is in.

    Args:
        a: a folder, a weight file, or "org/name" on the Hugging Face Hub.
        b: another.
        options: what to look at, and what to let pass.
        run: how to use the machine.
        progress: told how many more bytes have been read, from any thread.
        where: revision, subfolder and the like, of both.

    Raises:
        SourceError: one of them cannot be read.
        PlanError: the request makes no sense, or only one of them is a diffusers pipeline.
    """
    return execute_comparison(plan_comparison(a, b, options, where), run, progress)


def plan_comparison(
    a: str | Path,
    b: str | Path,
    options: CompareOptions | None = None,
    where: SourceOptions | None = None,
) -> ComparisonPlan:
    """Look at the headers of two checkpoints; torch is not imported.

    Arguments and errors as `compare_checkpoints`. The names of a diffusers pipeline's tensors begin
    with the submodel and a slash.
    """
    options = options or CompareOptions()
    check_tolerance(options.tolerance)
    opened: dict[str, tuple[Source | None, Source | None]]
    try:
        one, other = open_source(a, where), open_source(b, where)
        a, b, opened = str(one), str(other), {"": (one, other)}
    except DiffusersFolderError:
        first, second = _open(a, where), _open(b, where)
        names = (
            name for name in {**first.submodels, **second.submodels} if is_included(name, options)
        )
        opened = {name: (_submodel(first, name), _submodel(second, name)) for name in names}
    tensors: dict[str, tuple[TensorInfo | None, TensorInfo | None]] = {}
    for name, sides in opened.items():
        pairs = _pair_tensors(*sides, for_submodel(name, options) if name else options)
        tensors |= {f"{name}/{tensor}" if name else tensor: pair for tensor, pair in pairs.items()}
    if not tensors:
        raise PlanError("--include and --exclude leave no tensor to compare")
    parts = [(name, side) for name, sides in opened.items() for side in sides if side is not None]
    return ComparisonPlan(str(a), str(b), options, tensors, tuple(unmatched(options, parts)))


def _open(side: str | Path, where: SourceOptions | None) -> DiffusersFolder:
    try:
        return open_diffusers(side, where)
    except NoDiffusersFolderError as error:
        raise PlanError(
            f"a diffusers pipeline can only be compared with a diffusers pipeline: {error}"
        ) from error


def _submodel(folder: DiffusersFolder, name: str) -> Source | None:
    return open_source(folder.place, folder.submodels[name]) if name in folder.submodels else None


def _pair_tensors(a: Source | None, b: Source | None, options: CompareOptions) -> TensorPairs:
    """The wanted tensors of two checkpoints, of which one may be absent."""
    first, second = (() if side is None else side.tensors for side in (a, b))
    in_a, in_b = (
        {
            name: tensor
            for name, tensor in side.items()
            if is_wanted(name, options.include, options.exclude)
        }
        for side in (alike(first, second), alike(second, first))
    )
    return {name: (in_a.get(name), in_b.get(name)) for name in [*in_a, *in_b]}


def execute_comparison(
    plan: ComparisonPlan,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> ComparisonReport:
    """Carry out a plan; arguments, result and errors as `compare_checkpoints`."""
    started = time.perf_counter()
    run, progress = run or RunOptions(), progress or ignore
    by_bytes = make_pipeline(host_engine(run), run, progress)
    results = {
        name: TensorDifference(
            _decoded_as(a, b), _decoded_as(b, a), True if _is_stored_alike(a, b) else None
        )
        for name, (a, b) in plan.pairs.items()
    }
    by_bytes.run(
        byte_tasks([result for result in results.values() if result.is_identical], by_bytes.piece)
    )
    unlike = [
        result
        for result in results.values()
        # of complex numbers only the bytes are compared
        if not result.is_identical
        and result.a.elements
        and "C64" not in (result.a.dtype, result.b.dtype)
    ]
    device = compare_values(unlike, run, progress) if unlike else "cpu"
    found = (_row(name, a, b, results.get(name)) for name, (a, b) in plan.tensors.items())
    rows = tuple(replace(row, passed=_passes(row, plan.options.tolerance)) for row in found)
    counts = Counter(row.status for row in rows)
    return ComparisonReport(
        a=plan.a,
        b=plan.b,
        passed=all(row.passed for row in rows),
        notes=plan.notes,
        tensors=rows,
        kinds=tuple(_kinds(rows)),
        counts={status: counts[status] for status in Status if counts[status]},
        settings={
            **asdict(plan.options),
            "device": device,
            "nf4conv": __version__,
            "torch": version("torch"),
        },
        seconds=time.perf_counter() - started,
    )


def _decoded_as(tensor: TensorInfo, other: TensorInfo) -> TensorInfo:
    """A packed weight decodes to the dtype of what it is compared with: by way of its own, it would
    round twice.
    """
    is_packed = isinstance(tensor.encoding, Bitsandbytes4bit)
    is_plain_float = other.encoding is None and other.dtype in DTYPE_NAMES
    return tensor._replace(dtype=other.dtype) if is_packed and is_plain_float else tensor


def _is_stored_alike(a: TensorInfo, b: TensorInfo) -> bool:
    """Whether equal bytes are all that is needed for equal tensors."""
    if a.dtype != b.dtype or a.encoding is None or b.encoding is None:
        return a.dtype == b.dtype and a.encoding is b.encoding
    return a.encoding.decodes_like(b.encoding) and _layout(a) == _layout(b)


def _layout(tensor: TensorInfo) -> list[tuple[object, ...]]:
    """Roles, dtypes and shapes of what a tensor is decoded from; codes may be [n, 1] or [1, n]."""
    parts = () if tensor.encoding is None else tensor.encoding.parts
    return [(role, part.dtype, [size for size in part.shape if size != 1]) for role, part in parts]


def _row(
    name: str, a: TensorInfo | None, b: TensorInfo | None, result: TensorDifference | None
) -> ComparedRow:
    tensor = a or b
    assert tensor is not None
    row = ComparedRow(
        name=name,
        **place_of(name)._asdict(),
        parameters=tensor.elements,
        format_a=None if a is None else _format(a),
        format_b=None if b is None else _format(b),
        shape_a=None if a is None else a.shape,
        shape_b=None if b is None else b.shape,
        status=_status(a, b, result),
    )
    if result is None or result.difference is None:
        return row
    error = relative_error(result.difference.squared_difference, result.difference.squared_values)
    return replace(row, relative_error=error, snr_db=decibels(error), **result.difference._asdict())


def _status(a: TensorInfo | None, b: TensorInfo | None, result: TensorDifference | None) -> Status:
    if result is None:
        return Status.ONLY_B if a is None else Status.ONLY_A if b is None else Status.SHAPE
    found = result.difference
    if found is not None:
        return Status.DIFFERENT if found.differing else Status.EQUAL
    if result.is_identical:
        return Status.IDENTICAL
    return Status.DIFFERENT if result.a.elements else Status.EQUAL


def _format(tensor: TensorInfo) -> str:
    """How a tensor is stored, in a few words."""
    encoding = tensor.encoding
    if encoding is None:
        return DTYPE_NAMES.get(tensor.dtype, tensor.dtype)
    if isinstance(encoding, Bitsandbytes4bit):
        return format_name(encoding.quant_type, encoding.double_quant, encoding.blocksize)
    return encoding.name


def _passes(row: ComparedRow, tolerance: float | None) -> bool:
    if row.status is Status.IDENTICAL or tolerance is None:
        return row.status is Status.IDENTICAL
    return row.status is Status.EQUAL or (
        row.relative_error is not None and row.relative_error <= tolerance
    )


def _kinds(rows: Sequence[ComparedRow]) -> Iterator[ComparedKind]:
    """Totals of the tensors of one kind in one stack of layers."""
    for stack, kind, members in by_kind(rows, lambda row: row):
        errors = [row.relative_error for row in members if row.relative_error is not None]
        squared_difference = math.fsum(row.squared_difference or 0.0 for row in members)
        squared_values = math.fsum(row.squared_values or 0.0 for row in members)
        yield ComparedKind(
            stack=stack,
            kind=kind,
            tensors=len(members),
            parameters=sum(row.parameters for row in members),
            identical=sum(row.status is Status.IDENTICAL for row in members),
            differing=sum(row.differing or 0 for row in members),
            relative_error=relative_error(squared_difference, squared_values) if errors else None,
            largest_relative_error=max(errors, default=None),
        )
