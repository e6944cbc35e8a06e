"""The command line: what it prints where, how fast it starts, and that the README tells of every option."""

import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
import torch
from checkpoints import contents, write_source
from click.testing import CliRunner
from safetensors.torch import save_file

import nf4conv
from nf4conv.cli import main
from nf4conv.options import QuantizeOptions, RunOptions

README = Path(__file__).parents[1] / "README.md"


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nf4conv", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_help_is_there_at_once():
    run("--help")  # compiles the modules
    seconds = []
    for _ in range(7):
        started = time.perf_counter()
        assert run("--help").returncode == 0
        seconds.append(time.perf_counter() - started)
    # the fastest, because other programs share the machine; it is the work that is bounded here
    assert min(seconds) < 0.3, statistics.median(seconds)


def test_version():
    assert run("--version").stdout.strip() == nf4conv.__version__


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_option_has_a_help_and_stands_in_the_readme(name):
    readme = README.read_text()
    for parameter in main.commands[name].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
            for spelling in [*parameter.opts, *parameter.secondary_opts]:
                if spelling.startswith("--") and spelling != "--help":
                    assert re.search(rf"{spelling}\b", readme), f"{spelling} of {name} is not in the README"


def test_defaults_are_those_of_the_python_functions():
    command = main.commands["quantize"]
    with command.make_context("quantize", ["SRC", "OUT"]) as context:
        parsed = context.params
    for home in (QuantizeOptions(), RunOptions()):
        assert {name: parsed[name] for name in home.__dataclass_fields__} == dataclasses.asdict(home)


def test_json_is_all_that_stdout_gets(tmp_path):
    source = write_source(tmp_path / "source")
    done = run("quantize", source, tmp_path / "out", "--json", "--device", "cpu")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert (report["packed"], report["copied"], report["device"]) == (12, 7, "cpu")
    files = contents(tmp_path / "out")
    assert report["bytes_after"] == sum(len(raw) for name, raw in files.items() if name.endswith(".safetensors"))
    assert report["bits_per_parameter"] == pytest.approx(8 * report["bytes_after"] / report["parameters"])


def test_quiet_says_nothing(tmp_path):
    done = run("quantize", write_source(tmp_path / "source"), tmp_path / "out", "--quiet", "--device", "cpu")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_summary(tmp_path):
    done = run("quantize", write_source(tmp_path / "source"), tmp_path / "out", "--device", "cpu")
    assert done.returncode == 0
    assert done.stderr == ""  # no bar where no terminal is
    first, second, third = done.stdout.splitlines()
    assert first == f"{tmp_path / 'out'}: 12 weights packed, 7 tensors kept"
    assert re.fullmatch(r"869.12 kB → \d+.\d+ kB \(\d.\d\dx, \d+.\d\d bits per parameter\)", second), second
    assert re.fullmatch(r"\d+.\d s on cpu, \d+.\d\d GB/s \(all workers: .*read \d.\d s.*\)", third), third


def test_dry_run_shows_every_tensor_with_its_reason_and_writes_nothing(tmp_path):
    source = write_source(tmp_path / "source")
    result = CliRunner().invoke(main, ["quantize", str(source), str(tmp_path / "out"), "--dry-run", "--json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert len(plan["tensors"]) == 19
    assert {row["action"] for row in plan["tensors"]} == {"pack", "copy"}
    assert all(row["reason"] for row in plan["tensors"])
    assert sum(row["bytes_in"] for row in plan["tensors"]) == plan["totals"]["bytes_in"]
    assert plan["config"]["quantization_config"]["quant_method"] == "bitsandbytes"
    assert not (tmp_path / "out").exists()
    text = CliRunner().invoke(main, ["quantize", str(source), str(tmp_path / "out"), "--dry-run"]).stdout
    assert "12 weights packed, 7 tensors kept, 1 files" in text


def test_the_plan_s_size_is_the_result_s_but_for_a_few_digits(tmp_path):
    source = write_source(tmp_path / "source")
    planned = json.loads(run("quantize", source, tmp_path / "out", "--dry-run", "--json").stdout)["totals"]["bytes_out"]
    written = json.loads(run("quantize", source, tmp_path / "out", "--json", "--device", "cpu").stdout)["bytes_after"]
    assert planned - 12 * 8 <= written <= planned


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("1GiB", 2**30), ("77", 77)])
def test_sizes(text, size):
    from nf4conv.cli import _Size

    assert _Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["5 giraffes", "-1GB", "0", "GB", ""])
def test_sizes_that_are_none(tmp_path, text):
    result = CliRunner().invoke(main, ["quantize", str(tmp_path), str(tmp_path), "--max-shard-size", text])
    assert result.exit_code == 2
    assert "--max-shard-size" in result.stderr


def test_no_color():
    colored = CliRunner().invoke(main, ["quantize", "missing", "out"], color=True)
    plain = CliRunner().invoke(main, ["quantize", "missing", "out"], color=True, env={"NO_COLOR": "1"})
    assert "\x1b[" in colored.stderr
    assert plain.stderr == "Error: missing: no such file or folder\n"


def test_names_in_a_file_neither_break_lines_nor_drive_the_terminal(tmp_path):
    source = write_source(tmp_path / "source")
    name = "model.norm\n\x1b[2J\x9b\u202e.weight"
    save_file(
        {"model.layers.0.mlp.up_proj.weight": torch.ones(64, 64), name: torch.ones(4)}, source / "model.safetensors"
    )
    shown = CliRunner().invoke(main, ["quantize", str(source), "out", "--dry-run"])
    assert shown.exit_code == 0
    assert "model.norm\\n\\x1b[2J\\x9b\\u202e.weight" in shown.stdout
    assert len(shown.stdout.splitlines()) == 4
    content = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(content.replace(b"[4]", b"[5]"))
    refused = CliRunner().invoke(main, ["quantize", str(source), "out"])
    assert refused.exit_code == 2
    [line] = refused.stderr.splitlines()
    assert "model.norm\\n\\x1b[2J\\x9b\\u202e.weight: 16 bytes, expected 20" in line


def test_an_output_without_arrows_does_not_fail_the_run(tmp_path):
    done = run("quantize", write_source(tmp_path / "source"), tmp_path / "out", PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stderr
    assert "869.12 kB \\u2192 " in done.stdout


def test_a_reader_that_leaves_early_is_no_error_worth_a_traceback(tmp_path):
    command = f"{sys.executable} -m nf4conv quantize {write_source(tmp_path / 'source')} out --dry-run | true"
    done = subprocess.run(["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) in [(0, ""), (141, "")]
