"""A message names options as the command line does there, and as keywords to callers in Python."""

import ast
import inspect
import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import click
import pytest
import torch
from checkpoints import write_source
from click.testing import CliRunner
from safetensors.torch import save_file

import nf4conv
from nf4conv.cli import main
from nf4conv.errors import Nf4convError, OptionError, OutputError, PlanError
from nf4conv.wording import LINES, PARTS, in_python

PACKAGE = Path(nf4conv.__file__).parent
NAMED = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*")
OF_RESULTS = {"--json"}
"""Options that only texts of the command line name, which no error holds."""


def options_of_commands() -> set[str]:
    found = set()
    for command in main.commands.values():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                found |= {*parameter.opts, *parameter.secondary_opts}
    return found


def texts_of(path: Path) -> Iterator[str]:
    """Yields the strings of a module that are no docstrings; "…" stands for what is put in."""
    tree = ast.parse(path.read_text())
    seen = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            seen.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = []
            for part in node.values:
                seen.add(part)
                parts.append(str(part.value) if isinstance(part, ast.Constant) else "…")
            yield "".join(parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in seen and isinstance(node.value, str):
            yield node.value


def messages() -> Iterator[tuple[str, str]]:
    """Yields every text of the package that names an option, with its module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.is_relative_to(PACKAGE / "cli") or path.name == "wording.py":
            continue
        for text in texts_of(path):
            if NAMED.search(text):
                yield path.name, text


MESSAGES = list(messages())


def test_messages_are_found():
    assert len(MESSAGES) > 120
    assert any("--push-to-hub" in text for _, text in MESSAGES)


@pytest.mark.parametrize(("module", "text"), MESSAGES)
def test_callers_in_python_read_no_option_of_the_command_line(module: str, text: str):
    """What is left of them stands in a command for a shell."""
    assert {*NAMED.findall(text)} <= options_of_commands(), module
    left = re.sub(r"""nf4conv [a-z]+ (?:'[^']*'|"[^"]*"|[^;,`'"])*""", "", in_python(text))
    assert {*NAMED.findall(left)} <= OF_RESULTS, module


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "OUT: exists; choose another, or --overwrite",
            "OUT: exists; choose another, or overwrite=True",
        ),
        ("leave --scales out to keep them", "leave scales out to keep them"),
        ("--moe stacked: not here; --moe packed is", "moe='stacked': not here; moe='packed' is"),
        ("--dtype bf16 holds them", "dtype='bfloat16' holds them"),
        ("give another --dtype", "give another dtype"),
        ("or --device cpu", "or device='cpu'"),
        ("--device cuda:9: torch finds 1", "device='cuda:9': torch finds 1"),
        ("--device cuda:0,cuda:1 does not go", "device='cuda:0,cuda:1' does not go"),
        ("--part 2/3 has nothing to do", "part='2/3' has nothing to do"),
        ("--calibrate my.txt: no such file", "calibrate=['my.txt']: no such file"),
        (
            "--push-to-hub me/it: is public; say --public",
            "push_to_hub='me/it': is public; say public=True",
        ),
        ("(--tolerance 0 lets these pass)", "(tolerance=0 lets these pass)"),
        ("--calibration-tokens 10: expected", "calibration_tokens=10: expected"),
        ("with --device cuda:N, a part", "with device='cuda:N', a part"),
        ("--device cpu,cpu does not go", "device='cpu,cpu' does not go"),
        ("--dry-run shows why", "describe_plan shows why"),
        (
            "differs in --verify, --dtype (--verify was True, is False)",
            "differs in verify, dtype (verify was True, is False)",
        ),
        (
            "`nf4conv verify OUT --source SRC` does, --overwrite not",
            "`nf4conv verify OUT --source SRC` does, overwrite=True not",
        ),
        (
            "do nf4conv quantize 'a, b' OUT --lora X, or --moe packed",
            "do nf4conv quantize 'a, b' OUT --lora X, or moe='packed'",
        ),
        (
            "do nf4conv verify 'o u'\"'\"'t' --source SRC",
            "do nf4conv verify 'o u'\"'\"'t' --source SRC",
        ),
        ("/a/--overwrite/b: --no-such-option", "/a/--overwrite/b: --no-such-option"),
    ],
)
def test_options_become_keywords(line: str, expected: str):
    assert in_python(line) == expected


def test_every_function_with_options_words_what_it_says():
    """Those that take keywords call one that takes classes."""
    for name in nf4conv.__all__:
        public = getattr(nf4conv, name)
        if not inspect.isfunction(public) or not public.__module__.startswith("nf4conv.commands."):
            continue
        if public.__module__.endswith(".shortcuts"):
            continue
        assert hasattr(public, "__wrapped__"), name
    assert hasattr(nf4conv.plan_part, "__wrapped__")


def test_lines_and_parts_are_fields_of_results():
    """So that a field that is renamed is found here."""
    named = set()
    for name in [*nf4conv.__all__, "DiffusersPlan"]:
        public = getattr(nf4conv, name)
        if isinstance(public, type) and is_dataclass(public):
            named |= {field.name for field in fields(public)}
    assert named >= LINES | PARTS


def test_results_name_options_as_their_reader_knows_them(tmp_path: Path):
    source = write_source(tmp_path / "source")
    report = nf4conv.quantize(source, tmp_path / "out", include=["*.q_proj.*"], device="cpu")
    assert "packing what include and exclude leave out would make it" in report.notes[0]
    options = nf4conv.QuantizeOptions(include=["*.q_proj.*"], exclude=["*.no.*"])
    run = nf4conv.RunOptions(part="2/2")
    plan = nf4conv.plan_part(nf4conv.plan_quantization(source, options), run)
    found = json.loads(nf4conv.to_json(nf4conv.describe_plan(plan)))
    assert not NAMED.findall(json.dumps(found))
    words = "--include *.q_proj.* --exclude *.no.* --part 2/2 --dry-run --json"
    arguments = ["quantize", str(source), str(tmp_path / "new"), *words.split()]
    told = CliRunner().invoke(main, arguments)
    assert {"--include", "--exclude", "--max-shard-size"} <= {*NAMED.findall(told.stdout)}
    expected = json.loads(told.stdout, object_hook=values_in_python)
    assert found == expected


def values_in_python(found: dict[str, object]) -> dict[str, object]:
    """Translates all texts of a JSON object."""
    translated: dict[str, object] = {}
    for key, value in found.items():
        if isinstance(value, list):
            value = [in_python(each) if isinstance(each, str) else each for each in value]
        translated[key] = in_python(value) if isinstance(value, str) else value
    return translated


def test_a_comparison_names_what_would_pass(tmp_path: Path):
    a = tmp_path / "a.safetensors"
    b = tmp_path / "b.safetensors"
    save_file({"x": torch.ones(4)}, a)
    save_file({"x": torch.ones(4, dtype=torch.float16)}, b)
    verdict = nf4conv.compare(a, b).verdict
    assert verdict.endswith("(tolerance=0 lets these pass)")
    told = CliRunner().invoke(main, ["compare", str(a), str(b)])
    assert "(--tolerance 0 lets these pass)" in told.stdout


def test_each_caller_reads_its_own_words(tmp_path: Path):
    source = write_source(tmp_path / "source")
    out = tmp_path / "out"
    with pytest.raises(PlanError) as refused:
        nf4conv.quantize(source, out, push_to_hub="me/it", part="1/2")
    found = str(refused.value)
    assert found.startswith("push_to_hub does not go with part, ray=True or several GPUs: ")
    written = CliRunner().invoke(
        main,
        ["quantize", str(source), str(out), "--push-to-hub", "me/it", "--part", "1/2", "--json"],
    )
    assert written.exit_code == 2
    expected = "--push-to-hub does not go with --part, --ray or several GPUs: "
    assert f"Error: {expected}" in written.stderr
    assert json.loads(written.stdout)["error"].startswith(expected)


def test_classes_of_options_read_keywords_too(tmp_path: Path):
    source = write_source(tmp_path / "source")
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"choose another folder, or overwrite=True$") as refused:
        nf4conv.quantize_checkpoint(source, out)
    assert refused.value.line.endswith("choose another folder, or --overwrite")


def test_both_words_travel_between_processes():
    error = PlanError("give another --dtype")
    error.args = (in_python(error.line),)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert str(again) == "give another dtype"
    assert again.line == "give another --dtype"
    wrong = OptionError("quant_type", "int4", "nf4 or fp4")
    refused = pickle.loads(pickle.dumps(wrong))  # noqa: S301
    assert isinstance(refused, Nf4convError)
    assert str(refused) == "quant_type='int4': expected nf4 or fp4"
    assert refused.line == "--quant-type int4: expected nf4 or fp4"
