"""Writes results as JSON, in one form for all commands. docs/options.md describes it."""

import io
import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from nf4conv.declaring import Checked, options_of
from nf4conv.report.results import (
    DequantizeReport,
    Environment,
    Evaluation,
    Evaluations,
    Inspection,
    PlanReport,
    QuantizeReport,
    VerifyReport,
)
from nf4conv.version import __version__

SCHEMA_VERSION: Final = 2
"""Grows when a field is renamed, is removed or changes its meaning; not when a field is added."""

Result: TypeAlias = (
    PlanReport
    | QuantizeReport
    | DequantizeReport
    | VerifyReport
    | Evaluation
    | Evaluations
    | Inspection
    | Environment
)


def to_json(result: Result) -> str:
    """Returns a result as JSON.

    Args:
        result: what a command returned.

    Returns:
        An object with the fields of the result. Numbers that JSON cannot spell become the strings
        "nan", "inf" and "-inf".

    Example:
        >>> print(nf4conv.to_json(nf4conv.inspect("model")))
    """
    text = io.StringIO()  # json.dumps would hold a list of all pieces, ten for each tensor
    json.dump(content_of(result), text, indent=2, allow_nan=False)
    text.write("\n")
    return text.getvalue()


def content_of(result: Result) -> dict[str, Any]:
    """Returns what `to_json` writes, as a dictionary of JSON values."""
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "nf4conv": __version__,
        "command": result.command,
    }
    if isinstance(result, VerifyReport):
        content["verdict"] = result.verdict
    return {**content, **_spelled(result)}


def _spelled(value: Any) -> Any:
    """Returns a value of JSON: dataclasses as objects, numbers that JSON lacks as strings."""
    if isinstance(value, Checked):
        options = [one.name for one in options_of(type(value)) if not one.said.in_python]
        return {name: _spelled(getattr(value, name)) for name in options}
    if is_dataclass(value):
        return {field.name: _spelled(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
