"""What `quantize` and `dequantize` would do, and have done, as lines for a terminal: totals first."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from nf4conv import __version__
from nf4conv.report.results import DequantizeReport, Environment, PlanReport, QuantizeReport
from nf4conv.report.rows import QuantizationTotals
from nf4conv.report.text import printable, size, table


def plan_lines(plan: PlanReport, width: int | None, *, every: bool) -> Iterator[str]:
    """Totals, what becomes of each kind of module, of each tensor if that is asked for, and what is unusual."""
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


def quantization_lines(report: QuantizeReport) -> Iterator[str]:
    """What was done, and how to go on: how to load the result, and how to push it."""
    yield f"{report.out}: {report.packed:,} weights packed, {report.copied:,} tensors kept{_resumed(report)}"
    yield (
        f"{size(report.bytes_before)} → {size(report.bytes_after)} "
        f"({report.bytes_before / report.bytes_after:.2f}x, {report.bits_per_parameter:.2f} bits per parameter), "
        f"about {size(report.gpu_bytes)} of GPU memory to load"
    )
    if report.advice:
        yield printable(report.advice)
    if not report.already_complete:
        yield _timing(report, report.bytes_before)
    if report.verification is not None:
        verified = report.verification
        yield (
            f"verified: {verified.packed:,} packed weights, largest relative error "
            f"{verified.largest_relative_error:.4f}; {verified.copied:,} kept tensors equal"
        )
    if report.loading:
        yield f"load: {printable(report.loading)}"
    if report.pushed is not None:
        yield f"pushed: {report.pushed}"
    else:
        name = Path(report.out).resolve().name
        yield f"push: hf upload {printable(shlex.quote(f'YOUR_NAME/{name}'))} {printable(shlex.quote(report.out))} ."


def dequantization_lines(report: DequantizeReport) -> Iterator[str]:
    """What was done."""
    yield f"{report.out}: {report.decoded:,} weights decoded, {report.copied:,} tensors copied{_resumed(report)}"
    yield f"{size(report.bytes_before)} → {size(report.bytes_after)}"
    if not report.already_complete:
        yield _timing(report, report.bytes_after)


def _resumed(report: QuantizeReport | DequantizeReport) -> str:
    if report.already_complete:
        return "; already complete, nothing was done"
    return f", {report.shards_resumed} shards of an earlier run kept" if report.shards_resumed else ""


def _timing(report: QuantizeReport | DequantizeReport, size: int) -> str:
    split = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in sorted(report.seconds_by_activity.items()))
    rate = size / report.seconds / 1e9
    return f"{report.seconds:.1f} s on {report.device}, {rate:.2f} GB/s (all workers: {split})"


def environment_lines(found: Environment) -> Iterator[str]:
    """Versions, the machine, and what would compute."""
    rows = {"nf4conv": __version__, "python": found.python} | {
        name: version or "not installed" for name, version in found.packages.items()
    }
    rows |= {"platform": found.platform, "cores": str(found.cores), "GPUs": "; ".join(found.gpus) or "none"}
    rows |= {"--device auto": found.engine} | {f"folder of {name}": folder for name, folder in found.folders.items()}
    yield from (f"{name:20} {value}" for name, value in rows.items())
