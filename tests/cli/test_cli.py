"""The command line: what it prints where, how fast it starts, and what it refuses."""

import contextlib
import fcntl
import json
import os
import pty
import re
import statistics
import struct
import subprocess
import sys
import termios
import time
from importlib.metadata import version

import command_line
import pytest
import torch
from checkpoints import write_source
from pace import unit
from safetensors.torch import save_file

import nf4conv
from nf4conv.cli import main
from nf4conv.cli.parameters import Size
from nf4conv.commands.writing import dry_run
from nf4conv.options import QuantizeOptions
from nf4conv.report.text.lines import inspection_lines, plan_lines
from nf4conv.report.text.progress_bar import ProgressBar, Step


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nf4conv", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_help_is_there_at_once():
    run("--help")  # compiles the modules
    seconds = []
    for _ in range(7):
        before = os.times()
        assert run("--help").returncode == 0
        after = os.times()
        seconds.append(
            sum(after[2:4]) - sum(before[2:4])
        )  # of the processor, which other programs do not lengthen
    assert min(seconds) < 2 * unit(), statistics.median(seconds)


@pytest.mark.parametrize("spelled", ["--version", "-V"])
def test_version(spelled):
    assert command_line.run(spelled).stdout == f"nf4conv {nf4conv.__version__}\n"


def test_json_is_all_that_stdout_gets_and_quiet_says_nothing(source, tmp_path):
    command = ["quantize", source, tmp_path / "out", "--device", "cpu"]
    planned = json.loads(command_line.run(*command, "--json", "--dry-run").stdout)["totals"]
    report = json.loads(command_line.run(*command, "--json").stdout)
    assert (report["totals"]["packed"], report["totals"]["copied"], report["device"]) == (
        12,
        7,
        "cpu",
    )
    size = report["totals"]["bytes_after"]
    assert size == sum(path.stat().st_size for path in tmp_path.glob("out/*.safetensors"))
    assert report["totals"]["bits_per_parameter"] == pytest.approx(
        8 * size / report["totals"]["parameters"]
    )
    # but for the digits of nested offsets
    assert planned["bytes_after"] - 12 * 8 <= size <= planned["bytes_after"]
    done = command_line.run(*command, "--overwrite", "--quiet")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")


def test_summary(source, tmp_path):
    done = command_line.run("quantize", source, tmp_path / "out", "--device", "cpu")
    assert done.exit_code == 0
    assert re.fullmatch(
        r"(quantizing: .* min left\n)*", done.stderr
    )  # no bar where no terminal is; lines if it is slow
    first, second, third, install, load, push = done.stdout.splitlines()
    assert first == f"{tmp_path / 'out'}: 12 weights packed, 7 tensors kept"
    sizes = r"869.12 kB → \d+.\d+ kB \(\d.\d\dx, \d+.\d\d bits per parameter\)"
    assert re.fullmatch(sizes, second), second
    assert re.fullmatch(
        r"\d+.\d s on cpu, \d+.\d\d [kGM]B/s \(all workers: .*read \d.\d s.*\)", third
    ), third
    assert install == 'install: pip install "transformers>=4.57" accelerate bitsandbytes'
    assert load == (
        f"load: from transformers import AutoModelForCausalLM; model = AutoModelForCausalLM"
        f'.from_pretrained("{tmp_path / "out"}", dtype="auto", device_map="auto")'
    )
    assert push == f"push: hf upload YOUR_NAME/out {tmp_path / 'out'} ."


def test_dry_run_shows_every_tensor_with_its_reason_and_writes_nothing(source, tmp_path):
    result = command_line.run("quantize", source, tmp_path / "out", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert len(plan["tensors"]) == 19
    assert {row["action"] for row in plan["tensors"]} == {"pack", "copy"}
    assert all(row["reason"] for row in plan["tensors"])
    assert sum(row["bytes_before"] for row in plan["tensors"]) == plan["totals"]["bytes_before"]
    assert plan["config"]["quantization_config"]["quant_method"] == "bitsandbytes"
    assert not (tmp_path / "out").exists()
    text = command_line.run("quantize", source, tmp_path / "out", "--dry-run").stdout
    assert "12 weights packed, 7 tensors kept, 1 files" in text


@pytest.mark.parametrize("command", ["quantize", "dequantize"])
def test_a_dry_run_says_how_long_reading_takes(source, tmp_path, monkeypatch, command):
    if command == "dequantize":
        command_line.run("quantize", source, tmp_path / "packed", "--device", "cpu")
        source = tmp_path / "packed"
    files = sorted(source.glob("*.safetensors"))
    speeds = {tuple(files): 1000.0}
    monkeypatch.setattr(
        "nf4conv.commands.writing.reading_speed", lambda found: speeds[tuple(sorted(found))]
    )
    asked = [command, source, tmp_path / "out", "--dry-run"]
    plan = json.loads(command_line.run(*asked, "--json").stdout)
    seconds = plan["reading_seconds"]
    assert seconds == plan["totals"]["bytes_before"] / 1000
    words = f"reading takes about {seconds / 60:.0f} min here, as a sample was read at 1.00 kB a "
    assert words in command_line.run(*asked).stdout
    # not a word about what takes no time, or about the Hub
    for speed in (10.0**9, None):
        speeds[tuple(files)] = speed
        assert "reading takes" not in command_line.run(*asked).stdout


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("0.5 gib", 2**29), ("77 B", 77)])
def test_sizes(text, size):
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["5 giraffes", "-1GB", "0GB", "5"])
def test_sizes_that_are_none(tmp_path, text):
    result = command_line.run("quantize", tmp_path, tmp_path, "--max-shard-size", text)
    assert result.exit_code == 2
    assert "--max-shard-size" in result.stderr
    assert ("needs a unit, such as 5GB" in result.stderr) == (text == "5")


@pytest.mark.parametrize(
    ("short", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")]
)
def test_short_names_of_dtypes(short, dtype):
    with main.commands["quantize"].make_context(
        "quantize", ["SRC", "OUT", "--dtype", short]
    ) as context:
        assert context.params["dtype"] == dtype


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--revision", "main"], "--revision is about a model on the Hub, not about"),
        (["--config-from", "a/b"], "--config-from means nothing without a GGUF file"),
        (["--calibration-tokens", "512"], "--calibration-tokens means nothing without --calibrate"),
    ],
    ids=lambda value: value[0].removeprefix("--") if isinstance(value, list) else "",
)
def test_an_option_that_would_be_ignored_is_refused(source, tmp_path, options, said):
    refused = command_line.run("quantize", source, tmp_path / "out", *options)
    assert refused.exit_code == 2
    assert said in refused.stderr
    assert not (tmp_path / "out").exists()


def test_a_pattern_that_matches_nothing_is_named(source, tmp_path):
    patterns = ["--exclude", "*up_prj*", "--exclude", "*q_proj*", "--dry-run"]
    shown = command_line.run("quantize", source, tmp_path / "out", *patterns)
    notes = [line for line in shown.stdout.splitlines() if line.startswith("Note: --")]
    assert notes == ["Note: --exclude '*up_prj*' matches no tensor"]


def test_paths_are_completed():
    words = {
        "COMP_WORDS": "nf4conv quantize ./Ll",
        "COMP_CWORD": "2",
        "_NF4CONV_COMPLETE": "bash_complete",
    }
    assert run(**words).stdout.strip() == "file,./Ll"
    words |= {"COMP_WORDS": "nf4conv quantize ./Llama ./o", "COMP_CWORD": "3"}
    assert run(**words).stdout.strip() == "dir,./o"


def test_env_says_who_would_compute():
    found = json.loads(command_line.run("env", "--json").stdout)
    assert found["values"]["torch"] == version("torch")
    expected = "CUDA kernels" if torch.cuda.is_available() else "CPU code: "
    assert found["values"]["--device auto"].startswith(expected)
    lines = command_line.run("env").stdout.splitlines()
    assert lines[0].split() == ["nf4conv", nf4conv.__version__]


def test_no_line_is_wider_than_the_terminal(source):
    plan = dry_run(source, QuantizeOptions())
    inspection = nf4conv.inspect(source)
    for lines in (plan_lines(plan, 60), inspection_lines(inspection, 60)):
        table = [line for line in lines if line.startswith("model")]
        assert len(table) > 2
        assert max(map(len, table)) <= 60


def on_a_terminal(columns: int, *arguments: str) -> tuple[int, str, list[str]]:
    """Exit code, what the command wrote, and each state of its lines, without the codes that move
    the cursor.
    """
    program, terminal = pty.fork()
    if program == 0:
        unwanted = ("HF_HUB_DISABLE_PROGRESS_BARS", "COLUMNS")
        environment = {name: value for name, value in os.environ.items() if name not in unwanted}
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        os.execve(
            sys.executable,
            [sys.executable, "-m", "nf4conv", *arguments],
            environment | {"TERM": "xterm"},
        )
    written = b""
    with contextlib.suppress(OSError):  # which Linux gives at the end
        while part := os.read(terminal, 2**16):
            written += part
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    return os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]), text, re.split(r"[\r\n]+", text)


@pytest.mark.parametrize("columns", [60, 120])
def test_on_a_terminal_the_bar_ends_at_its_end(tmp_path, monkeypatch, columns):
    monkeypatch.chdir(tmp_path)
    write_source(tmp_path / "source", layers=24)
    for verb, arguments in (
        ("quantizing and verifying", ("quantize", "source", "out", "--verify")),
        ("verifying", ("verify", "out", "--source", "source")),
        ("", ("inspect", "out")),
        ("", ("quantize", "source", "other", "--dry-run")),
    ):
        code, text, states = on_a_terminal(columns, *arguments)
        assert code == 0, text
        assert f"{verb}: " in text
        # a bar that is wider than the terminal is cut at its end, so it is known by its beginning
        bars = [line for line in states if line.startswith((f"{verb}: ", "finishing: "))]
        assert bool(bars) == bool(verb)
        assert all("%" in line for line in bars), "one that overran its total has no share"
        shares = [int(line.partition("%")[0].split()[-1]) for line in bars]
        assert shares == sorted(shares)


def test_progress_on_a_terminal_says_what_it_is_doing_and_elsewhere_a_line_now_and_then(
    capsys, monkeypatch
):
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    monkeypatch.setattr("nf4conv.report.text.progress_bar._SECONDS_BETWEEN_LINES", 0.01)
    with ProgressBar(hidden=False) as advance:
        advance.begin([Step("quantizing", 400), Step("verifying", 400)])
        for _ in range(3):
            time.sleep(0.05)
            advance(200)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("quantizing: 200B of 800B (25 %), ")
    assert last.startswith("verifying: 600B of 800B (75 %), ")


def test_names_in_a_file_neither_break_lines_nor_drive_the_terminal(source):
    name = "model.norm\n\x1b[2J\x9b\u202e.weight"
    save_file(
        {"model.layers.0.mlp.up_proj.weight": torch.ones(64, 64), name: torch.ones(4)},
        source / "model.safetensors",
    )
    shown = command_line.run("quantize", source, "out", "--dry-run")
    assert shown.exit_code == 0
    assert "model.norm\\n\\x1b[2J\\x9b\\u202e" in shown.stdout
    assert len(shown.stdout.split("\n")) == 7 == len(shown.stdout.splitlines()) + 1
    content = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(content.replace(b"[4]", b"[5]"))
    refused = command_line.run("quantize", source, "out")
    assert refused.exit_code == 2
    [line] = refused.stderr.splitlines()
    assert "model.norm\\n\\x1b[2J\\x9b\\u202e.weight: 16 bytes, expected 20" in line


def test_an_output_without_arrows_does_not_fail_the_run(tmp_path):
    done = run(
        "quantize", write_source(tmp_path / "source"), tmp_path / "out", PYTHONIOENCODING="latin-1"
    )
    assert done.returncode == 0, done.stderr
    assert "869.12 kB \\u2192 " in done.stdout


def test_a_reader_that_leaves_early_is_no_error_worth_a_traceback(source):
    command = f"{sys.executable} -m nf4conv inspect {source} | true"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) in [(0, ""), (141, "")]
