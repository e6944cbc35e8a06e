"""Experts that a source stacks in one tensor, and what quantize makes of them."""

from pathlib import Path

import bitsandbytes.functional as bitsandbytes
import pytest
import torch
import transformers
from checkpoints import tensors_of
from stacked_experts import build, place_of, single_experts

import nf4conv
from nf4conv.models.experts import find_stack, partner_names
from nf4conv.models.families import layouts_of

LAYER = "model.layers.0"
STACKS = {
    "gpt_oss": (f"{LAYER}.mlp.experts.gate_up_proj", f"{LAYER}.mlp.experts.down_proj"),
    "granitemoe": (
        f"{LAYER}.block_sparse_moe.input_linear.weight",
        f"{LAYER}.block_sparse_moe.output_linear.weight",
    ),
    "aria": (f"{LAYER}.mlp.experts.fc1.weight", f"{LAYER}.mlp.experts.fc2.weight"),
    "inkling2": (f"{LAYER}.mlp.experts.w13_weight", f"{LAYER}.mlp.experts.w2_weight"),
    "gemma4_text": (f"{LAYER}.experts.gate_up_proj", f"{LAYER}.experts.down_proj"),
}


@pytest.mark.parametrize("model_type", STACKS)
def test_the_stacks_of_a_layer_are_found_and_know_each_other(model_type: str):
    layouts = layouts_of({"model_type": "outer", "text_config": {"model_type": model_type}})
    first, second = STACKS[model_type]
    found = find_stack(first, layouts)
    other = find_stack(second, layouts)
    assert found is not None
    assert other is not None
    assert found.stack.projections == ("gate_proj", "up_proj")
    assert other.stack.projections == ("down_proj",)
    assert found.experts == other.experts
    assert list(partner_names(first, found)) == [second]
    assert list(partner_names(second, other)) == [first]
    assert found.name_of(3, "up_proj") == f"{found.experts}.3.up_proj.weight"


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.mlp.experts.gate_up_proj_bias",
        f"{LAYER}.mlp.shared_experts.gate_up_proj",
        f"{LAYER}.mlp.experts.3.down_proj.weight",
        f"{LAYER}.mlp.router.weight",
    ],
)
def test_other_tensors_of_a_mixture_are_no_stacks(name: str):
    assert find_stack(name, layouts_of({"model_type": "gpt_oss"})) is None


def test_the_stacks_of_an_unknown_family_are_left_alone():
    assert layouts_of({"model_type": "something_new"}) == ()


ON_DISK_AS_STACKS = (
    "GptOssForCausalLM",
    "OpenAIPrivacyFilterModel",
    "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "GraniteMoeSWAForCausalLM",
    "AriaTextForCausalLM",
    "AriaForConditionalGeneration",
    "Gemma4ForCausalLM",
    "DiffusionGemmaForBlockDiffusion",
    "Qwen3VLMoeForConditionalGeneration",
    "Mistral4ForCausalLM",
    "InklingForCausalLM",
    "InklingForConditionalGeneration",
    "Inkling2ForCausalLM",
    "HYV4ForCausalLM",
    "MiniMaxM3VLForCausalLM",
    "ZayaForCausalLM",
    "Llama4ForCausalLM",
    "Step3p7ForConditionalGeneration",
)
ONE_BY_ONE = ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM")


def quantize(source: Path, out: Path, **options: object) -> dict[str, torch.Tensor]:
    """Returns the tensors of the result; absmax in float32, which a CPU makes as a GPU does."""
    nf4conv.quantize(source, out, double_quant=False, **options)
    return tensors_of(out)


def compare_with_bitsandbytes(model: transformers.PreTrainedModel, found: dict[str, torch.Tensor]):
    """Every expert of the model is packed, byte for byte as bitsandbytes packs its matrix."""
    expected = dict(single_experts(model))
    assert expected
    names = {place_of(name): name for name in found}
    for place, weight in expected.items():
        name = names[place]
        codes, state = bitsandbytes.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        assert torch.equal(found[name], codes), name
        assert torch.equal(found[f"{name}.absmax"], state.absmax), name
    assert set(names) - {None} == set(expected)


@pytest.mark.parametrize("architecture", ON_DISK_AS_STACKS)
def test_packed_experts_are_those_that_transformers_computes_with(architecture, tmp_path):
    model = build(architecture)
    model.save_pretrained(tmp_path / "source")
    found = quantize(tmp_path / "source", tmp_path / "out", moe="packed")
    compare_with_bitsandbytes(model, found)


@pytest.mark.parametrize("architecture", ONE_BY_ONE)
@pytest.mark.parametrize("is_stacked", [False, True])
def test_a_family_of_single_experts_may_come_stacked(architecture, is_stacked, tmp_path):
    model = build(architecture)
    model.save_pretrained(tmp_path / "source", save_original_format=not is_stacked)
    found = quantize(tmp_path / "source", tmp_path / "out", moe="packed")
    compare_with_bitsandbytes(model, found)
