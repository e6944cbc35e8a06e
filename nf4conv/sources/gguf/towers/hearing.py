"""Lists the towers that hear: encoders of Whisper."""

from typing import Final

from nf4conv.sources.gguf.families.family import FLAT, GgufFamily
from nf4conv.sources.gguf.towers.tower import IN_LANGUAGE_MODEL, Tower, in_layers

_LAYER_OF_WHISPER: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "self_attn_layer_norm",
    "ln2": "final_layer_norm",
    "ffn_up": "fc1",
    "ffn_down": "fc2",
}

_WHISPER: Final = {
    "a.conv1d.1": "audio_tower.conv1",
    "a.conv1d.2": "audio_tower.conv2",
    "a.position_embd": "audio_tower.embed_positions",
    "a.post_ln": "audio_tower.layer_norm",
    **in_layers("audio_tower.layers.*", _LAYER_OF_WHISPER, "a"),
}

_SHAPES: Final = {"a.conv1d.1.bias": FLAT, "a.conv1d.2.bias": FLAT}
"""The converter stores biases of convolutions as columns."""

QWEN2_AUDIO: Final = Tower(
    family=GgufFamily(
        model_type="qwen2_audio",
        architecture="Qwen2AudioForConditionalGeneration",
        names={**_WHISPER, "mm.a.fc": "multi_modal_projector.linear"},
        shapes=_SHAPES,
    ),
    projection="multi_modal_projector.linear.weight",
    text_prefixes=IN_LANGUAGE_MODEL,
    hears=True,
)

VOXTRAL: Final = Tower(
    family=GgufFamily(
        model_type="voxtral",
        architecture="VoxtralForConditionalGeneration",
        names={
            **_WHISPER,
            "mm.a.mlp.1": "multi_modal_projector.linear_1",
            "mm.a.mlp.2": "multi_modal_projector.linear_2",
        },
        shapes=_SHAPES,
    ),
    projection="multi_modal_projector.linear_2.weight",
    text_prefixes=IN_LANGUAGE_MODEL,
    hears=True,
)
