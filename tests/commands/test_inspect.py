"""`inspect`: what is in a checkpoint, by its headers; of one on the Hub no weight is fetched."""

import json
import re
from pathlib import Path

import pytest
import torch
from checkpoints import contents, save_model, write_source
from command_line import run
from four_bit import CONFIG, pack
from hub_server import Hub, Repo
from safetensors.torch import load_file, save_file

import nf4conv
from nf4conv.format.layout import Format

CPU = {"device": "cpu"}
UP = "model.layers.1.mlp.up_proj.weight"
REPO = "some-org/packed"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    source = write_source(folder / "source")
    nf4conv.quantize(source, folder / "out", max_shard_size=150_000, **CPU)
    return folder / "out"


def test_a_packed_checkpoint(packed: Path):
    found = nf4conv.inspect(packed)
    [row] = [row for row in found.tensors if row.name == UP]
    assert (row.stored, row.dtype, row.shape) == ("nf4+/64", "bfloat16", (512, 128))
    assert row.format == Format("nf4", 64, double_quant=True, dtype="bfloat16")
    assert row.bytes == 32768 + 1024 + 64 + 4 * 4 + 1024 + row_blob(packed)
    assert found.totals.packed == 12
    assert found.totals.tensors == 12 + 7
    assert found.totals.parameters == 6 * (512 * 128 + 64 * 64 + 64) + 256 * 64
    assert found.totals.bytes == sum(row.bytes for row in found.tensors)
    assert found.config is not None
    assert found.config["quant_method"] == "bitsandbytes"
    assert {(kind.kind, kind.tensors) for kind in found.kinds} >= {
        ("model.layers.*.mlp.up_proj", 6),
        ("model.layers.*.input_layernorm", 6),
    }


def row_blob(folder: Path) -> int:
    parts = [load_file(path) for path in folder.glob("*.safetensors")]
    return next(
        tensors[f"{UP}.quant_state.bitsandbytes__nf4"].numel() for tensors in parts if UP in tensors
    )


def test_any_checkpoint_is_shown_as_it_is_stored(tmp_path: Path):
    tensors = {
        "model.layers.0.q_proj.weight": torch.zeros(64, 64).to(torch.float8_e4m3fn),
        "model.layers.0.q_proj.weight_scale_inv": torch.ones(1, 1),
        "model.norm.weight": torch.ones(64, dtype=torch.bfloat16),
    }
    described = CONFIG | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    save_model(tmp_path, tensors, described)
    found = nf4conv.inspect(tmp_path)
    assert {row.name: row.stored for row in found.tensors} == {
        "model.layers.0.q_proj.weight": "F8_E4M3",
        "model.layers.0.q_proj.weight_scale_inv": "float32",
        "model.norm.weight": "bfloat16",
    }
    assert found.config == {"quant_method": "gptq", "bits": 4}
    assert found.totals.packed == 0


def test_a_single_file_and_a_pickle(tmp_path: Path):
    save_file(pack("w.weight", torch.randn(64, 64)), tmp_path / "model.safetensors")
    torch.save({"a": torch.zeros(3, 4)}, tmp_path / "pytorch_model.bin")
    [row] = nf4conv.inspect(tmp_path / "model.safetensors").tensors
    assert (row.name, row.stored, row.shape) == ("w.weight", "nf4+/64", (64, 64))
    [row] = nf4conv.inspect(tmp_path / "pytorch_model.bin").tensors
    assert (row.name, row.stored, row.shape) == ("a", "float32", (3, 4))


def test_a_model_on_the_hub_by_ranges(hub: Hub, packed: Path, tmp_path: Path):
    files = contents(packed)
    hub.repos[REPO] = Repo()
    hub.repos[REPO].commit(files)
    found = nf4conv.inspect(REPO, cache_dir=tmp_path / "cache")
    local = nf4conv.inspect(packed)
    assert found.tensors == local.tensors
    assert found.totals == local.totals
    asked = [
        request
        for request in hub.requests
        if ".safetensors" in request.line and "index" not in request.line
    ]
    weights = [request for request in asked if request.line.startswith("GET")]
    assert weights
    assert all(request.range for request in weights), "no file is fetched whole"
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_the_command(packed: Path):
    shown = run("inspect", packed)
    assert shown.exit_code == 0
    first, *others = shown.stdout.splitlines()
    assert first.startswith("19 tensors, 12 of them in 4 bits, in ")
    assert re.search(r"^model.layers.\*.mlp.up_proj +6 +nf4\+/64 ", shown.stdout, re.MULTILINE)
    assert f"made by nf4conv {nf4conv.__version__}, quantize, from source" in others
    assert UP not in shown.stdout
    assert UP in run("inspect", packed, "--json").stdout
    parsed = json.loads(run("inspect", packed, "--json").stdout)
    assert parsed["totals"]["packed"] == 12
