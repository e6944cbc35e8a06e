"""`nf4conv compare`: do two checkpoints or diffusers pipelines hold the same tensors?

If not, it measures how far they are apart. Encoded tensors are compared by what they decode to, so
that the two checkpoints may be in different formats.

sources ▸ check/comparing.py (pairs of tensors) ▸ run ▸ report/compared.py

bytes     tensors that are stored alike, in host memory
values    tensors whose bytes differ, and those that are not stored alike
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from nf4conv import __version__
from nf4conv.check.comparing import ComparablePair, TensorPair, comparable, pair_tensors
from nf4conv.choose.wishes import unmatched
from nf4conv.declaring import after_two_places, narrowed
from nf4conv.errors import DiffusersFolderError, NoDiffusersFolderError, PlanError
from nf4conv.options import CompareOptions, MachineOptions, SourceOptions
from nf4conv.plan.diffusers import for_submodel, is_included
from nf4conv.report.compared import compared_kinds, compared_row
from nf4conv.report.measured import TensorDifference
from nf4conv.report.results.checks import ComparisonReport, ComparisonSettings
from nf4conv.report.rows.comparison import Status
from nf4conv.run.checkpoint import ignore
from nf4conv.run.comparing import compare_bytes, compare_values
from nf4conv.sources.diffusers.folder import DiffusersFolder, open_diffusers
from nf4conv.sources.opening import open_readable, open_source
from nf4conv.sources.source import Source

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class ComparisonPlan:
    """Two checkpoints whose headers have been looked at.

    Attributes:
        a: the first checkpoint, as a path or a name on the Hub.
        b: the second checkpoint, as a path or a name on the Hub.
        options: what was asked for.
        tensors: the tensors of each name.
        notes: lines that the user should read.
    """

    a: str
    b: str
    options: CompareOptions
    tensors: Mapping[str, TensorPair]
    notes: tuple[str, ...]

    @property
    def pairs(self) -> Mapping[str, ComparablePair]:
        """The tensors that both checkpoints have in one shape, by name."""
        return comparable(self.tensors)

    @property
    def bytes_to_read(self) -> int:
        """The bytes that are read if no tensor has to be read a second time, for its values."""
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())


@after_two_places(CompareOptions)
def compare(a: str | Path, b: str | Path, options: CompareOptions) -> ComparisonReport:
    """Compares two checkpoints, or two diffusers pipelines, tensor by tensor, in any format.

    Example:
        >>> nf4conv.compare("./ours-nf4", "./theirs-nf4", exclude=["lm_head.*"]).verdict
        'identical: 290 tensors, every byte'

    Args:
        a: a folder, a weight file, or "org/name" on the Hugging Face Hub.
        b: another.

    Returns:
        A row for each tensor, and the verdict.

    Raises:
        SourceError: one of the checkpoints cannot be read.
        OptionError: an option has a value that it cannot have.
        PlanError: the options make no sense together.
    """
    return compare_checkpoints(
        a,
        b,
        options,
        narrowed(options, MachineOptions),
        options.progress,
        narrowed(options, SourceOptions),
    )


def compare_checkpoints(
    a: str | Path,
    b: str | Path,
    options: CompareOptions | None = None,
    run: MachineOptions | None = None,
    progress: Callable[[int], None] | None = None,
    where: SourceOptions | None = None,
) -> ComparisonReport:
    """Compares two checkpoints, or two diffusers pipelines, tensor by tensor, in any format.

    Args:
        a: a folder, a weight file, or "org/name" on the Hugging Face Hub.
        b: another.
        options: which tensors to look at, and how large a difference passes.
        run: how to use the machine.
        progress: called with the number of bytes that have been read since the last call; from any
            thread.
        where: revision, subfolder, token and the like, for both.

    Returns:
        A row for each tensor, and the verdict. For diffusers pipelines, names begin with the
        submodel and a slash.

    Raises:
        SourceError: one of the checkpoints cannot be read.
        PlanError: the options make no sense, or only one of the two is a diffusers pipeline.

    Example:
        >>> report = nf4conv.compare_checkpoints("model", "model-again")
        >>> report.verdict
        'identical: 291 tensors, every byte'
    """
    plan = plan_comparison(a, b, options, where)
    return execute_comparison(plan, run, progress)


def plan_comparison(
    a: str | Path,
    b: str | Path,
    options: CompareOptions | None = None,
    where: SourceOptions | None = None,
) -> ComparisonPlan:
    """Looks at the headers of two checkpoints, without importing torch.

    Args:
        a: a folder, a weight file, or "org/name" on the Hugging Face Hub.
        b: another.
        options: which tensors to look at, and how large a difference passes.
        where: revision, subfolder, token and the like, for both.

    Returns:
        The plan, for `execute_comparison`. For diffusers pipelines, names of tensors begin with the
        submodel and a slash.

    Raises:
        SourceError: one of the checkpoints cannot be read.
        PlanError: the options make no sense, or only one of the two is a diffusers pipeline.

    Example:
        >>> plan = nf4conv.plan_comparison("model", "model-again")
        >>> plan.bytes_to_read
        5963415552
    """
    started = time.perf_counter()
    options = options or CompareOptions()
    sides = _open(a, b, options, where)
    tensors: dict[str, TensorPair] = {}
    for submodel, (source_a, source_b) in sides.submodels.items():
        if not submodel:
            tensors.update(pair_tensors(source_a, source_b, options))
            continue
        pairs = pair_tensors(source_a, source_b, for_submodel(submodel, options))
        for name, pair in pairs.items():
            tensors[f"{submodel}/{name}"] = pair
    if not tensors:
        raise PlanError("--include and --exclude leave no tensor to compare")
    notes = tuple(unmatched(options, sides.sources()))
    _log.info("paired %d tensors in %.1f s", len(tensors), time.perf_counter() - started)
    return ComparisonPlan(sides.a, sides.b, options, tensors, notes)


@dataclass(frozen=True)
class _Sides:
    """Two checkpoints that have been opened."""

    a: str  # the name of the first, for the report
    b: str  # the name of the second, for the report
    # the first and the second source of each submodel; of no pipeline, those of an empty name
    submodels: Mapping[str, tuple[Source | None, Source | None]]

    def sources(self) -> list[tuple[str, Source]]:
        """Returns every source with the name of its submodel."""
        found = []
        for name, (source_a, source_b) in self.submodels.items():
            if source_a is not None:
                found.append((name, source_a))
            if source_b is not None:
                found.append((name, source_b))
        return found


def _open(
    a: str | Path, b: str | Path, options: CompareOptions, where: SourceOptions | None
) -> _Sides:
    """Opens two checkpoints, or two diffusers pipelines."""
    try:
        source_a = open_source(a, where)
        source_b = open_source(b, where)
    except DiffusersFolderError:
        return _open_pipelines(a, b, options, where)
    return _Sides(str(source_a), str(source_b), {"": (source_a, source_b)})


def _open_pipelines(
    a: str | Path, b: str | Path, options: CompareOptions, where: SourceOptions | None
) -> _Sides:
    """Opens the submodels of two diffusers pipelines, in pairs of the same name."""
    folder_a = _open_pipeline(a, where)
    folder_b = _open_pipeline(b, where)
    submodels = {}
    for name in {**folder_a.submodels, **folder_b.submodels}:
        if is_included(name, options):
            submodels[name] = (_open_submodel(folder_a, name), _open_submodel(folder_b, name))
    return _Sides(str(a), str(b), submodels)


def _open_pipeline(side: str | Path, where: SourceOptions | None) -> DiffusersFolder:
    try:
        return open_diffusers(side, where)
    except NoDiffusersFolderError as error:
        raise PlanError(
            f"a diffusers pipeline can only be compared with a diffusers pipeline: {error}"
        ) from error


def _open_submodel(folder: DiffusersFolder, name: str) -> Source | None:
    if name not in folder.submodels:
        return None
    return open_readable(folder.place, folder.submodels[name])


def execute_comparison(
    plan: ComparisonPlan,
    run: MachineOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> ComparisonReport:
    """Compares the tensors of a plan.

    Args:
        plan: what `plan_comparison` returned.
        run: how to use the machine.
        progress: called with the number of bytes that have been read since the last call; from any
            thread.

    Returns:
        A row for each tensor, and the verdict.

    Raises:
        SourceError: one of the checkpoints cannot be read.
        PlanError: the options make no sense on this machine.

    Example:
        >>> plan = nf4conv.plan_comparison("model", "model-again")
        >>> nf4conv.execute_comparison(plan).passed
        True
    """
    started = time.perf_counter()
    results, device = _measure(plan, run or MachineOptions(), progress or ignore)
    tolerance = plan.options.tolerance
    rows = tuple(
        compared_row(name, pair, results.get(name), tolerance)
        for name, pair in plan.tensors.items()
    )
    found = Counter(row.status for row in rows)
    counts = {status: found[status] for status in Status if found[status]}
    settings = ComparisonSettings(
        tolerance=tolerance,
        include=tuple(plan.options.include),
        exclude=tuple(plan.options.exclude),
        device=device,
        nf4conv=__version__,
        torch=version("torch"),
    )
    return ComparisonReport(
        a=plan.a,
        b=plan.b,
        passed=all(row.passed for row in rows),
        notes=plan.notes,
        tensors=rows,
        kinds=tuple(compared_kinds(rows)),
        counts=counts,
        settings=settings,
        seconds=time.perf_counter() - started,
    )


def _measure(
    plan: ComparisonPlan, run: MachineOptions, progress: Callable[[int], None]
) -> tuple[dict[str, TensorDifference], str]:
    """Compares tensors by their bytes, and by their values where bytes differ.

    Returns:
        What was measured, by name; and the device that compared values.
    """
    results: dict[str, TensorDifference] = {}
    for name, pair in plan.pairs.items():
        a, b = pair.as_decoded()
        # compare_bytes clears this when it finds bytes that differ
        is_identical = True if pair.are_stored_alike() else None
        results[name] = TensorDifference(a, b, is_identical)
    stored_alike = [result for result in results.values() if result.is_identical]
    compare_bytes(stored_alike, run, progress)
    unlike = [result for result in results.values() if _needs_values(result)]
    if not unlike:
        return results, "cpu"
    return results, compare_values(unlike, run, progress)


def _needs_values(result: TensorDifference) -> bool:
    """Returns True if values must be compared. Of complex numbers only the bytes are compared."""
    if result.is_identical or not result.a.elements:
        return False
    return "C64" not in (result.a.dtype, result.b.dtype)
