"""Lists the towers of models whose queries, keys and values are matrices of their own."""

from typing import Final

from nf4conv.format.gguf import PLUS_ONE, ROTARY
from nf4conv.sources.gguf.families.family import GgufFamily
from nf4conv.sources.gguf.towers.tower import Tower

_OF_LLAVA: Final = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
"""How names of the text model begin in models like LLaVA."""


def _siglip(model: str) -> dict[str, str]:
    """Returns the names of an encoder like SigLIP's or CLIP's, given how they begin."""
    layer = f"{model}.encoder.layers.*"
    return {
        "v.patch_embd": f"{model}.embeddings.patch_embedding",
        "v.position_embd": f"{model}.embeddings.position_embedding",
        "v.blk.*.attn_q": f"{layer}.self_attn.q_proj",
        "v.blk.*.attn_k": f"{layer}.self_attn.k_proj",
        "v.blk.*.attn_v": f"{layer}.self_attn.v_proj",
        "v.blk.*.attn_out": f"{layer}.self_attn.out_proj",
        "v.blk.*.ln1": f"{layer}.layer_norm1",
        "v.blk.*.ln2": f"{layer}.layer_norm2",
        "v.blk.*.ffn_up": f"{layer}.mlp.fc1",
        "v.blk.*.ffn_down": f"{layer}.mlp.fc2",
        "v.post_ln": f"{model}.post_layernorm",
    }


GEMMA3: Final = Tower(
    family=GgufFamily(
        model_type="gemma3",
        architecture="Gemma3ForConditionalGeneration",
        names={
            **_siglip("vision_tower.vision_model"),
            "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        },
        changed={"mm.soft_emb_norm": PLUS_ONE},
    ),
    text_prefixes=_OF_LLAVA,
    projection="multi_modal_projector.mm_input_projection_weight",
    projected=1,
)

IDEFICS3: Final = Tower(
    family=GgufFamily(
        model_type="idefics3",
        architecture="Idefics3ForConditionalGeneration",
        names={
            **_siglip("model.vision_model"),
            "mm.model.fc": "model.connector.modality_projection.proj",
        },
        also=("smolvlm",),
    ),
    text_prefixes={"model.": "model.text_model."},
    projection="model.connector.modality_projection.proj.weight",
)

_PIXTRAL_LAYER: Final = "vision_tower.transformer.layers.*"

PIXTRAL: Final = Tower(
    family=GgufFamily(
        model_type="mistral3",
        architecture="Mistral3ForConditionalGeneration",
        names={
            "v.patch_embd": "vision_tower.patch_conv",
            "v.pre_ln": "vision_tower.ln_pre",
            "v.blk.*.attn_q": f"{_PIXTRAL_LAYER}.attention.q_proj",
            "v.blk.*.attn_k": f"{_PIXTRAL_LAYER}.attention.k_proj",
            "v.blk.*.attn_v": f"{_PIXTRAL_LAYER}.attention.v_proj",
            "v.blk.*.attn_out": f"{_PIXTRAL_LAYER}.attention.o_proj",
            "v.blk.*.ln1": f"{_PIXTRAL_LAYER}.attention_norm",
            "v.blk.*.ln2": f"{_PIXTRAL_LAYER}.ffn_norm",
            "v.blk.*.ffn_gate": f"{_PIXTRAL_LAYER}.feed_forward.gate_proj",
            "v.blk.*.ffn_up": f"{_PIXTRAL_LAYER}.feed_forward.up_proj",
            "v.blk.*.ffn_down": f"{_PIXTRAL_LAYER}.feed_forward.down_proj",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
            "mm.input_norm": "multi_modal_projector.norm",
            "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
        },
        changed={"v.blk.*.attn_q": ROTARY, "v.blk.*.attn_k": ROTARY},
        also=("llava",),
    ),
    text_prefixes=_OF_LLAVA,
    projection="multi_modal_projector.linear_2.weight",
)

_INTERN_LAYER: Final = "vision_tower.encoder.layer.*"

INTERNVL: Final = Tower(
    family=GgufFamily(
        model_type="internvl",
        architecture="InternVLForConditionalGeneration",
        names={
            "v.class_embd": "vision_tower.embeddings.cls_token",
            "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
            "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
            "v.blk.*.attn_q": f"{_INTERN_LAYER}.attention.q_proj",
            "v.blk.*.attn_k": f"{_INTERN_LAYER}.attention.k_proj",
            "v.blk.*.attn_v": f"{_INTERN_LAYER}.attention.v_proj",
            "v.blk.*.attn_q_norm": f"{_INTERN_LAYER}.attention.q_norm",
            "v.blk.*.attn_k_norm": f"{_INTERN_LAYER}.attention.k_norm",
            "v.blk.*.attn_out": f"{_INTERN_LAYER}.attention.projection_layer",
            "v.blk.*.ln1": f"{_INTERN_LAYER}.layernorm_before",
            "v.blk.*.ln2": f"{_INTERN_LAYER}.layernorm_after",
            "v.blk.*.ls1.weight": f"{_INTERN_LAYER}.lambda_1",
            "v.blk.*.ls2.weight": f"{_INTERN_LAYER}.lambda_2",
            "v.blk.*.ffn_up": f"{_INTERN_LAYER}.mlp.fc1",
            "v.blk.*.ffn_down": f"{_INTERN_LAYER}.mlp.fc2",
            "mm.model.mlp.0": "multi_modal_projector.layer_norm",
            "mm.model.mlp.1": "multi_modal_projector.linear_1",
            "mm.model.mlp.3": "multi_modal_projector.linear_2",
        },
    ),
    text_prefixes=_OF_LLAVA,
    projection="multi_modal_projector.linear_2.weight",
)
