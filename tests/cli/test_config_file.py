"""--config: options in a TOML file, checked as those on the command line."""

import json
from pathlib import Path

import pytest
from checkpoints import write_source
from click.testing import CliRunner, Result

from nf4conv.cli import main


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


def run(content: str | bytes, source: Path, *arguments: str) -> Result:
    """Runs quantize with a config file beside the source."""
    path = source.parent / "nf4conv.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    out = str(source.parent / "out")
    command = ["quantize", str(source), out, "--config", str(path), *arguments]
    return CliRunner().invoke(main, command)


def test_the_file_gives_what_the_options_give(source: Path):
    content = """
        device = "cpu"
        quiet = true
        [quantize]
        scales = "search"
        blocksize = 128
        max-shard-size = "100KB"
        exclude = ["*.layers.0.*"]
        double-quant = false
        [verify]
        tolerance = 0.2
    """
    by_file = run(content, source)
    assert by_file.exit_code == 0, by_file.stderr
    typed = "--device cpu --scales search --blocksize 128 --max-shard-size 100KB"
    typed += " --exclude *.layers.0.* --no-double-quant"
    other = source.parent / "typed"
    by_hand = CliRunner().invoke(main, ["quantize", str(source), str(other), *typed.split()])
    assert by_hand.exit_code == 0, by_hand.stderr
    for path in other.glob("*.safetensors"):
        assert path.read_bytes() == (source.parent / "out" / path.name).read_bytes()
    assert len(list(other.glob("*.safetensors"))) > 2


def test_the_command_line_wins(source: Path):
    content = "[quantize]\nblocksize = 128\ndry-run = true\njson = true\n"
    config = json.loads(run(content, source).stdout)
    typed = json.loads(run(content, source, "--blocksize", "32").stdout)
    assert typed["totals"]["bytes_after"] > config["totals"]["bytes_after"]


def test_an_option_of_another_command_above_the_tables_is_no_error(source: Path):
    assert run("source = 'x'\n[quantize]\ndry-run = true\n", source).exit_code == 0


def test_without_the_option_no_file_is_read(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "nf4conv.toml").write_text("this is no TOML")
    monkeypatch.chdir(tmp_path)
    command = ["quantize", str(source), str(tmp_path / "out"), "--dry-run"]
    assert CliRunner().invoke(main, command).exit_code == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "[quantize]\nblock-size = 64",
            "[quantize] block-size is no option; did you mean blocksize?",
        ),
        ("max_shard_size = '1GB'", "max_shard_size is no option; did you mean max-shard-size?"),
        ("[quantise]\nblocksize = 64", "[quantise] is no command; did you mean quantize?"),
        ("[verify]\nscales = 'search'", "[verify] scales is no option"),
        ("[quantize]\nscales = 'best'", "scales = 'best': 'best' is not one of"),
        ("[quantize]\nblocksize = 'x'", "blocksize = 'x': 'x' is not a valid integer"),
        ("[quantize]\nblocksize = true", "blocksize = True: write a text or a number"),
        ("[quantize]\nblocksize = [64]", "blocksize = [64]: write a text or a number"),
        ("[quantize]\nblocksize = 1979-05-27", "write a text or a number"),
        ("[quantize]\nmax-shard-size = 5", "max-shard-size = 5: '5' needs a unit, such as 5GB"),
        ("[quantize]\ninclude = '*.x'", "include = '*.x': write a list"),
        ("[quantize]\ninclude = [['*.x']]", "a list holds texts or numbers"),
        ("[quantize]\nverify = 'yes'", "verify = 'yes': write true or false"),
        ("token = 'hf_x'", "token has no place here"),
        ("config = 'other.toml'", "config has no place here"),
        ("[quantize]\nout = 'x'", "[quantize] out is no option"),
        ("[quantize", "is not TOML"),
        ("a = " + "[" * 5000, "is not TOML"),
        (b"\xff\xfe", "is not UTF-8 text"),
        ("#" * 1_000_001, "is too large"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(source: Path, content: str | bytes, said: str):
    result = run(content, source)
    assert result.exit_code == 2
    last = result.stderr.strip().splitlines()[-1]
    assert said in last
    assert "nf4conv.toml: " in last
    assert not (source.parent / "out").exists()


def test_a_file_that_is_not_there(source: Path):
    result = CliRunner().invoke(main, ["inspect", str(source), "--config", "missing.toml"])
    assert result.exit_code == 2
    assert "--config missing.toml: No such file or directory" in result.stderr


def test_an_error_is_json_if_the_file_asks_for_json(source: Path):
    result = run("json = true\n[quantize]\ninclude = ['nothing.*']", source)
    assert result.exit_code == 2
    assert json.loads(result.stdout)["exit_code"] == 2
