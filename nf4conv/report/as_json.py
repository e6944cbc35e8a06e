"""Results as JSON, in one form for all commands; docs/json.md says what is in it.

And a verification as one HTML page that needs no network: page.html, with that JSON for its script
to draw.
"""

import dataclasses
import html
import json
import math
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypeAlias

from nf4conv import __version__
from nf4conv.output.writer import write_result
from nf4conv.report import results
from nf4conv.report.text import printable

SCHEMA_VERSION: Final = (
    1  # grows when a field is renamed, removed, or means something else; not when one is added
)

Result: TypeAlias = (
    results.PlanReport | results.RunReport | results.VerifyReport | results.ComparisonReport | results.Inspection
    | results.Environment | results.Evaluation | results.FinishReport
)  # fmt: skip


def to_json(result: Result) -> str:
    """What a command found. Numbers that JSON cannot spell become the strings "nan", "inf" and
    "-inf".
    """
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


def write_page(report: results.VerifyReport, path: Path) -> None:
    """Write a self-contained HTML page; an OutputError if the disk is full or failing."""
    write_result(path, page(report).encode())


def page(report: results.VerifyReport) -> str:
    """A report as HTML. Folders of this machine are named, but not where they are."""
    name = _name(report.path)
    content = content_of(report) | {"path": name, "source": report.source and _name(report.source)}
    content["normal"] = report.normal
    content["findings"] = [
        {
            "check": finding.check,
            "is_fault": finding.is_fault,
            "line": finding.line().replace(report.path, name),
        }
        for finding in report.findings
    ]
    values = {
        "title": html.escape(printable(name)),
        "verdict": html.escape(printable(report.verdict)),
        "state": "passed" if report.passed else "failed",
        "data": json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    template = files("nf4conv.report").joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"@(title|verdict|state|data)@", lambda found: values[found[1]], template)


def _name(place: str) -> str:
    """Of a folder its own name; a name on the Hub stays as it is."""
    return (
        Path(place).resolve().name if Path(place).is_absolute() or Path(place).exists() else place
    )
