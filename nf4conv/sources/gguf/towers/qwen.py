"""Lists the towers of Qwen, whose queries, keys and values are one matrix in transformers."""

from typing import Final

from nf4conv.sources.gguf.families.family import GgufFamily, Join
from nf4conv.sources.gguf.towers.joining import join_attention, join_frames
from nf4conv.sources.gguf.towers.tower import Tower

_FRAMES: Final = ("v.patch_embd.weight", "v.patch_embd.weight.1")
_ATTENTION: Final = ("v.blk.*.attn_q", "v.blk.*.attn_k", "v.blk.*.attn_v")

_LAYER: Final = "visual.blocks.*"

_NAMES: Final = {
    "v.blk.*.attn_out": f"{_LAYER}.attn.proj",
    "v.blk.*.ln1": f"{_LAYER}.norm1",
    "v.blk.*.ln2": f"{_LAYER}.norm2",
    "v.post_ln": "visual.merger.ln_q",
    "mm.0": "visual.merger.mlp.0",
    "mm.2": "visual.merger.mlp.2",
}

_JOINED: Final = (
    Join("visual.patch_embed.proj.weight", _FRAMES, join_frames),
    Join(
        f"{_LAYER}.attn.qkv.weight",
        tuple(f"{module}.weight" for module in _ATTENTION),
        join_attention,
    ),
    Join(
        f"{_LAYER}.attn.qkv.bias",
        tuple(f"{module}.bias" for module in _ATTENTION),
        join_attention,
    ),
)

QWEN2_VL: Final = Tower(
    family=GgufFamily(
        model_type="qwen2_vl",
        architecture="Qwen2VLForConditionalGeneration",
        names={
            **_NAMES,
            "v.blk.*.ffn_up": f"{_LAYER}.mlp.fc1",
            "v.blk.*.ffn_down": f"{_LAYER}.mlp.fc2",
        },
        joined=_JOINED,
    ),
    text_types=("qwen2_vl_text",),
    projection="visual.merger.mlp.2.weight",
)

QWEN2_5_VL: Final = Tower(
    family=GgufFamily(
        model_type="qwen2_5_vl",
        architecture="Qwen2_5_VLForConditionalGeneration",
        names={
            **_NAMES,
            "v.blk.*.ffn_gate": f"{_LAYER}.mlp.gate_proj",
            "v.blk.*.ffn_up": f"{_LAYER}.mlp.up_proj",
            "v.blk.*.ffn_down": f"{_LAYER}.mlp.down_proj",
        },
        joined=_JOINED,
    ),
    text_types=("qwen2_5_vl_text",),
    projection="visual.merger.mlp.2.weight",
)

_LATER_LAYER: Final = "model.visual.blocks.*"
_DEEPSTACK: Final = "model.visual.deepstack_merger_list.*"

QWEN3_VL: Final = Tower(
    family=GgufFamily(
        model_type="qwen3_vl",
        architecture="Qwen3VLForConditionalGeneration",
        names={
            "v.patch_embd.bias": "model.visual.patch_embed.proj.bias",
            "v.position_embd": "model.visual.pos_embed",
            "v.blk.*.attn_qkv": f"{_LATER_LAYER}.attn.qkv",
            "v.blk.*.attn_out": f"{_LATER_LAYER}.attn.proj",
            "v.blk.*.ln1": f"{_LATER_LAYER}.norm1",
            "v.blk.*.ln2": f"{_LATER_LAYER}.norm2",
            "v.blk.*.ffn_up": f"{_LATER_LAYER}.mlp.linear_fc1",
            "v.blk.*.ffn_down": f"{_LATER_LAYER}.mlp.linear_fc2",
            "v.deepstack.*.norm": f"{_DEEPSTACK}.norm",
            "v.deepstack.*.fc1": f"{_DEEPSTACK}.linear_fc1",
            "v.deepstack.*.fc2": f"{_DEEPSTACK}.linear_fc2",
            "v.post_ln": "model.visual.merger.norm",
            "mm.0": "model.visual.merger.linear_fc1",
            "mm.2": "model.visual.merger.linear_fc2",
        },
        joined=(Join("model.visual.patch_embed.proj.weight", _FRAMES, join_frames),),
        also=("qwen3_5",),
    ),
    text_types=("qwen3_vl_text",),
    text_prefixes={"model.": "model.language_model."},
    projection="model.visual.merger.linear_fc2.weight",
)
