"""Writes results as JSON, in one form for all commands. docs/json.md describes it."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from nf4conv.report.results.checks import VerifyReport
from nf4conv.report.results.contents import Environment, Evaluation, Evaluations, Inspection
from nf4conv.report.results.runs import PlanReport, RunReport
from nf4conv.version import __version__

SCHEMA_VERSION: Final = 1
"""Grows when a field is renamed, is removed or changes its meaning; not when a field is added."""

Result: TypeAlias = (
    PlanReport | RunReport | VerifyReport | Evaluation | Evaluations | Inspection | Environment
)


def to_json(result: Result) -> str:
    """Returns a result as JSON.

    Args:
        result: what a command returned.

    Returns:
        An object with the fields of the result. Numbers that JSON cannot spell become the strings
        "nan", "inf" and "-inf".

    Example:
        >>> print(nf4conv.to_json(nf4conv.inspect_checkpoint("model")))
    """
    return json.dumps(content_of(result), indent=2, allow_nan=False) + "\n"


def content_of(result: Result) -> dict[str, Any]:
    """Returns what `to_json` writes, as a dictionary of JSON values."""
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "nf4conv": __version__,
        "command": result.command,
    }
    if isinstance(result, VerifyReport):
        content["verdict"] = result.verdict
    content.update(dataclasses.asdict(result))
    spelled: dict[str, Any] = _spelled(content)
    return spelled


def _spelled(value: Any) -> Any:
    """Returns a value with strings in place of the numbers that JSON cannot spell."""
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
