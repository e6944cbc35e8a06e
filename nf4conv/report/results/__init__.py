"""The results that commands return. Their fields are the keys of --json, in their order.

docs/generate.py makes docs/json.md from these classes and the `Attributes` in their docstrings.

runs.py       describes what `quantize`, `dequantize` and `finish` would do, or did
checks.py     describes what `verify` and `compare` found
contents.py   describes what `inspect`, `evaluate` and `env` found
"""

from nf4conv.report.results.checks import (
    ComparisonReport,
    ComparisonSettings,
    VerifyReport,
    VerifySettings,
)
from nf4conv.report.results.contents import Environment, Evaluation, Inspection
from nf4conv.report.results.runs import (
    DequantizeReport,
    FinishReport,
    PlanReport,
    QuantizeReport,
    RunReport,
)

__all__ = [
    "ComparisonReport",
    "ComparisonSettings",
    "DequantizeReport",
    "Environment",
    "Evaluation",
    "FinishReport",
    "Inspection",
    "PlanReport",
    "QuantizeReport",
    "RunReport",
    "VerifyReport",
    "VerifySettings",
]
