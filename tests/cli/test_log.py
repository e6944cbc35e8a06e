"""The library says on the logger "nf4conv" what it does; -v shows it, and every check of verify."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_source
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

import nf4conv
from nf4conv.cli import main

ROOT = Path(__file__).parents[2]


def command(*arguments: object, **how: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], **how)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("log") / "source")


@pytest.fixture(scope="module")
def out(source: Path) -> Path:
    nf4conv.quantize(source, source.with_name("out"), device="cpu")
    return source.with_name("out")


@pytest.fixture(scope="module")
def damaged(source: Path) -> Path:
    """Like `out`, but for a scale that is negative, and a weight of another model."""
    folder = source.with_name("damaged")
    nf4conv.quantize(source, folder, device="cpu", double_quant=False)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_proj.weight.absmax"][0] *= -1
    tensors["model.layers.1.self_attn.q_proj.weight"] ^= 0xFF
    save_file(tensors, file, {"format": "pt"})
    return folder


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("nf4conv.")]


def holds(lines: list[str], *patterns: str) -> None:
    """Checks that lines match patterns, in this order."""
    left = iter(lines)
    for pattern in patterns:
        assert any(re.fullmatch(pattern, line) for line in left), (pattern, lines)


# --- the logger -----------------------------------------------------------------------------------


def test_a_line_for_each_stage_of_quantize(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="nf4conv")
    out = tmp_path / "out"
    nf4conv.quantize(source, out, device="cpu", workers=2, max_shard_size=100_000, verify=True)
    holds(
        messages(caplog),
        rf"opened {source}: 19 tensors in 2 files, by their headers, in \d+\.\d s",
        r"planned 19 tensors in \d+\.\d s: 12 packed, 0 decoded, 7 kept; 4 files, .*",
        r"2 threads, each with a buffer of \d+\.\d\d MB",
        r"shard 1 of 4 written: model-0000\d-of-00004\.safetensors, .* kB",
        r"shard 4 of 4 written: .*",
        r"all shards written after \d+\.\d s \(all threads: .*compute \d+\.\d s.*\)",
        r"verified as written: largest relative error 0\.09\d\d",
        rf"finalized {out} in \d+\.\d s",
    )
    caplog.clear()
    nf4conv.quantize(source, out, device="cpu", max_shard_size=100_000)
    assert messages(caplog)[-1] == f"{out} is complete already: nothing to compute"


def test_a_line_for_each_stage_of_the_others(
    tmp_path: Path, source: Path, out: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="nf4conv")
    nf4conv.verify(out, source=source, device="cpu")
    holds(
        messages(caplog),
        r"opened .*",
        r"checked headers and config in \d+\.\d s; .* to read",
        r"made anew in \d+\.\d s: 12 of 12 weights, and 7 of 7 other tensors, are the same",
    )
    caplog.clear()
    nf4conv.verify(source, source=source, device="cpu")
    holds(messages(caplog), r"compared the bytes of 19 tensors in \d+\.\d s")
    caplog.clear()
    nf4conv.dequantize(out, tmp_path / "again", device="cpu")
    holds(
        messages(caplog),
        r"planned 19 .*: 0 packed, 12 decoded, 7 kept; .*",
        r"finalized .*",
    )


def test_the_library_configures_no_handler(tmp_path: Path, source: Path):
    program = (
        "import logging, nf4conv\n"
        f"nf4conv.quantize({str(source)!r}, {str(tmp_path / 'out')!r}, device='cpu')\n"
        "names = [name for name in logging.root.manager.loggerDict if name.startswith('nf4conv')]\n"
        "assert len(names) > 3\n"
        "assert not any(logging.getLogger(name).handlers for name in names)\n"
        "assert not logging.root.handlers\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


# --- -v -------------------------------------------------------------------------------------------


def test_verbose_tells_on_stderr_and_ends_with_the_command(tmp_path: Path, source: Path):
    before = logging.getLogger("nf4conv").level
    asked = ["quantize", source, tmp_path / "out", "--device", "cpu"]
    done = command(*asked, "-v", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["totals"]["packed"] == 12
    lines = done.stderr.splitlines()
    assert all(re.match(r"\[ *\d+\.\d s\] ", line) for line in lines)
    assert any("shard 1 of 1 written" in line for line in lines)
    assert logging.getLogger("nf4conv").level == before
    assert not logging.getLogger("nf4conv").handlers
    assert command(*asked).stderr == ""


def test_quiet_and_verbose_contradict_each_other(out: Path):
    done = command("verify", out, "-q", "-v")
    assert done.exit_code == 2
    assert "--quiet and --verbose contradict each other" in done.stderr


# --- what verify prints ---------------------------------------------------------------------------


def test_verify_prints_its_verdict(source: Path, out: Path):
    assert command("verify", out).stdout == (
        "sound: 12 packed weights, not compared with a source\n"
    )
    (line,) = command("verify", out, "--source", source).stdout.splitlines()
    assert line.startswith("passed: 12 packed weights, largest relative error 0.09")


def test_verify_prints_what_is_wrong(source: Path, damaged: Path):
    *wrong, verdict = command("verify", damaged, "--source", source).stdout.splitlines()
    assert wrong
    assert all(line.startswith(("FAIL  ", "note  ")) for line in wrong)
    assert any("model.layers.1.self_attn.q_proj.weight" in line for line in wrong)
    assert verdict.startswith("FAILED: ")


def test_verify_lists_every_check_when_asked(source: Path, out: Path, damaged: Path):
    lines = command("verify", out, "--source", source, "-v").stdout.splitlines()
    report = nf4conv.verify(out, source=source, device="cpu")
    assert lines[0] == f"checked: {', '.join(report.checks)}"
    assert any(line.startswith("kind of module") for line in lines)
    assert lines[-1] == report.verdict
    shown = command("verify", damaged, "--source", source, "-v").stdout
    assert "FAIL  scales" in shown
