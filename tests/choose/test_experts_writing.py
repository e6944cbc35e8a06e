"""Experts that a source stacks in one tensor, and what quantize makes of them."""

import json
from pathlib import Path

import bitsandbytes.functional as bitsandbytes
import pytest
import torch
import transformers
from safetensors.torch import load_file
from stacked_experts import build, place_of, single_experts
from transformers import AutoModelForCausalLM

from nf4conv import (
    QuantizeOptions,
    RunOptions,
    VerifyOptions,
    quantize_checkpoint,
    verify_checkpoint,
)
from nf4conv.inference.moe.tensor import Experts4bit
from nf4conv.models.expert_layouts import find_stack, layouts_of, partner_names

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
    "DbrxForCausalLM",
    "JetMoeForCausalLM",
)
ONE_BY_ONE = ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM")


def quantize(source: Path, out: Path, **options: object) -> dict[str, torch.Tensor]:
    """Returns the tensors of the result; absmax in float32, which a CPU makes as a GPU does."""
    quantize_checkpoint(source, out, QuantizeOptions(double_quant=False, **options))
    tensors = {}
    for file in out.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


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


@pytest.mark.parametrize("architecture", ONE_BY_ONE)
def test_single_experts_are_stacked_as_their_family_stacks_them(architecture, tmp_path):
    """The bytes are those of the stack that transformers saves if it keeps its own layout."""
    model = build(architecture)
    found = {}
    for layout in ("single", "stack"):
        source = tmp_path / layout
        model.save_pretrained(source, save_original_format=layout == "single")
        run = RunOptions(device="cpu", buffer_size=1, verify=True)
        out = tmp_path / f"{layout}-out"
        quantize_checkpoint(source, out, QuantizeOptions(moe="stacked"), run)
        tensors = load_file(out / "model.safetensors")
        # Mixtral's files call the module above the experts otherwise
        found[layout] = {
            name.replace("block_sparse_moe", "mlp"): tensor
            for name, tensor in tensors.items()
            if ".experts." in name
        }
    assert found["single"].keys() == found["stack"].keys()
    for name, tensor in found["stack"].items():
        assert torch.equal(found["single"][name], tensor), name
    assert verify_checkpoint(
        tmp_path / "single-out",
        tmp_path / "single",
        VerifyOptions(exact=True),
        RunOptions(device="cpu"),
    ).passed
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "single-out")
    stacks = {name for name, weight in loaded.named_parameters() if isinstance(weight, Experts4bit)}
    assert len(stacks) == len(found["stack"]) // 6  # codes, and five components


@pytest.mark.parametrize(
    "architecture", ["GptOssForCausalLM", "GraniteMoeForCausalLM", "Mistral4ForCausalLM"]
)
def test_stacks_are_packed_as_bitsandbytes_packs_them(architecture, tmp_path):
    """Its parametrization packs a parameter of three dimensions over its flat order."""
    build(architecture).save_pretrained(tmp_path / "source")
    source = load_file(tmp_path / "source" / "model.safetensors")
    stacks = {name: tensor for name, tensor in source.items() if tensor.dim() == 3}
    assert stacks
    options = QuantizeOptions(double_quant=False, moe="stacked")
    run = RunOptions(device="cpu", buffer_size=1, verify=True)
    report = quantize_checkpoint(tmp_path / "source", tmp_path / "out", options, run)
    assert any("Unsloth" in note for note in report.notes)
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, stack in stacks.items():
        codes, state = bitsandbytes.quantize_4bit(stack, blocksize=64, quant_type="nf4")
        assert torch.equal(found[name], codes), name
        assert torch.equal(found[f"{name}.absmax"], state.absmax), name
        blob = bytes(found[f"{name}.quant_state.bitsandbytes__nf4"].tolist())
        assert json.loads(blob)["shape"] == list(stack.shape)
    assert verify_checkpoint(
        tmp_path / "out", tmp_path / "source", VerifyOptions(exact=True), RunOptions(device="cpu")
    ).passed
