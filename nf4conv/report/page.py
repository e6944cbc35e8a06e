"""Writes a verification as one HTML page that needs no network.

page.html is its template. page.js is the script in it, which draws the JSON of the report.
"""

import html
import json
import platform
import re
import shlex
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from nf4conv.output.writer import write_result
from nf4conv.report.as_json import content_of
from nf4conv.report.places import kind_name, place_of
from nf4conv.report.results.checks import VerifyReport
from nf4conv.report.text.terminal import printable
from nf4conv.sources.stored_weights import split_component


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


def page(report: VerifyReport, when: datetime | None = None) -> str:
    """Returns a verification as HTML. It names folders of this machine, but not where they are.

    Args:
        report: what `verify_checkpoint` returned.
        when: the time that the page states. None for now.
    """
    name = folder_name(report.path)
    content = content_of(report)
    content["path"] = name
    content["source"] = report.source and folder_name(report.source)
    content["normal"] = report.normal
    content["findings"] = _grouped(report, name)
    content["command"] = _command(report)
    content["date"] = (when or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")
    content["settings"]["lora"] = ", ".join(map(folder_name, report.settings.lora)) or "none"
    content["settings"]["python"] = platform.python_version()
    data = json.dumps(content, separators=(",", ":"), allow_nan=False)
    verdict = html.escape(printable(report.verdict))
    title = html.escape(printable(name))
    values = {
        "title": title,
        "verdict": verdict,
        "state": "passed" if report.passed else "failed",
        "data": data.replace("<", "\\u003c"),  # no name can end the script
        "script": _read("page.js").rstrip(),
    }
    names = "|".join(values)
    return re.sub(f"@({names})@", lambda found: values[found[1]], _read("page.html"))


def _grouped(report: VerifyReport, name: str) -> list[dict[str, Any]]:
    """Returns the findings by check and kind of module, faults first.

    Args:
        report: what `verify_checkpoint` returned.
        name: what to write for the path of the checkpoint.
    """
    groups: dict[tuple[bool, str, str], list[str]] = {}
    for finding in report.findings:
        weight, _ = split_component(finding.tensor)
        kind = kind_name(place_of(weight)) if weight else ""
        line = finding.line().replace(report.path, name)
        groups.setdefault((finding.is_fault, finding.check, kind), []).append(line)
    found = []
    for (is_fault, check, kind), lines in groups.items():
        found.append({"check": check, "is_fault": is_fault, "kind": kind, "lines": lines})
    return sorted(found, key=lambda group: not group["is_fault"])


def _command(report: VerifyReport) -> str:
    """Returns the command line that verifies the same, with names in place of paths."""
    words = ["nf4conv", "verify", folder_name(report.path)]
    if report.source is not None:
        words += ["--source", folder_name(report.source)]
    for adapter in report.settings.lora:
        words += ["--lora", folder_name(adapter)]
    if report.settings.tolerance != "default":
        words += ["--tolerance", f"{report.settings.tolerance:g}"]
    if report.settings.exact:
        words.append("--exact")
    return shlex.join(words)


def _read(name: str) -> str:
    return files("nf4conv.report").joinpath(name).read_text(encoding="utf-8")


def folder_name(place: str) -> str:
    """Returns the name of a folder without its path. A name on the Hub stays as it is."""
    path = Path(place)
    if path.is_absolute() or path.exists():
        return path.resolve().name
    return place
