"""The verification as a page: well-formed, self-contained, escaped; and in a real browser legible on a phone."""

import dataclasses
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from checkpoints import write_source
from safetensors.torch import load_file, save_file

from nf4conv import RunOptions, quantize_checkpoint
from nf4conv.commands.verify import verify_checkpoint
from nf4conv.report.page import page, write_json, write_page
from nf4conv.report.results import VerifyReport

CPU = RunOptions(device="cpu")
UP = "model.layers.1.mlp.up_proj.weight"
VOID = {"meta", "br"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VerifyReport]:
    """Of one checkpoint: passed, without a source, and failed."""
    folder = tmp_path_factory.mktemp("report")
    source = write_source(folder / "source", layers=32)
    quantize_checkpoint(source, folder / "out", None, CPU)
    found = {
        "passed": verify_checkpoint(folder / "out", source, None, CPU),
        "no source": verify_checkpoint(folder / "out", None, None, CPU),
    }
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "out/model.safetensors").items()}
    tensors[UP][100] ^= 4
    del tensors[f"{UP.replace('.1.', '.7.')}.quant_map"]
    save_file(tensors, folder / "out/model.safetensors", {"format": "pt"})
    found["failed"] = verify_checkpoint(folder / "out", source, None, CPU)
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
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, _attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def parsed(content: str) -> Checker:
    checker = Checker()
    checker.feed(content)
    checker.close()
    assert checker.open == []
    return checker


@pytest.mark.parametrize("kind", ["passed", "no source", "failed"])
def test_the_page_is_well_formed_and_needs_nothing_else(reports: dict[str, VerifyReport], kind: str):
    content = page(reports[kind])
    checker = parsed(content)
    assert checker.links == []
    assert "script" not in checker.tags
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org)", content)
    assert '<meta name="viewport"' in content
    assert reports[kind].verdict in checker.text


def test_what_it_shows(reports: dict[str, VerifyReport]):
    checker = parsed(page(reports["passed"]))
    worst = max(reports["passed"].weights, key=lambda row: row.relative_error)
    assert worst.name in checker.text
    assert f"{worst.relative_error:.4f}" in checker.text
    assert checker.text.count("✓ ok") == len(reports["passed"].checks)
    for heading in ("Checks", "Distribution", "Largest errors", "Size", "Kinds of modules", "Settings"):
        assert heading in checker.text
    assert "Findings" not in checker.text
    failed = parsed(page(reports["failed"]))
    assert "1 of 65,536 codes are not the nearest" in failed.text
    assert failed.text.index("Findings") < failed.text.index("Checks")
    assert "✗ FAIL" in failed.text


def test_names_cannot_break_the_page(reports: dict[str, VerifyReport]):
    evil = "model.layers.0.<script>alert(1)</script>&\"'\x1b[31m.weight"
    row = dataclasses.replace(reports["passed"].weights[0], name=evil, kind=evil)
    report = dataclasses.replace(reports["passed"], weights=(row, *reports["passed"].weights[1:]), path=evil)
    content = page(report)
    assert "<script" not in content
    assert "\x1b" not in content
    assert "<script>alert(1)</script>" in parsed(content).text


def test_figures_that_are_no_numbers(reports: dict[str, VerifyReport], tmp_path: Path):
    """A destroyed weight has an infinite error: page and JSON say so."""
    row = dataclasses.replace(reports["passed"].weights[0], relative_error=math.inf, snr_db=-math.inf)
    report = dataclasses.replace(reports["passed"], weights=(row, *reports["passed"].weights[1:]))
    parsed(page(report))
    write_json(report, tmp_path / "report.json")
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored["weights"][0]["relative_error"] == "inf"
    assert stored["weights"][1]["relative_error"] == report.weights[1].relative_error


def test_the_json_holds_everything(reports: dict[str, VerifyReport], tmp_path: Path):
    write_json(reports["failed"], tmp_path / "report.json")
    stored = json.loads((tmp_path / "report.json").read_text())
    assert {field.name for field in dataclasses.fields(VerifyReport)} | {"verdict"} == stored.keys()
    assert len(stored["weights"]) == len(reports["failed"].weights)
    assert stored["passed"] is False


# --- in a browser ----------------------------------------------------------------------------------------------------


def chromium(*arguments: str) -> str:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program, "make test-browser needs Chromium: apt-get install chromium"
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("kind", ["passed", "no source", "failed"])
def test_nothing_is_wider_than_the_window(reports: dict[str, VerifyReport], tmp_path: Path, kind: str, width: int):
    """Measured inside the browser, in a frame of that width: below 500 pixels a window of its own does not go."""
    write_page(reports[kind], tmp_path / "report.html")
    probe = (
        f'<iframe id="f" src="report.html" width="{width}" height="3000" style="border:0"></iframe><p id="out"></p>'
        "<script>onload = () => { const d = document.getElementById('f').contentDocument.documentElement;"
        "document.getElementById('out').textContent = d.scrollWidth + ' of ' + d.clientWidth; }</script>"
    )
    (tmp_path / "probe.html").write_text(probe)
    shown = chromium("--allow-file-access-from-files", "--dump-dom", f"file://{tmp_path}/probe.html")
    found = re.search(r"(\d+) of (\d+)</p>", shown)
    assert found, shown[-500:]
    assert int(found[1]) <= int(found[2]) == width


@pytest.mark.browser
def test_it_is_drawn_and_printed(reports: dict[str, VerifyReport], tmp_path: Path):
    write_page(reports["passed"], tmp_path / "report.html")
    address = f"file://{tmp_path}/report.html"
    chromium("--window-size=1280,2000", f"--screenshot={tmp_path}/page.png", address)
    chromium(f"--print-to-pdf={tmp_path}/page.pdf", address)
    assert (tmp_path / "page.png").stat().st_size > 50_000
    pdf = (tmp_path / "page.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert 1 < len(re.findall(rb"/Type ?/Page\b", pdf)) < 12
