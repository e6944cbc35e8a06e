"""Lists the towers of Qwen and GLM, whose queries, keys and values are one matrix."""

from typing import Final

from nf4conv.sources.gguf.families.family import GgufFamily, Join, PutTogether
from nf4conv.sources.gguf.families.steps.common import GATE_AND_UP, LAYER
from nf4conv.sources.gguf.families.steps.joining import join_experts, join_transposed_experts
from nf4conv.sources.gguf.towers.joining import join_attention, join_frames
from nf4conv.sources.gguf.towers.tower import Tower, in_layers

_FRAMES: Final = ("v.patch_embd.weight", "v.patch_embd.weight.1")
_WEIGHTS: Final = ("v.blk.*.attn_q.weight", "v.blk.*.attn_k.weight", "v.blk.*.attn_v.weight")
_BIASES: Final = ("v.blk.*.attn_q.bias", "v.blk.*.attn_k.bias", "v.blk.*.attn_v.bias")

_JOINED: Final = (
    Join("visual.patch_embed.proj.weight", _FRAMES, join_frames),
    Join("visual.blocks.*.attn.qkv.weight", _WEIGHTS, join_attention),
    Join("visual.blocks.*.attn.qkv.bias", _BIASES, join_attention),
)

_AROUND: Final = {
    "v.post_ln": "visual.merger.ln_q",
    "mm.0": "visual.merger.mlp.0",
    "mm.2": "visual.merger.mlp.2",
}

_COMMON: Final = {"attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
_NOT_GATED: Final = {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_GATED: Final = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

QWEN2_VL: Final = Tower(
    family=GgufFamily(
        model_type="qwen2_vl",
        architecture="Qwen2VLForConditionalGeneration",
        names={**_AROUND, **in_layers("visual.blocks.*", {**_COMMON, **_NOT_GATED})},
        joined=_JOINED,
    ),
    projection="visual.merger.mlp.2.weight",
    text_types=("qwen2_vl_text",),
)

QWEN2_5_VL: Final = Tower(
    family=GgufFamily(
        model_type="qwen2_5_vl",
        architecture="Qwen2_5_VLForConditionalGeneration",
        names={**_AROUND, **in_layers("visual.blocks.*", {**_COMMON, **_GATED})},
        joined=_JOINED,
    ),
    projection="visual.merger.mlp.2.weight",
    text_types=("qwen2_5_vl_text",),
)

_LATER: Final = {
    **_COMMON,
    "attn_qkv": "attn.qkv",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}

_AROUND_LATER: Final = {
    "v.patch_embd.bias": "model.visual.patch_embed.proj.bias",
    "v.position_embd": "model.visual.pos_embed",
    "v.deepstack.*.norm": "model.visual.deepstack_merger_list.*.norm",
    "v.deepstack.*.fc1": "model.visual.deepstack_merger_list.*.linear_fc1",
    "v.deepstack.*.fc2": "model.visual.deepstack_merger_list.*.linear_fc2",
    "v.post_ln": "model.visual.merger.norm",
    "mm.0": "model.visual.merger.linear_fc1",
    "mm.2": "model.visual.merger.linear_fc2",
}


def _stacks_of_experts(put_together: PutTogether) -> tuple[Join, ...]:
    """Returns the experts of a text model as models on the Hub that see have them."""
    experts = f"{LAYER}.mlp.experts"
    return (
        Join(f"{experts}.gate_up_proj", GATE_AND_UP, put_together),
        Join(f"{experts}.down_proj", ("blk.*.ffn_down_exps.weight",), put_together),
    )


QWEN3_VL: Final = Tower(
    family=GgufFamily(
        model_type="qwen3_vl",
        architecture="Qwen3VLForConditionalGeneration",
        names={**_AROUND_LATER, **in_layers("model.visual.blocks.*", _LATER)},
        joined=(Join("model.visual.patch_embed.proj.weight", _FRAMES, join_frames),),
        also=("qwen3_5", "qwen3_vl_moe", "qwen3_5_moe"),
    ),
    projection="model.visual.merger.linear_fc2.weight",
    text_types=("qwen3_vl_text", "qwen3_vl_moe_text"),
    text_prefixes={"model.": "model.language_model."},
    stacked={
        "qwen3_vl_moe": _stacks_of_experts(join_transposed_experts),
        "qwen3_5_moe": _stacks_of_experts(join_experts),
    },
)

_AROUND_GLM: Final = {
    "v.patch_embd.bias": "model.visual.patch_embed.proj.bias",
    "v.position_embd": "model.visual.embeddings.position_embedding",
    "v.norm_embd": "model.visual.post_conv_layernorm",
    "v.post_ln": "model.visual.post_layernorm",
    "mm.patch_merger": "model.visual.downsample",
    "mm.model.fc": "model.visual.merger.proj",
    "mm.post_norm": "model.visual.merger.post_projection_norm",
    "mm.gate": "model.visual.merger.gate_proj",
    "mm.up": "model.visual.merger.up_proj",
    "mm.down": "model.visual.merger.down_proj",
}

GLM4V: Final = Tower(
    family=GgufFamily(
        model_type="glm4v",
        architecture="Glm4vForConditionalGeneration",
        names={
            **_AROUND_GLM,
            **in_layers("model.visual.blocks.*", {**_COMMON, **_GATED, "attn_qkv": "attn.qkv"}),
        },
        joined=(Join("model.visual.patch_embed.proj.weight", _FRAMES, join_frames),),
        also=("glm4v_moe",),
    ),
    projection="model.visual.merger.down_proj.weight",
    text_types=("glm4v_text", "glm4v_moe_text"),
    text_prefixes={"model.": "model.language_model."},
)
