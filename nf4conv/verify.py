"""`nf4conv verify`: is a 4-bit checkpoint sound, and does it hold what its source holds?

read_structure ▸ check_config ▸ pair            headers, small tensors and config: written against the format
Pipeline(scale, weight and copy tasks)          every byte, where there is a source
report                                          every check with its findings, and a figure for every weight
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from nf4conv import __version__
from nf4conv.checkpoint.checksums import check_checksums
from nf4conv.checkpoint.config_check import check_config
from nf4conv.checkpoint.findings import CHECKS, Finding
from nf4conv.checkpoint.pairing import Pairs, pair
from nf4conv.checkpoint.source import Source, open_source
from nf4conv.checkpoint.structure import Structure, read_structure
from nf4conv.errors import PlanError
from nf4conv.options import RunOptions, SourceOptions, VerifyOptions
from nf4conv.output import ignore
from nf4conv.pipeline import make_pipeline
from nf4conv.results import CopyResult, WeightResult, place_of
from nf4conv.tolerance import TOLERANCES

_STRUCTURAL = (
    "files", "index", "components", "quant state", "layout", "one shard", "code maps", "uniform", "config",
    "skip list", "scales",
)  # fmt: skip
_WITH_SOURCE = ("names", "copies", "codes", "bound", "tolerance")


@dataclass(frozen=True)
class VerificationPlan:
    """A checkpoint whose headers have been looked at.

    Attributes:
        path: as it was given.
        options: what was asked for.
        structure: the checkpoint, with what is wrong with it so far.
        config: the content of its config.json; empty if there is none.
        source: what it was made from; None if that was not given.
        pairs: what is to be compared; empty without a source.
    """

    path: Path
    options: VerifyOptions
    structure: Structure
    config: Mapping[str, Any]
    source: Source | None
    pairs: Pairs

    @property
    def bytes_to_read(self) -> int:
        """Of scales, and with a source of everything."""
        scales = sum(weight.nbytes - weight.values.nbytes for weight in self.structure.weights.values())
        weights = sum(weight.nbytes + job.source_bytes for weight, job in self.pairs.weights)
        return scales + weights + sum(stored.nbytes + source.nbytes for stored, source in self.pairs.copies)


@dataclass(frozen=True)
class VerifyReport:
    """What verification found.

    Attributes:
        path: the checkpoint.
        source: what it was compared with; None if nothing.
        passed: the verdict.
        checks: for each check that ran, by name: what it means, and whether it passed.
        findings: everything that is wrong or worth knowing; a fault has is_fault.
        weights: a row for each packed weight: place, size, format and, with a source, its errors.
        kinds: the same added up by kind of module.
        sizes: bytes of codes, of scales, of tables and JSON, and of tensors that are not packed.
        parameters: elements of all tensors.
        bits_per_parameter: of the whole checkpoint.
        identical: whether every byte compared is what quantizing the source gives; None without a source.
        settings: options, device and versions.
        seconds: wall clock.
    """

    path: str
    source: str | None
    passed: bool
    checks: Mapping[str, Mapping[str, Any]]
    findings: tuple[Finding, ...]
    weights: tuple[Mapping[str, Any], ...]
    kinds: tuple[Mapping[str, Any], ...]
    sizes: Mapping[str, int]
    parameters: int
    bits_per_parameter: float
    identical: bool | None
    settings: Mapping[str, Any]
    seconds: float

    @property
    def verdict(self) -> str:
        """One line."""
        faults = sum(finding.is_fault for finding in self.findings)
        compared = [weight["relative_error"] for weight in self.weights if weight["relative_error"] is not None]
        worst = f"largest relative error {max(compared):.4f}" if compared else "not compared with a source"
        if self.passed:
            same = ", byte for byte what quantizing the source gives" if self.identical else ""
            return f"passed: {len(self.weights):,} packed weights, {worst}{same}"
        return f"FAILED: {faults:,} fault{'s' if faults != 1 else ''} in {len(self.weights):,} packed weights, {worst}"


def plan_verification(
    path: str | Path,
    source: str | Path | None = None,
    options: VerifyOptions | None = None,
    where: SourceOptions | None = None,
    *,
    is_component: bool = False,
) -> VerificationPlan:
    """Look at the headers of a checkpoint, and find out what is to be compared; torch is not imported.

    Args:
        path: a folder or a .safetensors file.
        source: what it was made from: a folder, a file, or "org/name" on the Hugging Face Hub.
        options: what to require.
        where: of a source on the Hub.
        is_component: of a pipeline, in some of which nothing is packed.

    Raises:
        SourceError: there are no weights, or the source cannot be read.
        PlanError: the request makes no sense.
    """
    options = options or VerifyOptions()
    if options.tolerance is not None and not options.tolerance >= 0:
        raise PlanError(f"--tolerance {options.tolerance}: expected a relative error such as 0.1")
    if source is None and (options.exact or options.tolerance is not None):
        raise PlanError("--exact and --tolerance compare with the source: give --source")
    structure = read_structure(Path(path))
    config = check_config(structure) if structure.weights or not is_component else {}
    if not structure.weights and not structure.findings and not is_component:
        structure.note("components", "", "", f"{path}: nothing in it is in 4 bits")
    opened = None if source is None else open_source(source, where)
    pairs = Pairs() if opened is None else pair(structure, opened)
    return VerificationPlan(Path(path), options, structure, config, opened, pairs)


def verify_checkpoint(
    path: str | Path,
    source: str | Path | None = None,
    options: VerifyOptions | None = None,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Verify a 4-bit checkpoint, of ours or of another tool.

    Args:
        path: a folder or a .safetensors file.
        source: what it was made from; without it only what the checkpoint says about itself is verified.
        options: what to require.
        run: how to use the machine.
        progress: told how many more bytes have been read, from any thread.

    Raises:
        SourceError: there are no weights, or the source cannot be read. Faults of the checkpoint are no errors but
            findings of the report.
        PlanError: the request makes no sense.
    """
    from nf4conv.components import execute_verifying, plan_verifying  # which build on this

    return execute_verifying(plan_verifying(path, source, options), run, progress)


def execute_verification(
    plan: VerificationPlan, run: RunOptions | None = None, progress: Callable[[int], None] | None = None
) -> VerifyReport:
    """Carry out a plan; arguments and result as `verify_checkpoint`."""
    from nf4conv.check import copy_tasks, scale_tasks, weight_tasks
    from nf4conv.worker import TorchEngine

    started = time.perf_counter()
    run = run or RunOptions()
    pipeline = make_pipeline(TorchEngine(run.device), run, progress or ignore)
    results = {name: WeightResult(weight) for name, weight in plan.structure.weights.items()}
    copies = {stored.name: CopyResult(stored) for stored, _ in plan.pairs.copies}
    with_checksums = check_checksums(plan.structure, pipeline.workers)
    pipeline.run(
        chain(
            scale_tasks(results, pipeline.piece),
            weight_tasks(plan.pairs, results, pipeline.piece),
            copy_tasks(plan.pairs, copies, pipeline.piece),
        )
    )
    for result in results.values():
        for check, text in weight_faults(result, plan.options):
            plan.structure.note(check, result.weight.values.file, result.weight.name, text)
    for copy in copies.values():
        if copy.differing:
            text = f"{copy.differing:,} of {copy.tensor.elements:,} values are not the source's"
            plan.structure.note("copies", copy.tensor.file, copy.tensor.name, text)
    return _report(plan, results, with_checksums, pipeline.device, time.perf_counter() - started)


def weight_faults(result: WeightResult, options: VerifyOptions) -> Iterator[tuple[str, str]]:
    """(check, text) of everything that is wrong with a weight's values."""
    state, errors, scales = result.weight.state, result.errors, result.scales
    if result.improper:
        yield "scales", f"{result.improper:,} scales are infinite, NaN or negative"
    if errors is None or scales is None:
        return
    if scales.wrong:
        yield "scales", f"{scales.wrong:,} scales do not follow from the source; the first is of block {scales.first:,}"
    if scales.wrong_nested:
        yield "scales", f"{scales.wrong_nested:,} nested scales, or the offset, do not follow from the source"
    if errors.not_nearest:
        yield "codes", f"{errors.not_nearest:,} of {result.weight.elements:,} codes are not the nearest"
    if errors.outside:
        yield "bound", f"{errors.outside:,} values are beyond the worst case of {state.quant_type}"
    error, tolerance = result.relative_error, _tolerance(result, options)
    if error is None or not error <= tolerance:
        yield "tolerance", f"relative error {error:.4f}, more than {tolerance:g}"
    if options.exact and errors.differing + scales.differing:
        yield "exact", f"{errors.differing:,} bytes of codes and {scales.differing:,} of scales differ"


def _tolerance(result: WeightResult, options: VerifyOptions) -> float:
    if options.tolerance is not None:
        return options.tolerance
    state = result.weight.state
    return TOLERANCES[state.quant_type][state.blocksize]


def _report(
    plan: VerificationPlan,
    results: Mapping[str, WeightResult],
    with_checksums: bool,
    device: str,
    seconds: float,
) -> VerifyReport:
    structure = plan.structure
    findings = tuple(sorted(structure.findings, key=lambda finding: list(CHECKS).index(finding.check)))
    rows = tuple(weight_row(result, plan.options) for result in results.values())
    sizes = _sizes(structure)
    parameters = sum(weight.elements for weight in structure.weights.values())
    parameters += sum(tensor.elements for tensor in structure.plain.values())
    compared = [result for result in results.values() if result.errors is not None and result.scales is not None]
    identical = None
    if plan.source is not None:
        identical = len(compared) == len(results) and not any(_differing(result) for result in compared)
    return VerifyReport(
        path=str(plan.path),
        source=None if plan.source is None else str(plan.source.folder),
        passed=not any(finding.is_fault for finding in findings),
        checks=_checks(plan, findings, with_checksums),
        findings=findings,
        weights=rows,
        kinds=tuple(_kinds(rows)),
        sizes=sizes,
        parameters=parameters,
        bits_per_parameter=8 * sum(sizes.values()) / max(parameters, 1),
        identical=identical,
        settings={
            "tolerance": plan.options.tolerance if plan.options.tolerance is not None else "default",
            "exact": plan.options.exact,
            "device": device,
            "nf4conv": __version__,
            "torch": version("torch"),
        },
        seconds=seconds,
    )


def _differing(result: WeightResult) -> int:
    assert result.errors is not None
    assert result.scales is not None
    return result.errors.differing + result.scales.differing


def _checks(plan: VerificationPlan, findings: tuple[Finding, ...], with_checksums: bool) -> dict[str, dict[str, Any]]:
    ran = {*_STRUCTURAL}
    if with_checksums:
        ran.add("checksums")
    if plan.source is not None:
        ran.update(_WITH_SOURCE)
    if plan.options.exact:
        ran.add("exact")
    failed = {finding.check for finding in findings if finding.is_fault}
    return {
        name: {"meaning": meaning, "passed": name not in failed}
        for name, meaning in CHECKS.items()
        if name in ran or name in failed
    }


def weight_row(result: WeightResult, options: VerifyOptions) -> dict[str, Any]:
    weight, errors, place = result.weight, result.errors, place_of(result.weight.name)
    return {
        "name": weight.name,
        **place._asdict(),
        "file": weight.values.file.name,
        **asdict(weight.state),
        "double_quant": weight.is_nested,
        "elements": weight.elements,
        "bytes": weight.nbytes,
        "relative_error": result.relative_error,
        "tolerance": _tolerance(result, options),
        "snr_db": result.snr_db,
        "max_error": None if errors is None else errors.max_error,
        "max_error_of_absmax": None if errors is None else errors.max_relative_error,
        "outside": None if errors is None else errors.outside,
        "not_nearest": None if errors is None else errors.not_nearest,
        "bytes_differing": None if errors is None or result.scales is None else _differing(result),
        "squared_error": None if errors is None else errors.squared_error,
        "squared_weight": None if errors is None else errors.squared_weight,
    }


def _kinds(rows: tuple[Mapping[str, Any], ...]) -> Iterator[dict[str, Any]]:
    """Totals of the weights of one kind in one stack of layers."""
    groups: defaultdict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["stack"], row["kind"]].append(row)
    for (stack, kind), members in groups.items():
        errors = [row["relative_error"] for row in members if row["relative_error"] is not None]
        squared = [(row["squared_error"], row["squared_weight"]) for row in members if row["squared_error"] is not None]
        weight = math.fsum(pair[1] for pair in squared)
        yield {
            "stack": stack,
            "kind": kind,
            "weights": len(members),
            "elements": sum(row["elements"] for row in members),
            "bytes": sum(row["bytes"] for row in members),
            "relative_error": math.sqrt(math.fsum(pair[0] for pair in squared) / weight) if weight else None,
            "worst": max(errors, default=None),
        }


def _sizes(structure: Structure) -> dict[str, int]:
    sizes = {"codes": 0, "scales": 0, "tables and JSON": 0, "not packed": 0}
    for weight in structure.weights.values():
        sizes["codes"] += weight.values.nbytes
        for suffix, part in weight.components.items():
            sizes["scales" if suffix in ("absmax", "nested_absmax") else "tables and JSON"] += part.nbytes
    sizes["not packed"] = sum(tensor.nbytes for tensor in structure.plain.values())
    return sizes
