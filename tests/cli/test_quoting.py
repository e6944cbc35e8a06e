"""Quotes what is printed to be copied: commands for the shell, names in cards for Markdown."""

import json
import shlex
from pathlib import Path

import pytest
from checkpoints import write_source
from command_line import run

import nf4conv
from nf4conv.errors import OutputError
from nf4conv.report.card import code

RUN = {"device": "cpu", "workers": 1}


def test_the_advice_of_inspect(tmp_path: Path):
    """Of a folder whose config.json says that packed layers are not."""
    out = tmp_path / "d e;id $(x) 'y'"
    nf4conv.quantize(write_source(tmp_path / "source"), out, **RUN)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["llm_int8_skip_modules"] = ["q_proj"]
    (out / "config.json").write_text(json.dumps(config))
    done = run("inspect", out)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("nf4conv quantize")]
    assert shlex.split(line)[2] == str(out)


def test_the_advice_to_verify(source: Path, tmp_path: Path):
    out = tmp_path / "o u't"
    nf4conv.quantize(source, out, **RUN)
    with pytest.raises(OutputError) as refused:
        nf4conv.quantize(source, out, **RUN, verify=True)
    command = str(refused.value).split("`")[1]
    assert shlex.split(command) == ["nf4conv", "verify", str(out), "--source", "SRC"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain", "`plain`"), ("a`b", "``a`b``"), ("`a", "`` `a ``"), ("a``b", "```a``b```")],
)
def test_inline_code_holds_any_character(text: str, shown: str):
    assert code(text) == shown
