"""What one command accepts, the others accept too; and what one refuses, all refuse."""

import json
from pathlib import Path

import pytest
import torch
from comparing import compared
from safetensors.torch import load_file, save_file

import nf4conv

CPU = {"device": "cpu", "workers": 2}
EXACT = {"exact": True}
INDEX = {
    "_class_name": "FluxPipeline",
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
WEIGHTS = {
    "transformer": {"transformer_blocks.0.attn.to_q.weight": (64, 64)},
    "vae": {"decoder.mid_block.attentions.0.to_q.weight": (64, 64), "decoder.bias": (64,)},
}
CONFIGS = {
    "transformer": {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.42.1"},
    "vae": {"_class_name": "AutoencoderKL", "_diffusers_version": "0.42.1"},
}


def write_pipeline(folder: Path) -> Path:
    for name, shapes in WEIGHTS.items():
        (folder / name).mkdir(parents=True)
        tensors = {weight: torch.randn(shape).bfloat16() for weight, shape in shapes.items()}
        save_file(tensors, folder / name / "diffusion_pytorch_model.safetensors")
        (folder / name / "config.json").write_text(json.dumps(CONFIGS[name]))
    (folder / "model_index.json").write_text(json.dumps(INDEX))
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
    source = write_pipeline(tmp_path / "plain") / "transformer"
    nf4conv.quantize(source, tmp_path / "odd", double_quant=False, **CPU)
    nf4conv.dequantize(tmp_path / "odd", tmp_path / "before", **CPU)
    add_to_quant_states(tmp_path / "odd", **fields)
    nf4conv.quantize(tmp_path / "odd", tmp_path / "mended", **CPU)
    assert nf4conv.verify(tmp_path / "mended", source=tmp_path / "odd", **EXACT, **CPU).passed
    nf4conv.quantize(tmp_path / "odd", tmp_path / "other", quant_type="fp4", **CPU)
    nf4conv.dequantize(tmp_path / "odd", tmp_path / "after", **CPU)
    assert not compared(tmp_path / "before", tmp_path / "after", **CPU).unlike


def test_a_vae_in_an_unknown_quantization_stays_as_it_is_in_every_command(tmp_path):
    plain = write_pipeline(tmp_path / "plain")
    path = plain / "vae/diffusion_pytorch_model.safetensors"
    codes = torch.arange(64 * 16, dtype=torch.int32).reshape(64, 16)
    weight = next(iter(WEIGHTS["vae"])).removesuffix("weight")
    save_file({f"{weight}qweight": codes, "decoder.bias": torch.ones(64)}, path)
    config = {**CONFIGS["vae"], "quantization_config": {"quant_method": "mystery"}}
    (plain / "vae/config.json").write_text(json.dumps(config))

    nf4conv.quantize(plain, tmp_path / "out", **CPU)
    kept = load_file(tmp_path / "out/vae" / path.name)
    assert torch.equal(kept[f"{weight}qweight"], codes)
    for options in ({}, EXACT):
        found = nf4conv.verify(tmp_path / "out", source=plain, **options, **CPU)
        assert found.passed, found.verdict
    nf4conv.dequantize(tmp_path / "out", tmp_path / "again", **CPU)
    again = load_file(tmp_path / "again/vae" / path.name)
    assert all(torch.equal(again[name], tensor) for name, tensor in load_file(path).items())

    kept[f"{weight}qweight"][3, 5] += 1
    save_file(kept, tmp_path / "out/vae" / path.name)
    found = nf4conv.verify(tmp_path / "out", source=plain, **CPU)
    assert not found.passed
