"""Writes a verification as one HTML page that needs no network.

page.html is its template. page.js is the script in it, which draws the JSON of the report.
"""

import html
import json
import re
from importlib.resources import files
from pathlib import Path

from nf4conv.output.writer import write_result
from nf4conv.report.as_json import content_of
from nf4conv.report.results.checks import VerifyReport
from nf4conv.report.text.terminal import printable


def write_page(report: VerifyReport, path: Path) -> None:
    """Writes a verification to a file, as a self-contained HTML page.

    Args:
        report: what `verify_checkpoint` returned.
        path: the file. An existing one is replaced.

    Raises:
        OutputError: the disk is full or failing.

    Example:
        >>> report = nf4conv.verify_checkpoint("model-nf4", "model")
        >>> nf4conv.write_page(report, Path("report.html"))
    """
    write_result(path, page(report).encode())


def page(report: VerifyReport) -> str:
    """Returns a verification as HTML. It names folders of this machine, but not where they are."""
    name = folder_name(report.path)
    content = content_of(report)
    content["path"] = name
    content["source"] = report.source and folder_name(report.source)
    content["normal"] = report.normal
    content["findings"] = [
        {
            "check": finding.check,
            "is_fault": finding.is_fault,
            "line": finding.line().replace(report.path, name),
        }
        for finding in report.findings
    ]
    data = json.dumps(content, separators=(",", ":"), allow_nan=False)
    verdict = html.escape(printable(report.verdict))
    values = {
        "title": html.escape(printable(name)),
        "verdict": verdict,
        "state": "passed" if report.passed else "failed",
        "data": data.replace("<", "\\u003c"),  # no name can end the script
        "script": _read("page.js").rstrip(),
    }
    names = "|".join(values)
    return re.sub(f"@({names})@", lambda found: values[found[1]], _read("page.html"))


def _read(name: str) -> str:
    return files("nf4conv.report").joinpath(name).read_text(encoding="utf-8")


def folder_name(place: str) -> str:
    """Returns the name of a folder without its path. A name on the Hub stays as it is."""
    path = Path(place)
    if path.is_absolute() or path.exists():
        return path.resolve().name
    return place
