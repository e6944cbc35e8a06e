"""The made-up format of CONTRIBUTING.md: what its two files say is enough."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from checkpoints import save_model
from safetensors.torch import load_file

import nf4conv
from nf4conv.errors import SourceError
from nf4conv.sources.foreign import config, presenting

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
CPU = {"device": "cpu", "workers": 2, "buffer_size": 1}
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def taught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the format as the guide says."""
    section = GUIDE.read_text().split("## A new format")[1].split("\n## ")[0]
    description, decoder = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = ("nf4conv.sources.foreign.nibbles", "nf4conv.codec.decode.nibbles")
    for name, code in zip(names, (description, decoder), strict=True):
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(code, name, "exec"), module.__dict__)
    nibbles = sys.modules[names[0]].Nibbles
    monkeypatch.setattr(presenting, "FORMATS", [nibbles, *presenting.FORMATS])
    monkeypatch.setattr(config, "METHODS", [*config.METHODS, "nibbles"])


def write(folder: Path, **parts: torch.Tensor) -> Path:
    content: dict[str, Any] = {"model_type": "llama", "dtype": "bfloat16"}
    content["quantization_config"] = {"quant_method": "nibbles"}
    stored = {f"{Q}.{name}": part for name, part in parts.items()}
    return save_model(folder, stored, content)


def test_a_new_format(tmp_path: Path):
    """A weight of several pieces: decoded, packed, verified, and named."""
    codes = torch.randint(0, 256, (2048, 512)).byte()
    steps = torch.rand(2048) + 0.5
    source = write(tmp_path / "source", codes=codes, steps=steps)
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    expected = torch.empty(2048, 1024)
    expected[:, ::2] = (codes % 16).float() - 8
    expected[:, 1::2] = (codes // 16).float() - 8
    expected = (expected * steps[:, None]).bfloat16()
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == {f"{Q}.weight"}
    assert torch.equal(found[f"{Q}.weight"].view(torch.int16), expected.view(torch.int16))
    assert nf4conv.verify(tmp_path / "out", source=source, **CPU).passed
    nf4conv.quantize(source, tmp_path / "nf4", **CPU)
    nf4conv.quantize(tmp_path / "out", tmp_path / "plain-nf4", **CPU)
    packed = load_file(tmp_path / "nf4/model.safetensors")
    for name, part in load_file(tmp_path / "plain-nf4/model.safetensors").items():
        assert torch.equal(packed[name], part)
    notes = json.loads((tmp_path / "nf4/nf4conv.json").read_text())
    assert notes["weights"][0]["from"] == "nibbles"


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (None, "codes: lacks its steps"),
        (torch.ones(4), r"codes: U8 \[8, 4\] does not go with .*steps, F32 \[4\]"),
        (torch.ones(8).int(), r"codes: U8 \[8, 4\] does not go with .*steps, I32 \[8\]"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, steps: torch.Tensor | None, message: str):
    parts = {} if steps is None else {"steps": steps}
    source = write(tmp_path / "source", codes=torch.zeros(8, 4).byte(), **parts)
    with pytest.raises(SourceError, match=message):
        nf4conv.dequantize(source, tmp_path / "out", **CPU)
