"""Experts that a source stacks in one tensor, and what quantize makes of them."""

import pytest

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
