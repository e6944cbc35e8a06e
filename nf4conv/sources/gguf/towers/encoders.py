"""Lists the towers of models whose queries, keys and values are matrices of their own."""

from typing import Final

from nf4conv.format.gguf import PLUS_ONE, ROTARY
from nf4conv.sources.gguf.families.family import SCALAR, GgufFamily, Join
from nf4conv.sources.gguf.towers.joining import join_patches
from nf4conv.sources.gguf.towers.tower import IN_LANGUAGE_MODEL, Tower, in_layers

_SIGLIP: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


def _siglip(encoder: str) -> dict[str, str]:
    """Returns the names that SigLIP and CLIP share, given how they begin."""
    return {
        "v.patch_embd": f"{encoder}.embeddings.patch_embedding",
        "v.position_embd": f"{encoder}.embeddings.position_embedding",
        "v.post_ln": f"{encoder}.post_layernorm",
        **in_layers(f"{encoder}.encoder.layers.*", _SIGLIP),
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
    projection="multi_modal_projector.mm_input_projection_weight",
    projected=1,
    text_prefixes=IN_LANGUAGE_MODEL,
    masks_image_token=True,
)

_AROUND_CLIP: Final = {
    "v.class_embd": "vision_tower.vision_model.embeddings.class_embedding",
    "v.pre_ln": "vision_tower.vision_model.pre_layrnorm",
    "mm.0": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
    "model.image_newline": "image_newline",
}

LLAVA: Final = Tower(
    family=GgufFamily(
        model_type="llava",
        architecture="LlavaForConditionalGeneration",
        names={**_siglip("vision_tower.vision_model"), **_AROUND_CLIP},
        also=("llava_next",),
    ),
    projection="multi_modal_projector.linear_2.weight",
    text_prefixes=IN_LANGUAGE_MODEL,
    lacks_last_layers=True,
)

_FROM_IDEFICS: Final = {"mm.model.fc": "model.connector.modality_projection.proj"}

IDEFICS3: Final = Tower(
    family=GgufFamily(
        model_type="idefics3",
        architecture="Idefics3ForConditionalGeneration",
        names={**_siglip("model.vision_model"), **_FROM_IDEFICS},
        also=("smolvlm",),
    ),
    projection="model.connector.modality_projection.proj.weight",
    text_prefixes={"model.": "model.text_model."},
)

_OF_PIXTRAL: Final = {
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_out": "attention.o_proj",
    "ln1": "attention_norm",
    "ln2": "ffn_norm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}

_AROUND_PIXTRAL: Final = {
    "v.patch_embd": "vision_tower.patch_conv",
    "v.pre_ln": "vision_tower.ln_pre",
    "mm.1": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
    "mm.input_norm": "multi_modal_projector.norm",
    "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
}

PIXTRAL: Final = Tower(
    family=GgufFamily(
        model_type="mistral3",
        architecture="Mistral3ForConditionalGeneration",
        names={**_AROUND_PIXTRAL, **in_layers("vision_tower.transformer.layers.*", _OF_PIXTRAL)},
        changed={"v.blk.*.attn_q": ROTARY, "v.blk.*.attn_k": ROTARY},
        also=("llava",),
    ),
    projection="multi_modal_projector.linear_2.weight",
    text_prefixes=IN_LANGUAGE_MODEL,
)

_OF_INTERN: Final = {
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "attn_out": "attention.projection_layer",
    "ln1": "layernorm_before",
    "ln2": "layernorm_after",
    "ls1.weight": "lambda_1",
    "ls2.weight": "lambda_2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}

_AROUND_INTERN: Final = {
    "v.class_embd": "vision_tower.embeddings.cls_token",
    "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
    "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
    "mm.model.mlp.0": "multi_modal_projector.layer_norm",
    "mm.model.mlp.1": "multi_modal_projector.linear_1",
    "mm.model.mlp.3": "multi_modal_projector.linear_2",
}

INTERNVL: Final = Tower(
    family=GgufFamily(
        model_type="internvl",
        architecture="InternVLForConditionalGeneration",
        names={**_AROUND_INTERN, **in_layers("vision_tower.encoder.layer.*", _OF_INTERN)},
    ),
    projection="multi_modal_projector.linear_2.weight",
    text_prefixes=IN_LANGUAGE_MODEL,
)

_AROUND_LLAMA_4: Final = {
    "v.class_embd": "vision_model.class_embedding",
    "v.patch_embd": "vision_model.patch_embedding.linear",
    "v.position_embd.weight": "vision_model.positional_embedding_vlm",
    "v.pre_ln": "vision_model.layernorm_pre",
    "v.post_ln": "vision_model.layernorm_post",
    "mm.model.mlp.1": "vision_model.vision_adapter.mlp.fc1",
    "mm.model.mlp.2": "vision_model.vision_adapter.mlp.fc2",
    "mm.model.fc": "multi_modal_projector.linear_1",
}

_OF_LLAMA_4: Final = {
    **_SIGLIP,
    "attn_out": "self_attn.o_proj",
    "ln1": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
}

LLAMA4: Final = Tower(
    family=GgufFamily(
        model_type="llama4",
        architecture="Llama4ForConditionalGeneration",
        names={**_AROUND_LLAMA_4, **in_layers("vision_model.model.layers.*", _OF_LLAMA_4)},
    ),
    projection="multi_modal_projector.linear_1.weight",
    text_prefixes=IN_LANGUAGE_MODEL,
)

_LAYER_OF_GEMMA_4: Final = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ln1": "input_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}

_MATRICES_OF_GEMMA_4: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_LIMITS: Final = ("input_min", "input_max", "output_min", "output_max")
"""Scalars to which some releases clip what goes into a matrix, and what comes out."""


def _matrices_with_limits() -> dict[str, str]:
    """Returns the names of matrices of Gemma 4, and of their limits."""
    names = {}
    for module, name in _MATRICES_OF_GEMMA_4.items():
        names[f"{module}.weight"] = f"{name}.linear.weight"
        for limit in _LIMITS:
            names[f"{module}.{limit}"] = f"{name}.{limit}"
    return names


GEMMA4: Final = Tower(
    family=GgufFamily(
        model_type="gemma4",
        architecture="Gemma4ForConditionalGeneration",
        names={
            "v.position_embd.weight": "model.vision_tower.patch_embedder.position_embedding_table",
            "v.std_bias": "model.vision_tower.std_bias",
            "v.std_scale": "model.vision_tower.std_scale",
            "mm.input_projection": "model.embed_vision.embedding_projection",
            **in_layers(
                "model.vision_tower.encoder.layers.*",
                {**_LAYER_OF_GEMMA_4, **_matrices_with_limits()},
            ),
        },
        joined=(
            Join(
                "model.vision_tower.patch_embedder.input_proj.weight",
                ("v.patch_embd.weight",),
                join_patches,
            ),
        ),
        shapes={
            f"v.blk.*.{module}.{limit}": SCALAR
            for module in _MATRICES_OF_GEMMA_4
            for limit in _LIMITS
        },
    ),
    projection="model.embed_vision.embedding_projection.weight",
    text_prefixes={"model.": "model.language_model."},
    masks_image_token=True,
)
