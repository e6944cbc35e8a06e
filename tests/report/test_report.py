"""The verification as a page: well-formed, self-contained, escaped; and in a real browser legible
on a phone.
"""

import dataclasses
import html
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
from typing import Any

import pytest
from checkpoints import write_source
from safetensors.torch import load_file, save_file

import nf4conv
from nf4conv import RunOptions, quantize_checkpoint
from nf4conv.commands.verify import verify_checkpoint
from nf4conv.report.as_json import to_json
from nf4conv.report.page import page, write_page
from nf4conv.report.results.checks import VerifyReport
from nf4conv.sources.stored_weights import Finding

CPU = RunOptions(device="cpu")
UP = "model.layers.1.mlp.up_proj.weight"
VOID = {"meta", "br"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VerifyReport]:
    """Reports about one checkpoint: passed, without a source, and failed."""
    folder = tmp_path_factory.mktemp("report")
    source = write_source(folder / "source", layers=32)
    quantize_checkpoint(source, folder / "out", None, CPU)
    found = {
        "passed": verify_checkpoint(folder / "out", source, None, CPU),
        "no source": verify_checkpoint(folder / "out", None, None, CPU),
    }
    tensors = {
        name: tensor.clone() for name, tensor in load_file(folder / "out/model.safetensors").items()
    }
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


def embedded(content: str) -> dict[str, Any]:
    """Returns the data that the page's script draws."""
    found: dict[str, Any] = json.loads(content.partition('id="data">')[2].partition("</script>")[0])
    return found


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


def test_it_has_every_figure_and_no_path_of_this_machine(reports: dict[str, VerifyReport]):
    report = reports["failed"]
    content = page(report)
    stored = json.loads(to_json(report))
    found = embedded(content)
    assert found["weights"] == stored["weights"]
    assert found["checks"] == stored["checks"]
    assert found["normal"] == [["nf4/64", 0.092, 0.099]]
    assert (found["path"], found["source"]) == ("out", "source")
    assert str(Path(report.path).parent) not in content


def test_faults_are_grouped_by_check_and_kind_of_module(reports: dict[str, VerifyReport]):
    report = reports["failed"]
    tensor = "model.layers.{}.mlp.up_proj.weight.absmax"
    many = [Finding("scales", "m.safetensors", tensor.format(n), "negative") for n in range(40)]
    notes = [Finding("names", "m.safetensors", "", "made otherwise", is_fault=False)]
    report = dataclasses.replace(report, findings=(*notes, *many, *report.findings))
    groups = embedded(page(report))["findings"]
    assert groups[0]["check"] == "scales"
    assert groups[0]["kind"] == "model.layers.*.mlp.up_proj"
    assert len(groups[0]["lines"]) == 40
    assert not groups[-1]["is_fault"]
    assert groups[-1]["kind"] == ""
    assert sum(len(group["lines"]) for group in groups) == len(report.findings)
    keys = [(group["check"], group["kind"], group["is_fault"]) for group in groups]
    assert len(set(keys)) == len(keys)


def test_it_says_when_and_by_which_command_and_versions(reports: dict[str, VerifyReport]):
    when = datetime(2026, 11, 22, 22, 41, tzinfo=UTC)
    found = embedded(page(reports["passed"], when))
    assert found["date"] == "2026-11-22 22:41 UTC"
    assert found["command"] == "nf4conv verify out --source source"
    assert found["settings"]["nf4conv"] == nf4conv.__version__
    assert found["settings"]["torch"] == version("torch")
    assert found["settings"]["python"] == platform.python_version()
    strict = dataclasses.replace(
        reports["passed"].settings, exact=True, tolerance=0.1, lora=("/home/me/my adapter",)
    )
    report = dataclasses.replace(reports["passed"], settings=strict)
    content = page(report)
    assert embedded(content)["command"] == (
        "nf4conv verify out --source source --lora 'my adapter' --tolerance 0.1 --exact"
    )
    assert "/home/me" not in content


def test_names_cannot_break_the_page(reports: dict[str, VerifyReport]):
    evil = "model.layers.0.</script><script>alert(1)</script>@data@&\"'\x1b[31m.weight"
    row = dataclasses.replace(reports["passed"].weights[0], name=evil, kind=evil)
    report = dataclasses.replace(
        reports["passed"], weights=(row, *reports["passed"].weights[1:]), path=evil
    )
    content = page(report)
    assert content.count("<script") == 2
    assert "\x1b" not in content
    assert embedded(content)["weights"][0]["name"] == evil


def test_figures_that_are_no_numbers(reports: dict[str, VerifyReport]):
    """A destroyed weight has an infinite error: page and JSON say so."""
    row = dataclasses.replace(
        reports["passed"].weights[0], relative_error=math.inf, snr_db=-math.inf
    )
    report = dataclasses.replace(reports["passed"], weights=(row, *reports["passed"].weights[1:]))
    assert embedded(page(report))["weights"][0]["relative_error"] == "inf"
    stored = json.loads(to_json(report))
    assert stored["weights"][0]["relative_error"] == "inf"
    assert stored["weights"][1]["relative_error"] == report.weights[1].relative_error


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
    assert program, "make test-browser needs Chromium: apt-get install chromium"
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
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("kind", ["passed", "no source", "failed"])
def test_nothing_is_wider_than_the_window(
    reports: dict[str, VerifyReport], tmp_path: Path, kind: str, width: int
):
    """Neither the page nor a table in it. Measured inside the browser, in a frame of that width:
    below 500 pixels a window of its own does not go.
    """
    write_page(reports[kind], tmp_path / "report.html")
    probe = (
        f'<iframe id="f" src="report.html" width="{width}" height="3000" '
        f'style="border:0"></iframe><p id="out"></p>'
        "<script>onload = () => { const d = "
        "document.getElementById('f').contentDocument.documentElement;"
        "const wide = [...d.querySelectorAll('.scroll, .tall')].filter((e) => e.scrollWidth > "
        "e.clientWidth);"
        "document.getElementById('out').textContent = d.scrollWidth + ' of ' + d.clientWidth + ', "
        "' + wide.length; }"
        "</script>"
    )
    (tmp_path / "probe.html").write_text(probe)
    shown = chromium(
        "--allow-file-access-from-files", "--dump-dom", f"file://{tmp_path}/probe.html"
    )
    found = re.search(r"(\d+) of (\d+), (\d+)</p>", shown)
    assert found, shown[-500:]
    assert int(found[1]) <= int(found[2]) == width
    assert int(found[3]) == 0


def drawn(report: VerifyReport, folder: Path, script: str) -> Any:
    """Returns the value of a piece of JavaScript in the drawn page."""
    content = page(report)
    put = f"document.getElementById('probe').textContent = JSON.stringify((() => {{{script}}})())"
    probe = f"<pre id=probe></pre><script>{put}</script>"
    allowed = content.replace("</body>", f"{probe}</body>")
    (folder / "drawn.html").write_text(allowed)
    shown = chromium("--dump-dom", f"file://{folder}/drawn.html")
    return json.loads(html.unescape(shown.partition('<pre id="probe">')[2].partition("</pre>")[0]))


@pytest.mark.browser
def test_the_answer_comes_first_and_what_passed_is_folded(
    reports: dict[str, VerifyReport], tmp_path: Path
):
    answer = """
      const folded = document.querySelectorAll('details[open]');
      return [document.getElementById('answer').textContent, folded.length];"""
    assert drawn(reports["passed"], tmp_path, answer) == [f"Yes. {reports['passed'].verdict}", 0]
    text, _ = drawn(reports["failed"], tmp_path, answer)
    assert text == f"No. {reports['failed'].verdict}"
    headings = drawn(
        reports["failed"],
        tmp_path,
        "return [...document.querySelectorAll('h2')].map((e) => e.textContent)",
    )
    assert headings[:2] == ["Findings", "Checks"]


@pytest.mark.browser
def test_the_table_is_sorted_and_searched(reports: dict[str, VerifyReport], tmp_path: Path):
    rows = """
      const heads = () => [...document.querySelectorAll('.tall tbody th')];
      const rows = () => heads().map((e) => e.textContent);"""
    worst = sorted(reports["passed"].weights, key=lambda row: -row.relative_error)
    assert drawn(reports["passed"], tmp_path, f"{rows} return rows()[0]") == worst[0].name
    click = "document.querySelector('.tall th button').click();"
    by_name = drawn(reports["passed"], tmp_path, f"{rows} {click} return rows()")
    assert by_name == sorted(row.name for row in worst)
    search = "const s = document.querySelector('input'); s.value = 'LAYERS.7.'; s.oninput();"
    assert set(drawn(reports["passed"], tmp_path, f"{rows} {search} return rows()")) == {
        row.name for row in worst if ".layers.7." in row.name
    }


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_cell_of_the_map_stands_out_from_the_page(
    reports: dict[str, VerifyReport], tmp_path: Path, dark: bool
):
    """A contrast of 3 with the card, and of its number with the cell, by the formula of WCAG 2."""
    script = """
      const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
      const light = (color) => {
        const scale = color.startsWith('color') ? 1 : 255;
        const parts = color.match(/[\\d.]+/g).map((v) => linear(v / scale));
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
      };
      const ratio = (a, b) => {
        const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
        return (x + 0.05) / (y + 0.05);
      };
      const card = getComputedStyle(document.querySelector('section')).backgroundColor;
      const cells = [...document.querySelectorAll('.cells li')].map((e) => getComputedStyle(e));
      return [cells.length, Math.min(...cells.map((c) => ratio(c.backgroundColor, card))),
        Math.min(...cells.map((c) => ratio(c.backgroundColor, c.color)))];"""
    report = reports["passed"]
    if dark:
        script = (
            "document.querySelectorAll('style')[0].textContent = "
            "document.querySelectorAll('style')[0].textContent"
            + (".replace('(prefers-color-scheme: dark)', 'screen');" + script)
        )
    number, from_card, of_number = drawn(report, tmp_path, script)
    assert number == len(report.weights)
    assert from_card >= 3
    assert of_number >= 3


@pytest.mark.browser
def test_a_broken_weight_does_not_flatten_the_colours_of_the_others(
    reports: dict[str, VerifyReport],
    tmp_path: Path,
):
    """The map spans the errors within the tolerance; the largest of all stands in its tile."""
    rows = reports["passed"].weights
    broken = dataclasses.replace(rows[0], relative_error=math.inf)
    report = dataclasses.replace(reports["failed"], weights=(broken, *rows[1:]))
    script = """
      const cells = [...document.querySelectorAll('.cells li')];
      const within = cells.filter((e) => e.className !== 'beyond');
      const at = within.map((e) => parseFloat(e.style.getPropertyValue('--at')));
      const tiles = [...document.querySelectorAll('.tiles div')];
      const largest = tiles.find((e) => e.textContent.includes('largest')).firstChild.textContent;
      return [cells.length - at.length, Math.min(...at), Math.max(...at), largest];"""
    assert drawn(report, tmp_path, script) == [1, 0, 100, "inf"]


@pytest.mark.browser
def test_it_asks_only_what_was_answered(reports: dict[str, VerifyReport], tmp_path: Path):
    script = "return document.querySelector('h1').textContent"
    assert drawn(reports["passed"], tmp_path, script) == "Is out what it was made from?"
    assert drawn(reports["no source"], tmp_path, script) == "Is out a sound 4-bit checkpoint?"


@pytest.mark.browser
def test_tables_have_captions_and_scopes(reports: dict[str, VerifyReport], tmp_path: Path):
    script = """return [...document.querySelectorAll('table')].map((t) => [
      t.caption?.textContent.length > 0,
      [...t.querySelectorAll('thead th')].every((e) => e.scope === 'col'),
      [...t.querySelectorAll('tbody tr')].every((e) => e.cells[0].scope === 'row')])"""
    tables = drawn(reports["failed"], tmp_path, script)
    assert len(tables) == 7
    assert all(all(found) for found in tables), tables


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
