"""Tiny denoisers made and loaded by the installed diffusers: what it makes of our output, against
its own work.
"""

import pytest
import torch
from comparison import output, quantize_both_ways, unequal
from safetensors.torch import load_file
from tiny_denoisers import DENOISERS, flux, wan

import nf4conv

pytestmark = pytest.mark.architectures


@pytest.mark.parametrize("make", DENOISERS.values(), ids=DENOISERS)
def test_a_denoiser_is_what_diffusers_makes_itself(make, tmp_path):
    torch.manual_seed(0)
    denoiser = make()
    both = quantize_both_ways(denoiser, tmp_path)
    assert unequal(both.ours, both.theirs) == []
    assert both.kept == denoiser.kept
    assert torch.equal(output(both.ours, denoiser.inputs), output(both.theirs, denoiser.inputs))


def test_what_diffusers_computes_in_float32_is_kept_in_float32(tmp_path):
    torch.manual_seed(0)
    denoiser = wan()
    both = quantize_both_ways(denoiser, tmp_path, stored=torch.float32, dtype="bfloat16")
    stored = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    assert stored["condition_embedder.time_embedder.linear_1.weight"].dtype == torch.float32
    assert stored["blocks.0.scale_shift_table"].dtype == torch.float32
    assert stored["proj_out.weight"].dtype == torch.bfloat16
    assert unequal(both.ours, both.theirs) == []


def test_a_denoiser_in_several_files_loads(tmp_path):
    import diffusers

    torch.manual_seed(0)
    whole = quantize_both_ways(flux(), tmp_path).ours
    shards = {"double_quant": False, "max_shard_size": 50_000, "device": "cpu"}
    nf4conv.quantize(tmp_path / "source", tmp_path / "shards", **shards)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    sharded = diffusers.FluxTransformer2DModel.from_pretrained(
        tmp_path / "shards", torch_dtype=torch.bfloat16
    )
    assert unequal(sharded, whole) == []
