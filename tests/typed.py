# pyright: reportUnnecessaryTypeIgnoreComment=true
"""How users call nf4conv, for mypy and pyright: they read this file, and nothing runs it.

A line that must be an error says which one in `# type: ignore[…]`: where none is
found, they complain that there is nothing to ignore.
"""

from pathlib import Path

import nf4conv


def with_keywords() -> nf4conv.RunReport:
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


def planned(source: str) -> nf4conv.RunReport:
    plan: nf4conv.Plan = nf4conv.plan_quantize(source, blocksize=128)
    nf4conv.plan_quantize(source, blocksize=100)  # type: ignore[arg-type]
    row: nf4conv.TensorRow = plan.rows[0]
    totals: nf4conv.PlanTotals = plan.totals
    print(row.reason, totals.packed)
    return plan.execute("OUT")


def worst(report: nf4conv.VerifyReport) -> nf4conv.TensorRow:
    found: tuple[nf4conv.Finding, ...] = report.findings
    print(found, report.options.tolerance)
    return report.weights[0]


def largest(source: str) -> nf4conv.TensorRow:
    found = nf4conv.inspect(source)
    assert found.totals.bytes
    return found.tensors[0]


def names(error: nf4conv.SourceError) -> tuple[Path | None, str | None]:
    nf4conv.quantise  # type: ignore[attr-defined]  # noqa: B018
    return error.path, error.tensor
