"""Results as JSON, in one form for all commands; docs/json.md says what is in it."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from nf4conv import __version__
from nf4conv.checkpoint.writer import write_result
from nf4conv.report import results

SCHEMA_VERSION: Final = 1
"""Grows when a field is renamed, removed, or means something else; not when one is added."""

Result: TypeAlias = (
    results.PlanReport | results.RunReport | results.VerifyReport | results.ComparisonReport | results.Inspection
    | results.Environment | results.Evaluation | results.FinishReport
)  # fmt: skip


def to_json(result: Result) -> str:
    """What a command found. Numbers that JSON cannot spell become the strings "nan", "inf" and "-inf"."""
    return json.dumps(content_of(result), indent=2, allow_nan=False) + "\n"


def content_of(result: Result) -> dict[str, Any]:
    """What `to_json` gives, as a dictionary."""
    head = {"schema_version": SCHEMA_VERSION, "nf4conv": __version__, "command": result.command}
    if isinstance(result, (results.VerifyReport, results.ComparisonReport)):
        head["verdict"] = result.verdict
    content: dict[str, Any] = _spelled(head | dataclasses.asdict(result))
    return content


def write_json(result: Result, path: Path) -> None:
    """Write what `to_json` gives; an OutputError if the disk is full or failing."""
    write_result(path, to_json(result).encode())


def _spelled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
