"""Options are declared once: the command line, the checks, the keywords of the functions and their
help come from the fields of one class a command. tests/typed.py shows what type checkers say.
"""

import dataclasses
import inspect
import json
import pydoc
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from command_line import run

import nf4conv
from nf4conv.cli import main
from nf4conv.declaring import deciding, narrowed, options_of, typed
from nf4conv.errors import OptionError, PlanError
from nf4conv.options import (
    DequantizeOptions,
    EvaluateOptions,
    InspectOptions,
    QuantizeOptions,
    RunOptions,
    SourceOptions,
    VerifyOptions,
)

# the class of each command, and its arguments
COMMANDS: dict[str, tuple[type[Any], list[str]]] = {
    "inspect": (InspectOptions, ["PATH"]),
    "quantize": (QuantizeOptions, ["SRC", "OUT"]),
    "verify": (VerifyOptions, ["PATH"]),
    "evaluate": (EvaluateOptions, ["OUT", "--source", "SRC"]),
    "dequantize": (DequantizeOptions, ["SRC", "OUT"]),
}
OF_DISPLAY = {
    "as_json", "quiet", "verbose", "dry_run", "report", "help",
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_has_each_field_with_its_default_and_its_choices(name: str):
    kind, words = COMMANDS[name]
    command = main.commands[name]
    fields = {field.name: field for field in options_of(kind) if not field.in_python}
    spelled = {}
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            spelled[parameter.name] = parameter
    assert spelled.keys() - OF_DISPLAY == fields.keys()
    program = click.Context(main, info_name="nf4conv", **main.context_settings)
    with command.make_context(name, [*words], parent=program) as context:
        made = kind(**{field: context.params[field] for field in fields})
    for field in fields.values():
        assert typed(field.name) in spelled[field.name].opts
        if field.default is not dataclasses.MISSING:
            assert getattr(made, field.name) == field.default, field.name
        choices = get_args(field.kinds[0])
        if isinstance(spelled[field.name].type, click.Choice):
            assert tuple(spelled[field.name].type.choices) == choices


@pytest.mark.parametrize("name", COMMANDS)
def test_the_function_shows_each_field_in_signature_and_help(name: str):
    kind, _ = COMMANDS[name]
    function = getattr(nf4conv, name)
    parameters = inspect.signature(function).parameters
    places = [
        one.name for one in parameters.values() if one.kind is inspect.Parameter.POSITIONAL_ONLY
    ]
    assert len(places) == (2 if name in ("quantize", "dequantize") else 1)
    assert {*[*parameters][len(places) :]} == {field.name for field in options_of(kind)}
    text = pydoc.plain(pydoc.render_doc(function))
    lines = text.splitlines()[3:]  # below the signature
    assert max(map(len, lines)) <= 104  # pydoc indents them by 4
    for field in options_of(kind):
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        if field.default is not dataclasses.MISSING:
            assert parameters[field.name].default == field.default
        (line,) = [line for line in lines if line.startswith(f"        {field.name}: ")]
        assert line.split()[1] == field.help.split()[0]


def test_progress_is_a_keyword_but_no_option_and_in_no_record(source: Path, tmp_path: Path):
    done: list[int] = []
    nf4conv.quantize(source, tmp_path / "out", device="cpu", progress=done.append)
    assert sum(done) > 0
    record = json.loads((tmp_path / "out" / "nf4conv.json").read_text())
    assert "progress" not in record["options"]
    assert "progress" not in deciding(QuantizeOptions(progress=done.append))
    assert QuantizeOptions(progress=done.append) == QuantizeOptions()
    assert "--progress" not in run("quantize", "--help").output
    # a run with another function for progress finds the result of the first
    again = nf4conv.quantize(source, tmp_path / "out", device="cpu", progress=lambda _: None)
    assert again.already_complete


def test_a_record_holds_what_the_command_itself_decides():
    made = deciding(QuantizeOptions(device="cpu", verify=True, token="secret", scales="search"))
    assert made["scales"] == "search"
    assert not made.keys() & {"device", "verify", "token", "revision", "push_to_hub"}
    assert deciding(DequantizeOptions()).keys() == {
        field.name
        for field in options_of(DequantizeOptions)
        if field.name in made or field.name == "fp8_scales"
    } - {"verify"}


def test_a_token_is_not_shown():
    assert "secret" not in repr(QuantizeOptions(token="secret"))


@pytest.mark.skipif(shutil.which("pyright") is None, reason="needs pyright")
def test_pyright_refuses_what_mypy_refuses():
    """`make check` runs mypy over the same file."""
    typed = Path(__file__).parents[1] / "typed.py"
    done = subprocess.run(
        ["pyright", "--pythonpath", sys.executable, typed], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_keyword_is_refused(name: str):
    kind, _ = COMMANDS[name]
    places = len(inspect.signature(getattr(nf4conv, name)).parameters) - len(options_of(kind))
    with pytest.raises(TypeError, match="unexpected keyword argument 'revison'"):
        getattr(nf4conv, name)(*["x"] * places, revison="main")


NAMES = [
    (kind, field.name)
    for kind, _ in COMMANDS.values()
    for field in options_of(kind)
    if field.holds_names
]


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_several_names_are_a_tuple_or_a_list_and_no_str(kind: Any, name: str):
    assert kind(**{name: ["a", "b"]}) == kind(**{name: ("a", "b")})
    with pytest.raises(OptionError) as refused:
        kind(**{name: "*.layers.0.*"})
    assert str(refused.value) == (
        f"{typed(name)} *.layers.0.*: expected several names, such as ('*.norm', '*.bias')"
    )


@pytest.mark.parametrize(
    ("kind", "name", "value", "expected"),
    [
        (QuantizeOptions, "quant_type", "nf5", "one of nf4, fp4"),
        (QuantizeOptions, "quant_type", "NF4", "one of nf4, fp4"),
        (QuantizeOptions, "blocksize", 100, "one of 32, 64, 128, 256, 512, 1024, 2048, 4096"),
        (QuantizeOptions, "scales", "searched", "one of absmax, search"),
        (QuantizeOptions, "dtype", "bf16", "one of bfloat16, float16, float32"),
        (QuantizeOptions, "double_quant", 2, "True or False"),
        (QuantizeOptions, "max_shard_size", "5GB", "a whole number from 1 on"),
        (QuantizeOptions, "include", None, "several names, such as"),
        (QuantizeOptions, "exclude", (1,), "several names, such as"),
        (DequantizeOptions, "dtype", "float64", "one of bfloat16, float16, float32"),
        (VerifyOptions, "tolerance", float("inf"), "a number from 0 to 2"),
        (VerifyOptions, "tolerance", 1e9, "a number from 0 to 2"),
        (RunOptions, "device", "mps", "auto, cpu, cuda or cuda:N "),
        (RunOptions, "device", "cuda:x", "auto, cpu, cuda or cuda:N "),
        (RunOptions, "device", 0, "auto, cpu, cuda or cuda:N "),
        (RunOptions, "workers", True, "a whole number from 0 to 1024"),
        (RunOptions, "workers", 2000, "a whole number from 0 to 1024"),
        (RunOptions, "part", "3/2", "I/N with I from 1 to N, such as 2/3"),
        (partial(EvaluateOptions, source="model"), "tokens", 1, "a whole number from 2 on"),
        (partial(EvaluateOptions, source="model"), "max_kl", -1.0, "a number from 0 on"),
    ],
)
def test_a_wrong_value_is_refused_as_it_is_typed(kind: Any, name: str, value: Any, expected: str):
    with pytest.raises(OptionError) as refused:
        kind(**{name: value})
    error = refused.value
    assert str(error).startswith(f"{typed(name)} {value}: expected {expected}")
    assert isinstance(error, PlanError)
    assert isinstance(error, ValueError)


def test_an_option_without_the_one_that_it_needs_is_refused():
    with pytest.raises(PlanError, match=r"^--public means nothing without --push-to-hub$"):
        QuantizeOptions(public=True)
    with pytest.raises(PlanError, match=r"^--tolerance means nothing without --verify$"):
        QuantizeOptions(tolerance=0.1)
    assert QuantizeOptions(tolerance=0.1, verify=True).tolerance == 0.1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--blocksize", "100"], "--blocksize 100: expected one of 32, 64, "),
        (["--workers", "9999999"], "--workers 9999999: expected a whole number from 0 to 1024"),
        (["--device", "mps"], "--device mps: expected auto, cpu, cuda or cuda:N (cuda is an"),
        (["--part", "4/3"], "--part 4/3: expected I/N"),
        (["--verify", "--tolerance", "-1"], "--tolerance -1.0: expected a number from 0 to 2"),
        (["--tolerance", "0.1"], "--tolerance means nothing without --verify"),
    ],
)
def test_the_command_line_says_the_same(arguments: list[str], line: str):
    done = run("quantize", "SRC", "OUT", *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"Error: {line}")


def test_errors_name_options_that_there_are():
    """Every option that a message of the package names is one of a command."""
    spelled = {"--help", "--version"}
    for command in main.commands.values():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                spelled |= {*parameter.opts, *parameter.secondary_opts}
    package = Path(nf4conv.__file__).parent
    others = {"--verified", "--local-dir"}
    for path in sorted(package.rglob("*.py")):
        if path.is_relative_to(package / "cli"):
            continue
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*", path.read_text()))
        assert named <= spelled | others, path


def test_what_a_base_class_declares_is_kept_when_options_are_narrowed():
    options = QuantizeOptions(buffer_size=5, workers=3, device="cpu", stream=True)
    run = narrowed(options, RunOptions)
    assert (run.buffer_size, run.workers, run.device) == (5, 3, "cpu")
    assert narrowed(options, SourceOptions).stream
