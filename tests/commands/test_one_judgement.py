"""What one command accepts, the others accept too; and what one refuses, all refuse."""

import json
from pathlib import Path

import pytest
import torch
from comparing import compared
from inputs import SOURCES
from safetensors.torch import load_file, save_file

import nf4conv

CPU = {"device": "cpu", "workers": 2}
EXACT = {"exact": True}
WEIGHT = "decoder.mid_block.attentions.0.to_q"


def write_pipeline(folder: Path, config: dict[str, object], vae: dict[str, torch.Tensor]) -> Path:
    """Writes that of golden/inputs.py, with a VAE."""
    SOURCES["pipeline"](folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["vae"] = ["diffusers", "AutoencoderKL"]
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "vae").mkdir()
    save_file(vae, folder / "vae/diffusion_pytorch_model.safetensors")
    (folder / "vae/config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"} | config))
    return folder


def add_to_quant_states(folder: Path, **fields: object) -> None:
    """Adds fields to the quant state of every weight in 4 bits of a checkpoint."""
    (folder / "nf4conv.json").unlink()
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if "quant_state" in name:
                state = json.loads(bytes(tensor.tolist())) | fields
                tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        save_file(tensors, file)


@pytest.mark.parametrize(
    "fields", [{"nested_offset": 0.0123}, {"nested_blocksize": 64}, {"made_by": "somebody"}]
)
def test_a_quant_state_that_says_more_decodes_in_every_command(tmp_path, fields):
    SOURCES["pipeline"](tmp_path / "plain")
    source = tmp_path / "plain/transformer"
    nf4conv.quantize(source, tmp_path / "odd", double_quant=False, **CPU)
    nf4conv.dequantize(tmp_path / "odd", tmp_path / "before", **CPU)
    add_to_quant_states(tmp_path / "odd", **fields)
    nf4conv.quantize(tmp_path / "odd", tmp_path / "mended", **CPU)
    assert nf4conv.verify(tmp_path / "mended", source=tmp_path / "odd", **EXACT, **CPU).passed
    nf4conv.quantize(tmp_path / "odd", tmp_path / "other", quant_type="fp4", **CPU)
    nf4conv.dequantize(tmp_path / "odd", tmp_path / "after", **CPU)
    assert not compared(tmp_path / "before", tmp_path / "after", **CPU).unlike


def test_a_vae_in_an_unknown_quantization_stays_as_it_is_in_every_command(tmp_path):
    codes = torch.arange(64 * 16, dtype=torch.int32).reshape(64, 16)
    vae = {f"{WEIGHT}.qweight": codes, "decoder.bias": torch.ones(64)}
    config = {"quantization_config": {"quant_method": "mystery"}}
    plain = write_pipeline(tmp_path / "plain", config, vae)
    path = plain / "vae/diffusion_pytorch_model.safetensors"

    nf4conv.quantize(plain, tmp_path / "out", **CPU)
    kept = load_file(tmp_path / "out/vae" / path.name)
    assert torch.equal(kept[f"{WEIGHT}.qweight"], codes)
    for options in ({}, EXACT):
        found = nf4conv.verify(tmp_path / "out", source=plain, **options, **CPU)
        assert found.passed, found.verdict
    nf4conv.dequantize(tmp_path / "out", tmp_path / "again", **CPU)
    again = load_file(tmp_path / "again/vae" / path.name)
    assert all(torch.equal(again[name], tensor) for name, tensor in load_file(path).items())

    kept[f"{WEIGHT}.qweight"][3, 5] += 1
    save_file(kept, tmp_path / "out/vae" / path.name)
    found = nf4conv.verify(tmp_path / "out", source=plain, **CPU)
    assert not found.passed
