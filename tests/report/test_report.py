"""The verification as a page: well-formed, self-contained, escaped; and in a real browser legible
on a phone.
"""

import dataclasses
import json
import math
import platform
import re
import shutil
import subprocess
from datetime import UTC, datetime
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import pytest
from checkpoints import write_source
from safetensors.torch import load_file, save_file

import nf4conv
from nf4conv.check.structure import Finding
from nf4conv.report.as_json import to_json
from nf4conv.report.page import page, write_page
from nf4conv.report.results import VerifyReport
from nf4conv.report.text.lines import verification_lines

CPU = {"device": "cpu"}
UP = "model.layers.1.mlp.up_proj.weight"
VOID = {"meta", "br"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VerifyReport]:
    """Reports about one checkpoint: passed, without a source, and failed."""
    folder = tmp_path_factory.mktemp("report")
    source = write_source(folder / "source", layers=32)
    nf4conv.quantize(source, folder / "out", **CPU)
    found = {
        "passed": nf4conv.verify(folder / "out", source=source, **CPU),
        "no source": nf4conv.verify(folder / "out", **CPU),
    }
    tensors = {
        name: tensor.clone() for name, tensor in load_file(folder / "out/model.safetensors").items()
    }
    tensors[UP][100] ^= 4
    del tensors[f"{UP.replace('.1.', '.7.')}.quant_map"]
    save_file(tensors, folder / "out/model.safetensors", {"format": "pt"})
    found["failed"] = nf4conv.verify(folder / "out", source=source, **CPU)
    return found


class Checker(HTMLParser):
    """Holds that tags are closed in their order; gathers text, tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "data")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, _attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def parsed(content: str) -> Checker:
    checker = Checker()
    checker.feed(content)
    checker.close()
    assert checker.open == []
    return checker


@pytest.mark.parametrize("kind", ["passed", "no source", "failed"])
def test_the_page_is_well_formed_and_needs_nothing_else(
    reports: dict[str, VerifyReport], kind: str
):
    content = page(reports[kind])
    checker = parsed(content)
    assert checker.links == []
    assert not re.search(r"url\(|@import|https?://", content)
    assert "default-src 'none'" in content
    assert '<meta name="viewport"' in content
    assert reports[kind].verdict in checker.text


def test_it_shows_every_weight_and_no_path_of_this_machine(reports: dict[str, VerifyReport]):
    report = reports["failed"]
    content = page(report)
    text = parsed(content).text
    for row in report.weights:
        assert row.name in text
    assert f"Checked: {', '.join(report.checks)}" in text
    assert "out, verified against source" in text
    assert str(Path(report.path).parent) not in content


def test_faults_are_grouped_by_check_and_kind_of_module(reports: dict[str, VerifyReport]):
    report = reports["failed"]
    tensor = "model.layers.{}.mlp.up_proj.weight.absmax"
    many = [Finding("scales", "m.safetensors", tensor.format(n), "negative") for n in range(140)]
    notes = [Finding("names", "m.safetensors", "", "made otherwise", is_fault=False)]
    text = parsed(page(dataclasses.replace(report, findings=(*notes, *many)))).text
    fault = text.index("fault: scales, model.layers.*.mlp.up_proj (140)")
    assert fault < text.index("note: names, m.safetensors (1)")
    assert text.count(": negative") == 100
    assert "… and 40 more" in text


def test_a_person_gets_one_screen(reports: dict[str, VerifyReport]):
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    damage = [
        Finding(check, "m.safetensors", f"model.layers.{n}.{module}.weight", f"{n + 1} are wrong")
        for module in modules
        for n in range(64)
        for check in ("codes", "bound", "tolerance")
    ]
    notes = [Finding("copied files", "README.md", "", "not the source's", is_fault=False)]
    report = dataclasses.replace(reports["failed"], findings=(*notes, *damage))
    lines = list(verification_lines(report, 80))
    assert len(lines) < 24
    assert "model.layers.0.q_proj.weight: 1 are wrong; and 63 more like it" in lines[0]
    assert "… and 321 more; --json lists them all" in lines


def test_it_says_when_and_by_which_versions(reports: dict[str, VerifyReport]):
    when = datetime(2026, 11, 22, 22, 41, tzinfo=UTC)
    text = parsed(page(reports["passed"], when)).text
    versions = f"torch {version('torch')} and Python {platform.python_version()}"
    assert f"Verified 2026-11-22 22:41 UTC with nf4conv {nf4conv.__version__}, {versions}" in text


def test_names_cannot_break_the_page(reports: dict[str, VerifyReport]):
    evil = "model.layers.0.</script><script>alert(1)</script>{{ 7 * 7 }}&\"'\x1b[31m.weight"
    row = dataclasses.replace(reports["passed"].weights[0], name=evil)
    report = dataclasses.replace(
        reports["passed"], weights=(row, *reports["passed"].weights[1:]), path=evil
    )
    content = page(report)
    assert content.count("<script") == 1
    assert "\x1b" not in content
    assert "<script>alert(1)</script>{{ 7 * 7 }}&" in parsed(content).text


@pytest.mark.parametrize("error", [math.inf, math.nan])
def test_figures_that_are_no_numbers(reports: dict[str, VerifyReport], error: float):
    """A destroyed weight has an infinite error: page and JSON say so."""
    last = reports["passed"].weights[-1]
    assert last.errors is not None
    errors = dataclasses.replace(last.errors, squared_error=error)
    row = dataclasses.replace(last, errors=errors)
    report = dataclasses.replace(reports["passed"], weights=(*reports["passed"].weights[:-1], row))
    content = page(report)
    first = content.partition('<table class="sortable">')[2].partition("<tbody>")[2]
    assert first.index(row.name) < 100
    assert f'class="bad">{error}</td>' in first
    stored = json.loads(to_json(report))
    assert stored["weights"][-1]["errors"]["relative_error"] == str(error)


def test_the_json_holds_everything(reports: dict[str, VerifyReport]):
    stored = json.loads(to_json(reports["failed"]))
    own = {"schema_version", "nf4conv", "command", "verdict"}
    assert {field.name for field in dataclasses.fields(VerifyReport)} | own == stored.keys()
    assert len(stored["weights"]) == len(reports["failed"].weights)
    assert stored["passed"] is False


# --- in a browser ---------------------------------------------------------------------------------


def chromium(*arguments: str) -> str:
    program = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    assert program, "pytest -m browser needs Chromium: apt-get install chromium"
    command = [
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.browser
def test_it_fits_a_phone_and_a_click_sorts(reports: dict[str, VerifyReport], tmp_path: Path):
    """Measured inside the browser, in a frame: below 500 pixels a window of its own does not go."""
    write_page(reports["failed"], tmp_path / "report.html")
    (tmp_path / "probe.html").write_text("""
      <iframe id="f" src="report.html" width="390" height="3000"></iframe><p id="out"></p>
      <script>onload = () => {
        const page = document.getElementById("f").contentDocument, root = page.documentElement;
        const rows = () => [...page.querySelectorAll(".sortable tbody th")];
        const cells = () => rows().map(th => th.textContent);
        page.querySelector(".sortable thead th").click();
        const down = cells();
        page.querySelector(".sortable thead th").click();
        const sorted = cells().join() === down.reverse().join();
        document.getElementById("out").textContent =
          `${root.scrollWidth <= root.clientWidth} ${sorted} ${down.length}`;
      }</script>""")
    probe = f"file://{tmp_path}/probe.html"
    shown = chromium("--allow-file-access-from-files", "--dump-dom", probe)
    assert f'<p id="out">true true {len(reports["failed"].weights)}</p>' in shown
