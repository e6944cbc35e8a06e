# pyright: reportUnnecessaryTypeIgnoreComment=true
"""How users call nf4conv, for mypy and pyright: they read this file, and nothing runs it.

A line that must be an error says which one in `# type: ignore[…]`: where none is
found, they complain that there is nothing to ignore.
"""

from pathlib import Path

import nf4conv


def with_keywords() -> nf4conv.QuantizeReport:
    nf4conv.quantize("SRC", "OUT", scales="search", device="cpu", include=["*.layers.0.*"])
    nf4conv.quantize("SRC", "OUT", blocksze=64)  # type: ignore[call-arg]
    nf4conv.quantize("SRC", "OUT", blocksize=100)  # type: ignore[arg-type]
    nf4conv.quantize("SRC", "OUT", scales="searched")  # type: ignore[arg-type]
    nf4conv.quantize("SRC", "OUT", include="*.layers.0.*")  # type: ignore[arg-type]
    nf4conv.dequantize("SRC", "OUT", dtype="float16", overwrite=True)
    nf4conv.dequantize("SRC", "OUT", dtype="half")  # type: ignore[arg-type]
    nf4conv.dequantize("SRC", "OUT", verify=True)  # type: ignore[call-arg]
    nf4conv.verify("OUT", source="SRC", exact=True, tolerance=0.1)
    nf4conv.verify("OUT", source="SRC", exakt=True)  # type: ignore[call-arg]
    nf4conv.evaluate(["OUT", "OTHER"], source="SRC", text="ids.npy", progress=print)
    nf4conv.evaluate("OUT", text="ids.npy")  # type: ignore[call-arg]
    nf4conv.quantize(source="SRC", out="OUT")  # type: ignore[call-arg]
    nf4conv.verify("OUT", source="SRC", tolerance="0")  # type: ignore[arg-type]
    nf4conv.inspect("org/name", revision="v2")
    nf4conv.inspect("org/name", device="cpu")  # type: ignore[call-arg]
    return nf4conv.quantize(Path("SRC"), Path("OUT"), moe="packed", token=None)


def with_classes() -> None:
    nf4conv.QuantizeOptions(quant_type="nf4", blocksize=64, exclude=("lm_head.*",))
    nf4conv.QuantizeOptions(quant_typ="nf4")  # type: ignore[call-arg]
    nf4conv.QuantizeOptions(quant_type="nf5")  # type: ignore[arg-type]
    nf4conv.QuantizeOptions(exclude="lm_head.*")  # type: ignore[arg-type]
    nf4conv.DequantizeOptions(dtype="bf16")  # type: ignore[arg-type]
    nf4conv.RunOptions(device=0)  # type: ignore[arg-type]


def rows(report: nf4conv.PlanReport) -> list[nf4conv.PlanRow]:
    kinds: tuple[nf4conv.PlanKind, ...] = report.kinds
    totals: nf4conv.QuantizationTotals | nf4conv.DequantizationTotals = report.totals
    print(kinds, totals)
    return list(report.tensors)


def worst(report: nf4conv.VerifyReport) -> nf4conv.WeightRow:
    checks: dict[str, nf4conv.CheckResult] = dict(report.checks)
    found: tuple[nf4conv.Finding, ...] = report.findings
    settings: nf4conv.VerifySettings = report.settings
    print(checks, found, settings)
    return report.weights[0]


def plan(source: str) -> nf4conv.AnyQuantizationPlan:
    made = nf4conv.plan_quantization(source)
    if isinstance(made, nf4conv.QuantizationPlan):
        summary: nf4conv.QuantizationTotals = made.totals()
        assert summary.packed
    return made


def largest(source: str) -> nf4conv.InspectedRow:
    found = nf4conv.inspect(source)
    totals: nf4conv.InspectionTotals = found.totals
    assert totals.bytes
    return found.tensors[0]


def names(error: nf4conv.SourceError) -> tuple[Path | None, str | None]:
    nf4conv.quantise  # type: ignore[attr-defined]  # noqa: B018
    return error.path, error.tensor
