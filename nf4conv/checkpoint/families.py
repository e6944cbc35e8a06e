"""What a model family does differently from the general rule of selection.py. Keys are config.json's model_type; of
submodels of diffusers, their class.

A family is listed only when names and shapes cannot tell. Patterns are regular expressions, searched in the path of a
module on disk (a tensor's name without ".weight").
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Family:
    """Deviations of one family."""

    transposed: str = ""  # modules that store [in, out] (transformers' Conv1D) and are packed as [out, in]
    linear: str = ""  # modules that are packed although their names speak against it
    keep: tuple[tuple[str, str], ...] = ()  # (pattern, reason) of modules that must not be packed
    # (pattern, replacement): names on disk → names in memory, where loaders rename what is not packed
    renamed: tuple[tuple[str, str], ...] = ()
    heads: tuple[str, ...] = ()  # modules that are in memory but, being tied or merged, not on disk; none is packed
    float32: str = ""  # modules whose weights loaders want in float32, if that is how they are stored
    # whether experts stacked as [expert, in, out] are loaded as one `nn.Linear` each when packed
    splits_experts: bool = False
    only_blocks: bool = False  # whether linear layers that are below nothing numbered are kept
    # whether loaders take vision and audio parts under other names, by which nothing in them could be told from the
    # rest
    renames_towers: bool = False


SUBCLASS: Final = "an nn.Linear subclass, which transformers 5 leaves alone"
CONVERTED: Final = "transformers 5 splits or merges this weight when it loads it"
FLOAT32: Final = "transformers never quantizes this weight of the family"

SHARED: Final = "shared by layers and stored with any one of them, of which transformers 5 finds some only unpacked"

READ: Final = "transformers reads this weight outside of its module, which a packed one does not survive"

T5: Final = Family(keep=((r"(^|\.)wo$", FLOAT32),))
GPT2: Final = Family(transposed=r"(^|\.)h\.\d+\.(attn|crossattention|mlp)\.(c_attn|q_attn|c_proj|c_fc)$")
FALCON: Final = Family(keep=((r"(self_attention|mlp)\.", SUBCLASS),))
T5_UNPROTECTED: Final = Family(keep=((r"(^|\.)wo$", READ),))
RETRIEVAL: Final = Family(
    keep=((r"(^|\.)embedding_proj_layer$", READ),),
    heads=(
        "vlm.model.vision_tower",
        "vlm.model.visual",
        "vlm.model.multi_modal_projector",
    ),  # as transformers 5.0 has them
)
CODEC: Final = Family(keep=((r"^(codec_model|audio_encoder)\.", "an audio codec"),))
INDEXER: Final = Family(keep=((r"indexer\.weights_proj$", FLOAT32),))
BLOCK_SPARSE: Final = Family(renamed=((r"\.block_sparse_moe\.", ".mlp."),))
NEMOTRON_H: Final = Family(renamed=((r"(^|\.)backbone\.", r"\1model."), (r"^(backbone|model)\.", "")))


def _float32(names: str) -> Family:
    """What the class of a denoiser lists as _keep_in_fp32_modules: diffusers skips linear layers below such a name."""
    return Family(keep=((rf"({names})(\.|$)", "diffusers keeps this in float32"),), float32=rf"(^|\.)({names})(\.|$)")


DIFFUSERS: Final = Family(
    only_blocks=True,
    linear=r"\.experts\.\d+\.",  # one nn.Linear each, as in HiDream
)
OLD_ATTENTION: Final = Family(
    keep=((r"\.(query|key|value|proj_attn)$", "diffusers renames this weight of an old checkpoint when it loads it"),),
    renamed=((r"\.query$", ".to_q"), (r"\.key$", ".to_k"), (r"\.value$", ".to_v"), (r"\.proj_attn$", ".to_out.0")),
)
WAN: Final = _float32("rope|time_embedder|scale_shift_table|norm1|norm2|norm3")
ATTENTION: Final = (r"\.attention\.", ".self_attn.")
DETR: Final = Family(
    keep=((r"(bbox|class)_embed(\.|$)", "tied to other heads of the detector"),),
    heads=("bbox_embed", "class_embed", "model.decoder.bbox_embed", "model.decoder.class_embed"),
)


QKV: Final = ("q_proj", "k_proj", "v_proj")
GATE_UP: Final = ("gate_proj", "up_proj")


def _converted(merged: str, parts: tuple[str, ...]) -> Family:
    """Projections that transformers 5 takes apart or puts together; the results are named by their path's last part."""
    pattern = rf"(^|\.)({merged})$"
    return Family(keep=((pattern, CONVERTED),), renamed=tuple((f".*{pattern}", part) for part in parts))


TIPS: Final = _converted("qkv|w12", QKV + GATE_UP)
MOLMO2: Final = _converted("att_proj|ff_proj", QKV + GATE_UP)

FAMILIES: Final[Mapping[str, Family]] = {
    # submodels of a diffusers pipeline name a class instead of a model_type
    "_class_name": DIFFUSERS,
    **dict.fromkeys(
        (
            *("AnyFlowTransformer3DModel", "AnyFlowFARTransformer3DModel", "ChronoEditTransformer3DModel"),
            *("SkyReelsV2Transformer3DModel", "WanTransformer3DModel", "WanVACETransformer3DModel"),
        ),
        WAN,
    ),
    "Cosmos3OmniTransformer": _float32("time_embedder"),
    "Flux3Transformer2DModel": _float32("norm_q|norm_k"),
    "HeliosTransformer3DModel": _float32("time_embedder|scale_shift_table|norm1|norm2|norm3|history_key_scale"),
    **dict.fromkeys(
        ("JoyImageEditTransformer3DModel", "JoyImageEditPlusTransformer3DModel"),
        _float32("time_embedder|norm1|norm2|norm_out"),
    ),
    **dict.fromkeys(
        ("Kandinsky5Transformer3DModel", "Kandinsky6Transformer3DModel", "Kandinsky6SRTransformer3DModel"),
        _float32(r"time_embeddings|pooled_bias|\w*modulation"),
    ),
    "Krea2Transformer2DModel": replace(
        _float32("norm|norm1|norm2|norm_q|norm_k"),
        linear=r"\.ff\.gate$",  # of a gated feed-forward network: no router
    ),
    "MiniMaxH3Transformer3DModel": _float32("proj_in|audio_proj_in|time_embedder|proj_out|audio_proj_out|rope"),
    "RFD4ProteinaTransformer": _float32("cond_factory|norm|ln_out"),
    "UNet2DModel": OLD_ATTENTION,
    "WanAnimateTransformer3DModel": _float32(
        "rope|time_embedder|scale_shift_table|norm1|norm2|norm3|motion_synthesis_weight"
    ),
    "WanAnimate2Transformer3DModel": _float32(
        "time_embedding|time_projection|scale_shift_table|norm1|norm2|norm3|modulation"
    ),
    # Conv1D stores [in, out]
    **dict.fromkeys(("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp_decoder"), GPT2),
    # kept out of 4-bit by transformers itself
    **dict.fromkeys(("t5", "mt5", "umt5", "udop", "pop2piano"), T5),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "mistral_large4_text"), INDEXER),
    "axk2": replace(INDEXER, renamed=((r"W_down$", "mlp.fc1"), (r"W_up$", "mlp.fc2"))),
    "mistral_large4": replace(INDEXER, renames_towers=True),
    "deepseek_v4": Family(
        keep=(
            (r"compressor\.(wgate|wkv)$|indexer\.weights_proj$", FLOAT32),
            (r"\.wo_a$", SUBCLASS),
        ),
        renamed=((r".*\.wgate$", "compressor.gate_proj"), (r".*\.wo_a$", "o_a_proj")),
    ),
    # packed, they would be cast to or computed with as the bytes they are
    **dict.fromkeys(("longt5", "switch_transformers", "pix2struct", "kosmos-2.5"), T5_UNPROTECTED),
    **dict.fromkeys(("colpali", "colqwen2", "colmodernvbert"), RETRIEVAL),
    "neomme": Family(keep=((r"(^|\.)proj$", READ),), heads=("unembedding_projection",)),
    "wavlm": Family(keep=((r"(^|\.)attention\.(q|k|v|out)_proj$", READ),)),
    "mobilebert": Family(keep=((r"^cls\.", READ),)),
    **dict.fromkeys(("falcon", "RefinedWeb", "RefinedWebModel"), FALCON),
    "ibert": Family(keep=((r"(^|\.)encoder\.", "not an nn.Linear: I-BERT quantizes to integers itself"),)),
    # taken apart or merged when transformers 5 loads them
    **dict.fromkeys(("nomic_bert", "jina_embeddings_v3"), _converted("Wqkv", QKV)),
    "gte": _converted("qkv_proj|up_gate_proj", QKV + GATE_UP),
    "hrm_text": _converted("gqkv_proj|gate_up_proj", QKV + GATE_UP),
    "molmo2": replace(MOLMO2, renames_towers=True),
    "molmo2_text": MOLMO2,
    **dict.fromkeys(("tipsv2", "tipsv2_vision_model"), TIPS),
    "tipsv2_dpt": replace(
        TIPS,
        renamed=(
            *TIPS.renamed,
            (r"^\w+_head\.reassemble\.", "neck.reassemble_stage."),
            (r"^\w+_head\.\w+_head$", "decoder.head"),
        ),
    ),
    "tipsv2_text_model": Family(heads=(*QKV, "self_attn.out_proj")),
    "sapiens2": _converted("w12", GATE_UP),
    "radio": replace(_converted("qkv", QKV), heads=("embeddings.patch_projection",)),
    "gradium_phonon_tts": _converted("in_proj", QKV),
    "nemo_speechlm": _converted("w_qkv", QKV),
    "minimax_m3_vl": _converted(r"shared_experts\.(gate|up)_proj", ("gate_up_proj",)),
    "rf_detr": Family(
        keep=DETR.keep,
        heads=(*DETR.heads, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        renamed=(
            (r"^transformer\.", "model."),
            (r"^(model|transformer|segmentation_head)\.", ""),
            # with a segmentation head
            (r"^(bbox_embed|class_embed)", r"model.\1"),
            (r"^transformer\.", "model.model."),
        ),
    ),
    # modules that transformers 5 renames
    **dict.fromkeys(("phimoe", "mixtral", "minimax", "minimax_m2"), BLOCK_SPARSE),
    "bailing_hybrid": Family(renamed=((r"\.attention\.(f_proj)$", r".self_attn.forget_gate.\1"), ATTENTION)),
    "lfm3": Family(renamed=((r"\.self_attn\.gate_proj$", ".self_attn.g_proj"),)),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_omni": replace(NEMOTRON_H, renames_towers=True),
    "qwen2_5_omni": Family(renamed=((r"^thinker\.(visual|audio_tower)(\.|$)", r"thinker.model.\1\2"),)),
    "pi0": Family(renamed=((r"^paligemma_with_expert\.paligemma\.model\.", "model.vlm."),)),
    "hyperclovax_vision_v2": Family(renamed=((r"^model\.vision_projector$", "model.projector"),)),
    # the encoder has the decoder's layers, not on disk: skipping "encoder" as a whole would skip them
    "diffusion_gemma": Family(renamed=((r"(^|\.)decoder\.layers\.", r"\1encoder.language_model.layers."),)),
    **dict.fromkeys(("sam3_tracker", "sam3_video"), Family(renamed=((r"^tracker_model\.", ""),))),
    # as transformers 4 saves it
    "gemma3n_text": Family(
        renamed=(
            (r"^model\.language_model\.", "model."),
            (r"^model\.language_model\.per_layer_model\.language_model_", "model.per_layer_model_"),
        )
    ),
    "gpt_neox": Family(renamed=((r"^embed_out$", "lm_head"),)),
    # modules that are not on disk under their own name
    "gpt_neox_japanese": Family(heads=("embed_out",)),
    **dict.fromkeys(("biogpt", "trocr"), Family(heads=("output_projection",))),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), Family(heads=("decoder", "head"))),
    "distilbert": Family(heads=("vocab_projector",)),
    **dict.fromkeys(("whisper", "canary", "cohere_asr", "moonshine"), Family(heads=("proj_out",))),
    "granite_speech5_ctc": Family(heads=("ctc_head",)),
    "bark": Family(heads=("fine_acoustics.lm_heads",)),
    **dict.fromkeys(("xlm", "flaubert"), Family(heads=("pred_layer", "sequence_summary"))),
    "xlnet": Family(heads=("lm_loss", "sequence_summary", "logits_proj")),
    "qwen4_exp_text": Family(heads=("block_inject_weight",)),
    "lfm3_vl_vision": Family(heads=("patch_embed",)),
    "ultravbert": Family(heads=("projection_head",)),
    "zamba": Family(
        keep=((r"\.shared_transf\.", SHARED),),
        heads=(
            "shared_transf",
            *(f"shared_transf.self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
            *(f"shared_transf.feed_forward.{name}_proj" for name in ("gate", "up", "down")),
        ),
    ),
    "shieldgemma2": Family(heads=("model.model.vision_tower", "model.model.multi_modal_projector")),
    **dict.fromkeys(("electra", "convbert"), Family(heads=("generator_lm_head",))),
    "luke": Family(heads=("entity_predictions",)),
    # object detectors share their box and class heads
    **dict.fromkeys(
        (
            *("grounding-dino", "mm-grounding-dino", "deformable_detr", "d_fine", "deimv2", "rt_detr", "rt_detr_v2"),
            *("pp_doclayout_v3", "lw_detr"),
        ),
        DETR,
    ),
    "pp_doclayout_v4": replace(
        DETR,
        keep=(*DETR.keep, (r"(^|\.)decoder_(roor_)?(global_pointer|order_head)(\.|$)", "an output head")),
        heads=(
            *DETR.heads,
            *(f"{prefix}decoder.{head}_order_head" for prefix in ("", "model.") for head in ("relative", "successor")),
        ),
    ),
    "dab-detr": Family(
        keep=((r"^bbox_predictor\.", "tied to other heads of the detector"),), heads=("model.decoder.bbox_embed",)
    ),
    # experts that load packed in transformers 4 and 5 alike, once they are split
    **dict.fromkeys(("llama4", "llama4_text"), Family(splits_experts=True)),
    # weights in float32
    "hy_v4": Family(float32=r"(weights_proj|k_norm|^lm_head)$"),
    **dict.fromkeys(("inkling_text", "inkling_model"), Family(float32=r"sconv")),
    "inkling2_text": Family(float32=r"sconv|convolution"),
    # computes in float32 what it makes sound of
    **dict.fromkeys(("csm", "kyutai_speech_to_text", "moshi"), CODEC),
    # vision parts that --quantize-towers cannot pack
    "blip-2": Family(keep=((r"^qformer\.", FLOAT32),)),
    **dict.fromkeys(
        ("ernie4_5_vl_moe", "hunyuan_vl", "inkling2", "kimi_k25", "qianfan_ocr", "step3p7", "unlimited_ocr"),
        Family(renames_towers=True),
    ),
    # a vision part without a name of its own
    "cosmos3_omni": Family(keep=((r"^(blocks|merger|deepstack_merger_list|patch_embed)\.", "in the vision part"),)),
    "deepseek_ocr2": Family(keep=((r"(^|\.)(qwen2_model|sam_model|projector)\.", "in the vision part"),)),
    # heads whose name, listed, would hit every attention output
    "git": Family(linear=r"^output$"),
}


def families_of(config: Mapping[str, Any]) -> tuple[Family, ...]:
    """The families of a model and of its parts, as far as they are listed."""
    return tuple(FAMILIES[name] for name in dict.fromkeys(model_types(config)) if name in FAMILIES)


def is_transposed(module: str, families: Sequence[Family]) -> bool:
    """Whether a module of such a model stores its weight as [in, out], to be packed as [out, in]."""
    return bool(families) and any(family.transposed and re.search(family.transposed, module) for family in families)


def model_types(config: Mapping[str, Any]) -> Iterator[str]:
    """model_type at every level of a config, the outermost first; of a submodel of diffusers its class, too."""
    if "_class_name" in config:
        yield "_class_name"
        yield str(config["_class_name"])
    if isinstance(config.get("model_type"), str):
        yield config["model_type"]
    for value in config.values():
        if isinstance(value, Mapping):
            yield from model_types(value)
