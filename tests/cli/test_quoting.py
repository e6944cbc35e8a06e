"""Quotes what is printed to be copied: commands for the shell, names in cards for Markdown."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from api import QuantizeOptions, RunOptions, quantize_checkpoint
from checkpoints import write_source
from command_line import run

from nf4conv.errors import OutputError, SourceError
from nf4conv.report.card import code
from nf4conv.sources.adapters.adapter import open_adapter

RUN = RunOptions(device="cpu", workers=1)


def test_the_advice_of_inspect(tmp_path: Path):
    """Of a folder whose config.json says that packed layers are not."""
    out = tmp_path / "d e;id $(x) 'y'"
    quantize_checkpoint(write_source(tmp_path / "source"), out, QuantizeOptions(), RUN)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["llm_int8_skip_modules"] = ["q_proj"]
    (out / "config.json").write_text(json.dumps(config))
    done = run("inspect", out)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("nf4conv quantize")]
    assert shlex.split(line)[2] == str(out)


def test_the_advice_to_verify(tmp_path: Path):
    source = write_source(tmp_path / "source")
    out = tmp_path / "o u't"
    quantize_checkpoint(source, out, QuantizeOptions(), RUN)
    with pytest.raises(OutputError) as refused:
        quantize_checkpoint(source, out, QuantizeOptions(), replace(RUN, verify=True))
    command = str(refused.value).split("`")[1]
    assert shlex.split(command) == ["nf4conv", "verify", str(out), "--source", "SRC"]


@pytest.mark.parametrize("place", ["", "  "])
def test_an_empty_adapter_is_refused(place: str):
    with pytest.raises(SourceError, match="--lora: empty"):
        open_adapter(place)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain", "`plain`"), ("a`b", "``a`b``"), ("`a", "`` `a ``"), ("a``b", "```a``b```")],
)
def test_inline_code_holds_any_character(text: str, shown: str):
    assert code(text) == shown
