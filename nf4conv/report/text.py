"""What a terminal shows: results as lines, totals first; notes and how far a run is, on stderr."""

import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from nf4conv import __version__
from nf4conv.plan.rows import QuantizationTotals
from nf4conv.report import results
from nf4conv.report.places import kind_name

_MOST_FINDINGS: Final = 50
_MOST_WEIGHTS: Final = 10
_LONGEST_LINE: Final = 2000
_NARROWEST: Final = 16  # characters that are left of a name, at least
_TITLES: Final = {"place": "kind of module", "bytes": "size", "bits_per_parameter": "bits"}
_MEASURED: Final = {"relative_error": "relative", "largest_relative_error": "worst"}
_FAR: Final = {"relative_error": "relative", "snr_db": "SNR dB"}
_SECONDS_BETWEEN_LINES: Final = 30.0


def printable(text: str) -> str:
    """Without line breaks and terminal codes, which names inside a file may hold, and not too long
    for a line.
    """
    text = text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 1]}…"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def size(count: float) -> str:
    """A number of bytes in decimal units."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def verification_lines(report: results.VerifyReport, width: int | None) -> Iterator[str]:
    """Checks, findings, worst weights, kinds of modules, and the verdict last; tables are no wider
    than `width`.
    """
    for name, check in report.checks.items():
        yield f"{'ok  ' if check.passed else 'FAIL'}  {name:12} {check.meaning}"
    if report.findings:
        yield ""
    for finding in report.findings[:_MOST_FINDINGS]:
        yield f"{'FAIL' if finding.is_fault else 'note'}  {finding.check:12} {printable(finding.line())}"
    yield from _more(report.findings)
    compared = [row for row in report.weights if row.relative_error is not None]
    worst = sorted(compared, key=lambda row: -row.error)[:_MOST_WEIGHTS]
    yield from table(
        worst,
        width,
        {"name": "largest errors", **_FAR, "largest_error_of_absmax": "max/absmax", "outside": ""},
    )
    yield from table(
        report.kinds,
        width,
        {"place": "", "weights": "", "parameters": "", "bytes": "", **_MEASURED},
    )
    yield ""
    yield from (
        f"normal for {name} on trained weights: {low:g} to {high:g}"
        for name, low, high in report.normal
    )
    yield report.verdict


def comparison_lines(report: results.ComparisonReport, width: int | None) -> Iterator[str]:
    """What has no counterpart, the largest differences, kinds of modules, and the verdict last."""
    unmeasured = [row for row in report.tensors if not row.passed and row.relative_error is None]
    for row in unmeasured[:_MOST_FINDINGS]:
        described = " → ".join(
            _cell("shape", shape) for shape in (row.shape_a, row.shape_b) if shape is not None
        )
        yield f"{row.status:14} {printable(row.name)}  {described}"
    yield from _more(unmeasured)
    differing = sorted(
        (row for row in report.tensors if row.differing),
        key=lambda row: -(row.relative_error or 0.0),
    )
    titles = {"name": "largest differences", "format_a": "A", "format_b": "B", **_FAR}
    titles |= {"largest_difference": "max |A-B|", "differing": "values"}
    yield from table(differing[:_MOST_WEIGHTS], width, titles)
    counts = dict.fromkeys(("place", "tensors", "identical", "parameters", "differing"), "")
    yield from table(report.kinds, width, {**counts, **_MEASURED})
    yield ""
    yield report.verdict


def _more(found: Sequence[object]) -> Iterator[str]:
    if len(found) > _MOST_FINDINGS:
        yield f"… and {len(found) - _MOST_FINDINGS:,} more; --json lists them all"


def inspection_lines(
    inspection: results.Inspection, width: int | None, *, every: bool
) -> Iterator[str]:
    """The totals, the kinds of modules, what is unusual; every tensor only if that is asked for."""
    totals, made = inspection.totals, inspection.made
    yield (
        f"{totals.tensors:,} tensors, {totals.packed:,} of them in 4 bits, in "
        f"{len(inspection.files):,} files: "
        f"{totals.parameters:,} parameters, {size(totals.bytes)}, {totals.bits_per_parameter:.2f} "
        f"bits each"
    )
    yield f"loading it takes about {size(inspection.gpu_bytes)} of GPU memory, CUDA's own included"
    if inspection.config is not None:
        yield f"config.json: {printable(_described(inspection.config))}"
    if made is not None:
        words = f"made by nf4conv {made.get('version')}, {made.get('command')}, from {made['source'].get('id')}"
        yield printable(words)
    figures = dict.fromkeys(("parameters", "bytes", "bits_per_parameter"), "")
    yield from table(
        inspection.kinds, width, {"place": "", "tensors": "", "formats": "", **figures}
    )
    if every:
        yield from table(
            inspection.tensors, width, {"name": "tensor", "format": "", "shape": "", **figures}
        )
    if inspection.notes or inspection.findings:
        yield ""
    yield from (f"Note: {printable(note)}" for note in inspection.notes)
    for finding in inspection.findings[:_MOST_FINDINGS]:
        yield f"{'wrong' if finding.is_fault else 'note'}: {printable(finding.line())}"
    yield from _more(inspection.findings)
    if any(finding.is_fault for finding in inspection.findings):
        yield f"nf4conv quantize {printable(inspection.path)} OUT repairs what can be decoded; --dry-run says what"


def _described(config: Mapping[str, Any]) -> str:
    """The quantization that config.json names; a list, which may have thousands of names, by its
    length.
    """
    cells = (
        f"{len(value):,} names" if isinstance(value, list) else repr(value)
        for value in config.values()
    )
    return ", ".join(f"{key}={cell}" for key, cell in zip(config, cells, strict=True))


def plan_lines(plan: results.PlanReport, width: int | None, *, every: bool) -> Iterator[str]:
    """Totals, what becomes of each kind of module, of each tensor if that is asked for, and what is
    unusual.
    """
    totals = plan.totals
    sizes = f"{size(totals.bytes_before)} → {size(totals.bytes_after)}"
    if isinstance(totals, QuantizationTotals):
        yield f"{totals.packed:,} weights packed, {totals.copied:,} tensors kept, {totals.shards} files"
        yield f"{sizes} ({totals.compression:.2f}x, {totals.bits_per_parameter:.2f} bits per parameter)"
    else:
        yield f"{totals.decoded:,} weights decoded, {totals.copied:,} tensors copied, {totals.shards} files: {sizes}"
    if plan.advice:
        yield printable(plan.advice)
    if plan.gpu_bytes is not None:
        yield f"loading it takes about {size(plan.gpu_bytes)} of GPU memory, CUDA's own included"
    fates = {"bytes_before": "before", "bytes_after": "after", "fate": "what becomes of it"}
    kinds = sorted(plan.kinds, key=lambda kind: -kind.bytes_before)
    yield from table(kinds, width, {"place": "", "tensors": "", **fates})
    if every:
        yield from table(plan.tensors, width, {"name": "tensor", "dtype": "", "shape": "", **fates})
    if plan.notes:
        yield ""
    yield from (f"Note: {printable(note)}" for note in plan.notes)


def quantization_lines(report: results.QuantizeReport) -> Iterator[str]:
    """What was done, and how to go on: how to load the result, and how to push it."""
    yield f"{report.out}: {report.packed:,} weights packed, {report.copied:,} tensors kept{_resumed(report)}"
    if report.part is not None:
        yield _timing(report, report.bytes_before)
        return
    yield (
        f"{size(report.bytes_before)} → {size(report.bytes_after)} "
        f"({report.bytes_before / report.bytes_after:.2f}x, {report.bits_per_parameter:.2f} bits "
        f"per parameter), "
        f"about {size(report.gpu_bytes)} of GPU memory to load"
    )
    if report.advice:
        yield printable(report.advice)
    if not report.already_complete:
        yield _timing(report, report.bytes_before)
    yield from _verified(report)
    if report.loading:
        yield f"load: {printable(report.loading)}"
    if report.pushed is not None:
        yield f"pushed: {report.pushed}"
    else:
        name = Path(report.out).resolve().name
        yield f"push: hf upload {printable(shlex.quote(f'YOUR_NAME/{name}'))} {printable(shlex.quote(report.out))} ."


def dequantization_lines(report: results.DequantizeReport) -> Iterator[str]:
    """What was done."""
    yield f"{report.out}: {report.decoded:,} weights decoded, {report.copied:,} tensors copied{_resumed(report)}"
    yield f"{size(report.bytes_before)} → {size(report.bytes_after)}"
    if not report.already_complete:
        yield _timing(report, report.bytes_after)


def finish_lines(report: results.FinishReport) -> Iterator[str]:
    """What there is now."""
    done = "; already complete, nothing was done" if report.already_complete else ""
    yield f"{report.out}: {report.shards:,} files, {size(report.bytes_after)}{done}"
    yield from _verified(report)


def _verified(report: results.QuantizeReport | results.FinishReport) -> Iterator[str]:
    verified = report.verification
    if verified is not None:
        yield (
            f"verified: {verified.packed:,} packed weights, largest relative error "
            f"{verified.largest_relative_error:.4f}; {verified.copied:,} kept tensors equal"
        )


def _resumed(report: results.QuantizeReport | results.DequantizeReport) -> str:
    if report.already_complete:
        return "; already complete, nothing was done"
    kept = (
        f", {report.shards_resumed} shards of an earlier run kept" if report.shards_resumed else ""
    )
    return (
        kept
        if report.part is None
        else f"{kept}: part {report.part}, of which `nf4conv finish` makes the whole"
    )


def _timing(report: results.QuantizeReport | results.DequantizeReport, size: int) -> str:
    split = ", ".join(
        f"{name} {seconds:.1f} s" for name, seconds in sorted(report.seconds_by_activity.items())
    )
    rate = size / report.seconds / 1e9
    return f"{report.seconds:.1f} s on {report.device}, {rate:.2f} GB/s (all workers: {split})"


def environment_lines(found: results.Environment) -> Iterator[str]:
    """Versions, the machine, and what would compute."""
    rows = {"nf4conv": __version__, "python": found.python} | {
        name: version or "not installed" for name, version in found.packages.items()
    }
    rows |= {
        "platform": found.platform,
        "cores": str(found.cores),
        "GPUs": "; ".join(found.gpus) or "none",
    }
    rows |= {"--device auto": found.engine} | {
        f"folder of {name}": folder for name, folder in found.folders.items()
    }
    yield from (f"{name:20} {value}" for name, value in rows.items())


def table(rows: Sequence[Any], width: int | None, columns: Mapping[str, str]) -> Iterator[str]:
    """An empty line, and rows under titles: names and sentences to the left, figures to the right;
    nothing of no rows.

    No line exceeds a width, if there is one: the first column is shortened in its middle, lines at
    their end. `columns` are attributes of the rows and their titles, empty for the usual one.
    """
    if not rows:
        return
    head = [title or _TITLES.get(name, name) for name, title in columns.items()]
    body = [
        [_cell(name, kind_name(row) if name == "place" else getattr(row, name)) for name in columns]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    sentences = "fate" in columns
    if width is not None:
        beside = (
            sum(widths[1:-1]) + (len(head[-1]) if sentences else widths[-1]) + 2 * (len(widths) - 1)
        )
        widths[0] = min(widths[0], max(width - beside, _NARROWEST))
    yield ""
    for cells in (head, *body):
        line = [_shortened(cells[0], widths[0]).ljust(widths[0])]
        line += [cell.rjust(room) for cell, room in zip(cells[1:], widths[1:], strict=True)]
        text = "  ".join([*line[:-1], cells[-1] if sentences else line[-1]]).rstrip()
        yield text if width is None or len(text) <= width else f"{text[: width - 1]}…"


def _cell(name: str, value: Any) -> str:
    """A value as text, by what it is: of a shape, of a size, or of any other attribute."""
    if value is None:
        return ""
    if name.startswith("shape"):
        return "x".join(map(str, value)) or "scalar"
    if name.startswith("bytes"):
        return size(value)
    if isinstance(value, float):
        digits = (
            ".2f"
            if name in ("snr_db", "bits_per_parameter")
            else ".4f"
            if 1e-3 <= value < 10
            else ".4g"
        )
        return f"{value:{digits}}"
    return (
        f"{value:,}"
        if isinstance(value, int)
        else printable(" ".join(value) if isinstance(value, tuple) else str(value))
    )


def _shortened(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    head = (room - 1) // 3
    return f"{text[:head]}…{text[len(text) - (room - 1 - head) :]}"


def tell_notes(notes: tuple[str, ...]) -> None:
    """What the user should know, on stderr."""
    for note in notes:
        tell(f"{click.style('Note:', fg='yellow')} {printable(note)}")


def tell(line: str) -> None:
    """A line on stderr, in colours only where it is a terminal and the user wants them."""
    click.echo(line, err=True, color=False if os.environ.get("NO_COLOR") else None)


@contextmanager
def progress(
    verb: str, total: int, *, hidden: bool, last: str = "finishing"
) -> Iterator[Callable[[int], None]]:
    """How far a run is, on stderr: a bar on a terminal, and elsewhere a line now and then; none if
    it is to be hidden.

    `verb` says what is being done with so many bytes of source in total, `last` what when all of
    them have been read.
    """
    if hidden or os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in (
        "1",
        "ON",
        "YES",
        "TRUE",
    ):
        yield lambda _: None
        return
    if not sys.stderr.isatty():
        yield _logging(verb, total)
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, leave=False, desc=verb) as bar:

        def advance(count: int) -> None:
            bar.update(min(count, total - bar.n))  # a bar that overruns would vanish
            if bar.n >= total:
                bar.set_description(last)

        yield advance


def _logging(verb: str, total: int) -> Callable[[int], None]:
    """Lines in a file, or in the log of a job: how much is done, how fast, and how long the rest
    takes.
    """
    lock, started = threading.Lock(), time.monotonic()
    done, last = 0, started

    def advance(count: int) -> None:
        nonlocal done, last
        with lock:
            done, now = min(done + count, total), time.monotonic()
            if now - last < _SECONDS_BETWEEN_LINES or not done:
                return
            last, rate = now, done / (now - started)
            shares = f"{size(done)} of {size(total)} ({100 * done / total:.0f} %)"
            tell(
                f"{verb}: {shares}, {size(rate)}/s, about "
                f"{(total - done) / max(rate, 1) / 60:.0f} min left"
            )

    return advance
