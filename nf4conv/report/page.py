"""A verification as one HTML page that needs no network: page.html, and what was found for its script to draw."""

import html
import json
import re
from importlib.resources import files
from pathlib import Path

from nf4conv.checkpoint.writer import write_result
from nf4conv.report.as_json import content_of
from nf4conv.report.results import VerifyReport
from nf4conv.report.text import printable


def write_page(report: VerifyReport, path: Path) -> None:
    """Write a self-contained HTML page; an OutputError if the disk is full or failing."""
    write_result(path, page(report).encode())


def page(report: VerifyReport) -> str:
    """A report as HTML. Folders of this machine are named, but not where they are."""
    name = _name(report.path)
    content = content_of(report) | {"path": name, "source": report.source and _name(report.source)}
    content["normal"] = report.normal
    content["findings"] = [
        {"check": finding.check, "is_fault": finding.is_fault, "line": finding.line().replace(report.path, name)}
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
    return Path(place).resolve().name if Path(place).is_absolute() or Path(place).exists() else place
