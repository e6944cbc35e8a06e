"""A config.json that names code makes nothing of nf4conv fetch it, if `kernels` is installed.

The package is not: a stand-in on the path, in a process of its own, notes what it is asked for.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from evaluated import evaluated

import nf4conv
from nf4conv.errors import PlanError
from nf4conv.models.parsing import without_fetched_code

pytestmark = pytest.mark.oracle

CPU = {"device": "cpu"}
EVIL = "evil/kernel"
KINDS: dict[str, dict[str, Any]] = {
    "attention": {"attn_implementation": EVIL},
    "attention, as it is called inside": {"_attn_implementation": EVIL},
    "attention, a dictionary": {"attn_implementation": {"": EVIL}},
    "attention, paged": {"attn_implementation": f"paged|{EVIL}"},
    "experts": {"experts_implementation": EVIL, "_experts_implementation": EVIL},
    "kernels": {"use_kernels": True, "kernel_config": {"RMSNorm": f"{EVIL}:RMSNorm"}},
    "code": {"auto_map": {"AutoConfig": "evil/code--x.Config", "AutoModelForCausalLM": "x.Model"}},
}
STAND_IN = """
import os
__version__ = "0.18.2"
def get_kernel(name, *arguments, **options):
    with open(os.environ["NOTED"], "a") as file:
        file.write(f"{name}\\n")
    raise FileNotFoundError(name)
class Anything:
    def __init__(self, *arguments, **options): pass
def same(*arguments, **options):
    return lambda function: function
use_kernel_forward_from_hub = use_kernelized_func = use_kernel_func_from_hub = same
replace_kernel_forward_from_hub = same
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Anything,), {})
"""
PROGRAM = """
import json, sys
from pathlib import Path
import torch
import transformers
assert transformers.utils.is_kernels_available()
import nf4conv
from nf4conv.calibrate.model.building import build_model
folder, kinds = Path(sys.argv[1]), json.loads(sys.argv[2])
plain = json.loads((folder / "source/config.json").read_text())
for kind, keys in kinds.items():
    for name in ("source", "out"):
        path = folder / name / "config.json"
        config = json.loads(path.read_text())
        config = {key: config[key] for key in config if key in plain or "quantization" in key}
        path.write_text(json.dumps(config | keys))
    print(kind, "calibrated", flush=True)
    build_model({**plain, **keys}, torch.float32)
    if kind not in ("attention", "experts", "code"):  # takes long
        continue
    print(kind, "evaluated", flush=True)
    found = nf4conv.evaluate(
        folder / "out", source=folder / "source", text=folder / "ids.npy", device="cpu"
    ).evaluations[0]
    assert found.figures["kl"] > 0
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    config = transformers.Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=32,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "source")
    options = {"moe": "portable", "compute_dtype": "float32"}
    nf4conv.quantize(folder / "source", folder / "out", **options, **CPU)
    np.save(folder / "ids.npy", np.arange(64) % 96)
    return folder


def test_no_command_asks_for_a_kernel(models, tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text(STAND_IN)
    (tmp_path / "kernels/layer").mkdir()
    (tmp_path / "kernels/layer/__init__.py").touch()
    (tmp_path / "kernels/layer/mode.py").write_text("class Mode: pass\n")
    about = tmp_path / "kernels-0.18.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    noted = tmp_path / "noted"
    home = Path(nf4conv.__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{home}",
        "NOTED": str(noted),
        "HF_HUB_OFFLINE": "1",
    }
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, models, json.dumps(KINDS)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    # bitsandbytes asks for kernels of its own
    asked = noted.read_text() if noted.exists() else ""
    assert EVIL not in asked, f"asked for {asked} at {ended.stdout.splitlines()[-1:]}"
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == len(KINDS) + 3


def test_all_levels_of_a_config_are_looked_at():
    config = {
        "hidden_size": 64,
        "text_config": {"_attn_implementation_internal": EVIL, "vocab_size": 96},
        "parts": [{"auto_map": {}, "depth": 2}, 3],
    }
    assert without_fetched_code(config) == {
        "hidden_size": 64,
        "text_config": {"vocab_size": 96},
        "parts": [{"depth": 2}, 3],
    }


@pytest.mark.parametrize("place", ["out", "source"])
def test_evaluate_refuses_what_an_adapter_would_replace(models, tmp_path, place):
    for name in ("out", "source"):
        (tmp_path / name).mkdir()
        for file in (models / name).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    adapter = {"base_model_name_or_path": "evil/base model", "peft_type": "LORA"}
    (tmp_path / place / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(PlanError, match="evaluate runs no GGUF file and no adapter"):
        evaluated(tmp_path / "out", tmp_path / "source", text=models / "ids.npy")
