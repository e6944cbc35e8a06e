"""Documents say what the code says: pages that are made from it are up to date, and examples run as
they stand.
"""

import dataclasses
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_source

import nf4conv
from nf4conv.cli import main
from nf4conv.declaring import Checked

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LLAMA_CPP = os.environ.get("LLAMA_CPP", "")
sys.path.append(str(DOCS))

import generate  # noqa: E402 - from docs/


def test_what_is_generated_is_up_to_date():
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    assert page == generate.options_page(), "run: make docs"


PUBLIC = {name: getattr(nf4conv, name) for name in nf4conv.__all__}
PUBLIC_FUNCTIONS = [name for name, thing in PUBLIC.items() if inspect.isfunction(thing)]
PUBLIC_DATACLASSES = {
    thing
    for thing in PUBLIC.values()
    if dataclasses.is_dataclass(thing) and not issubclass(thing, Checked)
}


@pytest.mark.parametrize(
    "kind",
    sorted({*PUBLIC_DATACLASSES, *generate.row_classes()}, key=lambda kind: kind.__name__),
)
def test_a_docstring_names_every_field(kind):
    described = generate.attributes(kind)
    assert described.keys() == {field.name for field in dataclasses.fields(kind)}
    for name, text in described.items():
        assert text.endswith("."), name


def test_every_class_of_results_is_in_the_docs():
    in_docs = {*generate.RESULTS, *generate.row_classes()}
    assert in_docs >= PUBLIC_DATACLASSES - {nf4conv.QuantState, nf4conv.Plan}


@pytest.mark.parametrize("name", PUBLIC_FUNCTIONS)
def test_a_docstring_names_every_argument_and_the_result(name):
    text = inspect.getdoc(PUBLIC[name]) or ""
    signature = inspect.signature(PUBLIC[name])
    for argument, parameter in signature.parameters.items():
        options = "Keyword " if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
        section = text.partition(f"\n{options}Args:\n")[2].partition("\n\n")[0]
        assert re.search(rf"^ {{4}}{argument}: ", section, re.MULTILINE), argument
    assert "\nReturns:\n" in text or signature.return_annotation in (None, "None")
    assert "\nExample:\n" in text


def test_the_api_in_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_source(tmp_path / "model")
    names: dict[str, object] = {}
    blocks = blocks_of_python()
    assert len(blocks) >= 6
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)


def test_the_api_in_examples_passes_strict_type_checks(tmp_path: Path):
    pytest.importorskip("mypy")
    file = tmp_path / "examples.py"
    file.write_text("\n".join(blocks_of_python()))
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(file)]
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def blocks_of_python() -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```$", (DOCS / "python.md").read_text(), re.MULTILINE | re.DOTALL
    )


MARKED = r"^<!-- (runnable|parsed)[^\n]*-->\n```(\w+)\n(.*?)^```$"


def marked(how: str) -> list[tuple[str, str]]:
    """(language, text) of each block of the README under such a mark."""
    found = re.findall(MARKED, (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [(language, text) for mark, language, text in found if mark == how]


def test_every_block_of_the_readme_is_tried():
    """All blocks but the one that installs are run or parsed."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^([^\n]*)\n```(?:bash|python)\n(.*?)^```$", text, re.M | re.S)
    unmarked = [block for above, block in blocks if not above.startswith("<!-- ")]
    assert len(blocks) >= 5
    assert all(block.startswith("pip install ") for block in unmarked)


def test_the_readme_and_the_page_of_sources_show_options_that_exist():
    page = (DOCS / "sources.md").read_text()
    blocks = [text for _, text in marked("parsed")]
    blocks += re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [line for text in blocks for line in text.splitlines()]
    assert len(lines) >= 14
    for line in lines:
        program, name, *words = shlex.split(line, comments=True)
        assert program == "nf4conv"
        main.commands[name].make_context(name, words, resilient_parsing=False).close()


@pytest.mark.oracle
def test_the_recipes_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In one folder, one after the other, in this process."""
    from adapters import make_model
    from test_gguf import write_tokenizer

    make_model(tmp_path / "my-fine-tune", "llama")
    write_tokenizer(tmp_path / "my-fine-tune")
    monkeypatch.chdir(tmp_path)
    blocks = marked("runnable")
    assert len(blocks) >= 3
    for language, text in blocks:
        if language == "python":
            exec(compile(text, "README.md", "exec"), {})
            continue
        for line in text.splitlines():
            _, *words = shlex.split(line, comments=True)
            with pytest.raises(SystemExit) as ended:
                main(words)
            assert ended.value.code == 0, line
    assert (tmp_path / "merged-nf4/config.json").exists()


PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_documents_lead_somewhere(page: Path):
    for link in re.findall(r"\]\(([^)#…]+)[^)]*\)", page.read_text()):
        is_elsewhere = link.startswith("http")
        assert is_elsewhere or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_named_in_documents_exist(page: Path):
    """A path begins at the top, in the package or in tests/. It ends in a suffix or a slash."""
    tops = [ROOT, ROOT / "nf4conv", ROOT / "tests"]
    ours = {path.name for top in tops for path in top.iterdir()}
    text = re.sub(r"^```python$.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for found in re.finditer(
        r"(?<![\w./:~*-])(?:[\w-]+/)+(?:[\w-]+\.\w+)?|(?<![\w./])\w+\.py\b", text
    ):
        path = found[0]
        is_ours = path.partition("/")[0] in ours or page.name == "CONTRIBUTING.md"
        is_module = "/" not in path and [
            *ROOT.glob(f"tests/**/{path}"),
            *ROOT.glob(f"nf4conv/**/{path}"),
        ]
        assert not is_ours or is_module or any((top / path).exists() for top in tops), path
