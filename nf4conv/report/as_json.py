"""Writes results as JSON, in one form for all commands. docs/options.md describes it."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, TextIO, TypeAlias

from nf4conv.declaring import Checked, options_of
from nf4conv.report.results import (
    Environment,
    Evaluations,
    Inspection,
    PlanReport,
    RunReport,
    VerifyReport,
)
from nf4conv.version import __version__

SCHEMA_VERSION: Final = 3
"""Grows when a field is renamed, is removed or changes its meaning; not when a field is added."""

Result: TypeAlias = PlanReport | RunReport | VerifyReport | Evaluations | Inspection | Environment


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
    text = io.StringIO()
    write_json(result, text)
    return text.getvalue()


def write_json(result: Result, file: TextIO) -> None:
    """Writes what `to_json` returns, each row on a line of its own.

    Neither all rows nor all lines are held: a plan may have 200,000 rows.
    """
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "nf4conv": __version__,
        "command": result.command,
    }
    if isinstance(result, VerifyReport):
        content["verdict"] = result.verdict
    before = "{"
    for name, value in {**content, **_fields_of(result)}.items():
        file.write(f'{before}\n  "{name}": ')
        before = ","
        if isinstance(value, list) and value and is_dataclass(value[0]):
            _write_rows(value, file)
        else:
            text = json.dumps(value, indent=2, allow_nan=False, default=_fields_of)
            file.write(text.replace("\n", "\n  "))
    file.write("\n}\n")


def _write_rows(rows: Sequence[Any], file: TextIO) -> None:
    encoder = json.JSONEncoder(allow_nan=False, default=_fields_of)
    before = "["
    for row in rows:
        file.write(f"{before}\n    {encoder.encode(row)}")
        before = ","
    file.write("\n  ]")


def _fields_of(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass by name; of the options of a command, those for users."""
    if isinstance(value, Checked):
        names = [one.name for one in options_of(type(value)) if not one.in_python]
    else:
        names = [field.name for field in fields(value)]
    return {name: _spelled(getattr(value, name)) for name in names}


def _spelled(value: Any) -> Any:
    """Returns a value in which numbers that JSON lacks are strings; dataclasses stay in it."""
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
