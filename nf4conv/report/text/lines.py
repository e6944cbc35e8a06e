"""Shows the results of all commands as lines of text."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from nf4conv.check.structure import Finding
from nf4conv.format.units import duration, size
from nf4conv.plan.writing import NO_CONFIG
from nf4conv.report.results import (
    Environment,
    Evaluations,
    Inspection,
    PlanReport,
    RunReport,
    VerifyReport,
    folder_name,
    grouped,
)
from nf4conv.report.text.terminal import count_cell, error_cell, printable, shortened, table
from nf4conv.sources.record import recorded_weights

_MOST_LINES: Final = 16  # about what is wrong: with the verdict they fit on a screen
_LONGEST_NAME: Final = 24  # of a column

_SCALES: Final = {"search": "searched scales", "calibrated": "calibrated"}
"""Words for scales that are not absmax, as users read them."""


def lines_of(result: Any, width: int | None, *, every: bool) -> Iterator[str]:
    """Yields what a terminal of this width shows of a result; of a file or pipe, names in full.

    `every` adds to a verification what passed, too.
    """
    if isinstance(result, VerifyReport):
        return verification_lines(result, width, every=every)
    if isinstance(result, RunReport):
        return run_lines(result)
    if isinstance(result, PlanReport):
        return plan_lines(result, width)
    if isinstance(result, Inspection):
        return inspection_lines(result, width)
    if isinstance(result, Evaluations):
        return evaluation_lines(result, width)
    return environment_lines(result)


# --- quantize and dequantize ---


def plan_lines(plan: PlanReport, width: int | None) -> Iterator[str]:
    """Yields the totals, what becomes of each kind of module, and what is unusual."""
    totals = plan.totals
    made = f"{totals.decoded:,} weights decoded"
    if plan.command == "quantize":
        made = f"{totals.packed:,} weights packed"
    yield f"{made}, {totals.copied:,} tensors kept, {totals.shards} files"
    yield _sizes(plan)
    if plan.reading_seconds is not None and plan.reading_seconds >= 1:
        speed = size(totals.bytes_before / plan.reading_seconds)
        yield (
            f"reading takes about {duration(plan.reading_seconds)} here, as a sample was read at "
            f"{speed} a second; computing and writing go on meanwhile, and can take longer"
        )
    kinds = sorted(plan.kinds, key=lambda kind: -(kind.bytes_before or 0))
    columns = {
        "kind of module": [printable(kind.kind) for kind in kinds],
        "tensors": [count_cell(kind.tensors) for kind in kinds],
        "before": [size(kind.bytes_before or 0) for kind in kinds],
        "after": [size(kind.bytes) for kind in kinds],
        "what becomes of it": [printable(kind.fate) for kind in kinds],
    }
    yield from table(columns, width, ends_with_text=True)
    if plan.notes:
        yield ""
    for note in plan.notes:
        yield f"Note: {printable(note)}"


def run_lines(report: RunReport) -> Iterator[str]:
    """Yields what was done, how to load the result, and how to push it."""
    totals = report.totals
    done = f"{report.out}: {totals.decoded:,} weights decoded, "
    if report.command == "quantize":
        done = f"{report.out}: {totals.packed - totals.stay:,} weights packed, "
        if totals.stay:
            done += f"{totals.stay:,} weights that were in 4 bits stay as they are, "
    yield f"{done}{totals.copied:,} tensors kept{_kept_from_before(report)}"
    if report.part is None:
        yield _sizes(report)
    if not report.already_complete:
        yield _timing(report)
    verified = report.verification
    if verified is not None:
        yield (
            f"verified: {verified.packed:,} packed weights, largest relative error "
            f"{verified.largest_relative_error:.4f}; {verified.copied:,} kept tensors equal"
        )
    if report.part is not None:
        return
    if NO_CONFIG in report.notes:
        yield f"Note: {NO_CONFIG}"
    if report.loading:
        yield f"install: {report.install}"
        yield f"load: {printable('; '.join(report.loading.splitlines()))}"
    if report.pushed is not None:
        yield f"pushed: {report.pushed}"
    elif report.push:
        yield f"push: {printable(report.push)}"


def _sizes(report: PlanReport | RunReport) -> str:
    """Says how large a checkpoint is before and after; of one in 4 bits also how small that is."""
    totals = report.totals
    sizes = f"{size(totals.bytes_before)} → {size(totals.bytes_after)}"
    if report.command == "quantize":
        bits = f"{totals.bits_per_parameter:.2f} bits per parameter"
        sizes += f" ({totals.compression:.2f}x, {bits})"
    return sizes


def _kept_from_before(run: RunReport) -> str:
    """Returns the end of a line: what an earlier run had done, and which part this one made."""
    if run.already_complete:
        return "; already complete, nothing was done"
    text = ""
    if run.shards_resumed:
        text += f", {run.shards_resumed} shards of an earlier run kept"
    if run.part is not None:
        text += f": part {run.part}"
        if run.shards_missing:
            text += f"; {run.shards_missing:,} files of other parts are missing"
        else:
            text += "; all files are there, and the result is whole"
    return text


def _timing(report: RunReport) -> str:
    # decoding makes more bytes than it reads
    rate = max(report.totals.bytes_before, report.totals.bytes_after) / report.seconds
    activities = sorted(report.seconds_by_activity.items())
    split = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in activities)
    return f"{report.seconds:.1f} s on {report.device}, {size(rate)}/s (all workers: {split})"


# --- inspect ---


def inspection_lines(inspection: Inspection, width: int | None) -> Iterator[str]:
    """Yields the totals, the kinds of modules and what is unusual."""
    yield from _inspection_head(inspection)
    kinds = inspection.kinds
    columns = {
        "kind of module": [printable(kind.kind) for kind in kinds],
        "tensors": [count_cell(kind.tensors) for kind in kinds],
        "formats": [printable(" ".join(kind.formats)) for kind in kinds],
        "parameters": [count_cell(kind.parameters) for kind in kinds],
        "size": [size(kind.bytes) for kind in kinds],
        "bits": [f"{kind.bits_per_parameter:.2f}" for kind in kinds],
    }
    yield from table(columns, width)
    if inspection.findings:
        yield ""
    yield from _finding_lines(
        inspection.findings,
        lambda found: f"{'wrong' if found.is_fault else 'note'}: {found.line()}",
    )
    if any(finding.is_fault for finding in inspection.findings):
        path = printable(shlex.quote(inspection.path))
        yield f"nf4conv quantize {path} OUT repairs what can be decoded; --dry-run says what"


def _inspection_head(inspection: Inspection) -> Iterator[str]:
    """Yields what is said of the whole checkpoint: sizes, config, experts and origin."""
    totals = inspection.totals
    share = f"{totals.packed:,} of them in 4 bits"
    small = sum(8 * row.bytes < 16 * row.parameters for row in inspection.tensors)
    if small and not totals.packed:
        share = f"{small:,} of them in fewer than 16 bits"
    yield (
        f"{totals.tensors:,} tensors, {share}, in {len(inspection.files):,} files: "
        f"{totals.parameters:,} parameters, {size(totals.bytes)}, "
        f"{totals.bits_per_parameter:.2f} bits each"
    )
    if inspection.config is not None:
        yield f"config.json: {printable(_quantization_text(inspection.config))}"
    if inspection.experts:
        yield printable(inspection.experts)
    made = inspection.made
    if made is not None:
        version = made.get("version")
        source = made["source"].get("id")
        yield printable(f"made by nf4conv {version}, {made.get('command')}, from {source}")
        yield from _recorded_weights(made, totals.packed)
        yield from _calibration_lines(made)


def _recorded_weights(made: Mapping[str, Any], packed: int) -> Iterator[str]:
    """Yields what nf4conv.json says of the weights; nothing if it speaks of other weights."""
    groups = [group for group in recorded_weights(made) if type(group.get("count")) is int]
    if sum(group["count"] for group in groups) != packed or not packed:
        return
    for group in groups:
        scales = _SCALES.get(group["scales"], group["scales"])
        what = f"{group['count']:,} weights {group.get('origin')}, from {group.get('from')}"
        yield printable(f"{what}, {scales}")


def _calibration_lines(made: Mapping[str, Any]) -> Iterator[str]:
    """Yields which text calibrated the weights, and what it gained; nothing without calibration.

    `made` is the content of nf4conv.json, whoever wrote it.
    """
    try:
        asked, found = made["calibration"], made["calibrated"]
        gains = [gain for block in found["blocks"] for gain in block["gains"].values()]
        mean = sum(gains) / len(gains)
        names = ", ".join(f"{text['name']} ({text['sha256']:.12})" for text in asked["texts"])
        versions = ", ".join(f"{what} {which}" for what, which in found["made_by"].items())
        yield printable(f"calibrated by {asked['tokens']:,} tokens of {names}: {versions}")
        kept = sum(1 for gain in gains if gain == 1)
        weighted = ""
        if "outputs" in asked["knows"]:
            weighted = ", weighted by what predictions depend on,"
        yield (
            f"errors of layer outputs{weighted} are {mean:.2f} of those of searched scales on "
            f"other windows; {kept:,} of {len(gains):,} weights keep the search"
        )
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return  # a damaged record says nothing


def _quantization_text(config: Mapping[str, Any]) -> str:
    """Returns the quantization that config.json names, on one line."""
    parts = []
    for key, value in config.items():
        if isinstance(value, list):  # the skip list may have thousands of names
            parts.append(f"{key}={len(value):,} names")
        else:
            parts.append(f"{key}={value!r}")
    return ", ".join(parts)


def _finding_lines(findings: Sequence[Finding], line_of: Callable[[Finding], str]) -> Iterator[str]:
    """Yields a line for each fault of a kind of modules: no more than a person reads at once."""
    shown = grouped(findings)[:_MOST_LINES]
    for group in shown:
        line = printable(line_of(group[0]))
        yield line if len(group) == 1 else f"{line}; and {len(group) - 1:,} more like it"
    rest = len(findings) - sum(map(len, shown))
    if rest:
        yield f"… and {rest:,} more; --json lists them all"


# --- verify ---


def verification_lines(
    report: VerifyReport, width: int | None, *, every: bool = False
) -> Iterator[str]:
    """Yields what is wrong, and the verdict.

    `every` adds the names of all checks and the kinds of modules.
    """
    if every:
        yield f"checked: {', '.join(report.checks)}"
    yield from _finding_lines(
        report.findings,
        lambda found: f"{'FAIL' if found.is_fault else 'note'}  {found.check:12} {found.line()}",
    )
    if every:
        kinds = report.kinds
        columns = {
            "kind of module": [printable(kind.kind) for kind in kinds],
            "weights": [count_cell(kind.tensors) for kind in kinds],
            "parameters": [count_cell(kind.parameters) for kind in kinds],
            "size": [size(kind.bytes) for kind in kinds],
            "relative": [error_cell(kind.relative_error) for kind in kinds],
            "worst": [error_cell(kind.largest_relative_error) for kind in kinds],
        }
        yield from table(columns, width)
    yield report.verdict


# --- evaluate and env ---


def evaluation_lines(compared: Evaluations, width: int | None) -> Iterator[str]:
    """Yields a table of all figures with a column for each form of the model, and what was read."""
    forms = compared.evaluations
    figures = list(forms[0].figures)
    names = [folder_name(one.out) for one in forms]
    if len({*names}) < len(names):
        names = [one.out for one in forms]
    columns = {"": ["size", *(name.replace("_", " ") for name in figures)]}
    for name, one in zip(names, forms, strict=True):
        values = [f"{one.figures[figure]:.5g}" for figure in figures]
        columns[shortened(printable(name), _LONGEST_NAME)] = [size(one.bytes), *values]
    yield from table(columns, width)
    yield ""
    yield f"{compared.tokens:,} tokens of {printable(compared.text)}"
    yield f"on {compared.device}, {compared.arithmetic}"


def environment_lines(found: Environment) -> Iterator[str]:
    """Yields versions, the machine, and what would compute."""
    for name, value in found.values.items():
        yield f"{name:20} {value}"
