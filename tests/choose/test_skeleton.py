"""--plan-with transformers: the module tree corrects the rules, and disagreements are told."""

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from nf4conv.choose.decisions import Pack
from nf4conv.choose.selection import select
from nf4conv.choose.skeleton import read_skeleton, select_with_transformers
from nf4conv.cli import main
from nf4conv.errors import PlanError
from nf4conv.options import QuantizeOptions
from nf4conv.sources.tensors import TensorInfo

pytestmark = pytest.mark.oracle

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    **SIZES,
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 2,
    "tie_word_embeddings": False,
}


def tensor(name: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, "BF16", shape, Path("model.safetensors"), 0, 2)


Q_PROJ = tensor("model.layers.0.self_attn.q_proj.weight", 64, 64)


def test_rules_and_transformers_agree_on_a_plain_language_model():
    source = [tensor("model.embed_tokens.weight", 320, 64), Q_PROJ, tensor("model.norm.weight", 64)]
    by_rule = select(source, LLAMA, QuantizeOptions())
    by_tree = select_with_transformers(source, LLAMA, QuantizeOptions())
    assert by_tree.decisions == by_rule.decisions
    assert by_tree.notes == ()
    assert "lm_head" in by_tree.skip_modules


def test_names_on_disk_are_followed_to_those_in_memory():
    name = "model.layers.0.block_sparse_moe.gate.weight"
    skeleton = read_skeleton([name, "model.layers.0.block_sparse_moe.experts.0.w1.weight"], MIXTRAL)
    assert skeleton.modules == {name: "model.layers.0.mlp.gate"}, (
        "merged experts are no module's weight"
    )
    assert "model.layers.0.mlp.gate" not in skeleton.linear


def test_a_wrong_rule_is_corrected_and_told():
    odd = tensor("model.layers.0.self_attn.rotary.weight", 64, 64)
    selection = select_with_transformers([Q_PROJ, odd], LLAMA, QuantizeOptions())
    assert isinstance(select([odd], LLAMA, QuantizeOptions()).decisions[odd.name], Pack)
    assert selection.decisions[odd.name].reason.startswith("not an nn.Linear in transformers")
    assert len(selection.notes) == 1
    assert selection.notes[0].startswith(f"{odd.name}: transformers ")


def test_what_the_rules_are_unsure_of_is_packed_when_the_tree_knows():
    config = {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": 64,
        "text_config": {"model_type": "clip_text_model", **SIZES},
        "vision_config": {"model_type": "clip_vision_model", **SIZES},
    }
    source = [tensor("text_projection.weight", 64, 64)]
    assert (
        select(source, config, QuantizeOptions())
        .decisions[source[0].name]
        .reason.startswith("unsure")
    )
    assert isinstance(
        select_with_transformers(source, config, QuantizeOptions()).decisions[source[0].name], Pack
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["NoSuchModel"]}, "has no NoSuchModel"),
        ({"architectures": None}, "has no architecture"),
        ({"num_attention_heads": "many"}, "cannot build LlamaForCausalLM"),
    ],
)
def test_what_transformers_cannot_build_is_said(changes, message):
    with pytest.raises(PlanError, match=message):
        select_with_transformers([Q_PROJ], {**LLAMA, **changes}, QuantizeOptions())


def test_a_dry_run_tells_what_transformers_would_decide_otherwise(tmp_path, monkeypatch):
    """Rules that are made to err: a router is packed by them, and is none of transformers' linear
    modules.
    """
    source = tmp_path / "source"
    source.mkdir()
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_hidden_layers": 1,
    }
    config |= {
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 128,
        "num_local_experts": 64,
    }
    (source / "config.json").write_text(json.dumps(config))
    names = {
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.block_sparse_moe.gate.weight": (64, 64),
    }
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in names.items()}
    save_file(tensors, source / "model.safetensors")
    command = ["quantize", str(source), str(tmp_path / "out"), "--dry-run"]
    agreed = CliRunner().invoke(main, command)
    assert agreed.exit_code == 0, agreed.output
    assert "would differ" not in agreed.output
    monkeypatch.setattr("nf4conv.choose.evidence.ROUTER", re.compile("$^"))
    differing = CliRunner().invoke(main, command)
    assert (
        "--plan-with transformers would differ: model.layers.0.block_sparse_moe.gate.weight"
        in differing.output
    )
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["NeverHeardOf"]}))
    assert "would differ" not in CliRunner().invoke(main, command).output
