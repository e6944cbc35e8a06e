"""The rows of results: one tensor, or one kind of module. Their fields are the keys of --json.

The rows of a plan are in plan/rows.py.

figures.py      names formats, and computes errors and decibels from sums
weights.py      describes what verification measured of each packed weight
comparison.py   describes how each pair of tensors compares
inspection.py   describes each tensor of a checkpoint
"""

from nf4conv.report.rows.comparison import ComparedKind, ComparedRow, Status
from nf4conv.report.rows.figures import decibels, distance, format_name, relative_error
from nf4conv.report.rows.inspection import (
    InspectedKind,
    InspectedRow,
    InspectionTotals,
    StoredQuantization,
)
from nf4conv.report.rows.weights import CheckResult, VerificationSummary, WeightKind, WeightRow

__all__ = [
    "CheckResult",
    "ComparedKind",
    "ComparedRow",
    "InspectedKind",
    "InspectedRow",
    "InspectionTotals",
    "Status",
    "StoredQuantization",
    "VerificationSummary",
    "WeightKind",
    "WeightRow",
    "decibels",
    "distance",
    "format_name",
    "relative_error",
]
