"""Shows what `quantize` and `dequantize` did."""

from collections.abc import Iterator

from nf4conv.format.units import size
from nf4conv.plan.writing import NO_CONFIG
from nf4conv.report.results.runs import DequantizeReport, QuantizeReport
from nf4conv.report.rows.weights import VerificationSummary
from nf4conv.report.text.terminal import printable


def quantization_lines(report: QuantizeReport) -> Iterator[str]:
    """Yields what was done, how to load the result, and how to push it."""
    stay = ""
    if report.stay:
        stay = f"{report.stay:,} weights that were in 4 bits stay as they are, "
    yield (
        f"{report.out}: {report.packed - report.stay:,} weights packed, {stay}"
        f"{report.copied:,} tensors kept{_kept_from_before(report)}"
    )
    if report.part is not None:
        yield _timing(report, report.bytes_before)
        return
    compression = report.bytes_before / report.bytes_after
    bits = f"{report.bits_per_parameter:.2f} bits per parameter"
    yield (
        f"{size(report.bytes_before)} → {size(report.bytes_after)} ({compression:.2f}x, {bits}), "
        f"about {size(report.gpu_bytes)} of GPU memory to load"
    )
    if report.advice:
        yield printable(report.advice)
    if not report.already_complete:
        yield _timing(report, report.bytes_before)
    if report.verification is not None:
        yield _verification_line(report.verification)
    if NO_CONFIG in report.notes:
        yield f"Note: {NO_CONFIG}"
    if report.loading:
        yield f"install: {report.install}"
        yield f"load: {printable('; '.join(report.loading.splitlines()))}"
    if report.pushed is not None:
        yield f"pushed: {report.pushed}"
    elif report.push:
        yield f"push: {printable(report.push)}"


def dequantization_lines(report: DequantizeReport) -> Iterator[str]:
    """Yields what was done."""
    yield (
        f"{report.out}: {report.decoded:,} weights decoded, "
        f"{report.copied:,} tensors copied{_kept_from_before(report)}"
    )
    yield f"{size(report.bytes_before)} → {size(report.bytes_after)}"
    if not report.already_complete:
        yield _timing(report, report.bytes_after)


def _verification_line(verified: VerificationSummary) -> str:
    return (
        f"verified: {verified.packed:,} packed weights, largest relative error "
        f"{verified.largest_relative_error:.4f}; {verified.copied:,} kept tensors equal"
    )


def _kept_from_before(report: QuantizeReport | DequantizeReport) -> str:
    """Returns the end of a line: what an earlier run had done, and which part this one made."""
    if report.already_complete:
        return "; already complete, nothing was done"
    text = ""
    if report.shards_resumed:
        text += f", {report.shards_resumed} shards of an earlier run kept"
    if report.part is not None:
        text += f": part {report.part}"
        if report.shards_missing:
            text += f"; {report.shards_missing:,} files of other parts are missing"
        else:
            text += "; all files are there, and the result is whole"
    return text


def _timing(report: QuantizeReport | DequantizeReport, size: int) -> str:
    rate = size / report.seconds / 1e9
    activities = sorted(report.seconds_by_activity.items())
    split = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in activities)
    return f"{report.seconds:.1f} s on {report.device}, {rate:.2f} GB/s (all workers: {split})"
