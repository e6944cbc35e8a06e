"""Lists the model families that deviate from the rules of choose/selection.py, by model_type.

A family is listed only where names and shapes cannot tell. The key is config.json's model_type;
denoiser_table.py has the submodels of diffusers. Patterns are regular expressions, searched in the
path of a module on disk, which is a tensor's name without ".weight".

Each group of model types follows the families that some of them share, and MODEL_TYPES at the end
joins the groups. tests/architectures converts and loads tiny models of these families.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from nf4conv.models.family import Family, KeptModules, Renaming

# Reasons that users read.

READ_DIRECTLY: Final = (
    "transformers reads this weight outside of its module, which a packed one does not survive"
)
SUBCLASS: Final = "an nn.Linear subclass, which transformers 5 leaves alone"
CONVERTED: Final = "transformers 5 splits or merges this weight when it loads it"
NEVER_QUANTIZED: Final = "transformers never quantizes this weight of the family"
TIED: Final = "tied to other heads of the detector"
SHARED: Final = (
    "shared by layers and stored with any one of them, of which transformers 5 finds some only "
    "unpacked"
)
VISION: Final = "in the vision part"

GPT2: Final = Family(
    transposed=r"(^|\.)h\.\d+\.(attn|crossattention|mlp)\.(c_attn|q_attn|c_proj|c_fc)$"
)

_TRANSPOSED: Final[Mapping[str, Family]] = {
    "gpt2": GPT2,
    "openai-gpt": GPT2,
    "imagegpt": GPT2,
    "decision_transformer": GPT2,
    "clvp_decoder": GPT2,
}
"""Conv1D stores [in, out]."""

T5: Final = Family(keep=(KeptModules(r"(^|\.)wo$", NEVER_QUANTIZED),))
SPARSE_INDEXER: Final = Family(keep=(KeptModules(r"indexer\.weights_proj$", NEVER_QUANTIZED),))

_KEPT_BY_TRANSFORMERS: Final[Mapping[str, Family]] = {
    "t5": T5,
    "mt5": T5,
    "umt5": T5,
    "udop": T5,
    "pop2piano": T5,
    "deepseek_v32": SPARSE_INDEXER,
    "glm_moe_dsa": SPARSE_INDEXER,
    "mistral_large4_text": SPARSE_INDEXER,
    "axk2": replace(
        SPARSE_INDEXER,
        renamed=(Renaming(r"W_down$", "mlp.fc1"), Renaming(r"W_up$", "mlp.fc2")),
    ),
    "mistral_large4": replace(SPARSE_INDEXER, renames_towers=True),
    "deepseek_v4": Family(
        keep=(
            KeptModules(
                r"compressor\.(wgate|wkv)$|indexer\.weights_proj$",
                NEVER_QUANTIZED,
            ),
            KeptModules(r"\.wo_a$", SUBCLASS),
        ),
        renamed=(
            Renaming(r".*\.wgate$", "compressor.gate_proj"),
            Renaming(r".*\.wo_a$", "o_a_proj"),
        ),
    ),
}
"""transformers itself keeps these weights out of 4-bit."""

# Like T5, these read the weight of `wo` outside of its module. transformers does not protect it.
T5_UNPROTECTED: Final = Family(keep=(KeptModules(r"(^|\.)wo$", READ_DIRECTLY),))
RETRIEVAL: Final = Family(
    keep=(KeptModules(r"(^|\.)embedding_proj_layer$", READ_DIRECTLY),),
    # as transformers 5.0 has them
    heads=("vlm.model.vision_tower", "vlm.model.visual", "vlm.model.multi_modal_projector"),
)
FALCON: Final = Family(keep=(KeptModules(r"(self_attention|mlp)\.", SUBCLASS),))

_READ_ELSEWHERE: Final[Mapping[str, Family]] = {
    "longt5": T5_UNPROTECTED,
    "switch_transformers": T5_UNPROTECTED,
    "pix2struct": T5_UNPROTECTED,
    "kosmos-2.5": T5_UNPROTECTED,
    "colpali": RETRIEVAL,
    "colqwen2": RETRIEVAL,
    "colmodernvbert": RETRIEVAL,
    "neomme": Family(
        keep=(KeptModules(r"(^|\.)proj$", READ_DIRECTLY),),
        heads=("unembedding_projection",),
    ),
    "wavlm": Family(keep=(KeptModules(r"(^|\.)attention\.(q|k|v|out)_proj$", READ_DIRECTLY),)),
    "mobilebert": Family(keep=(KeptModules(r"^cls\.", READ_DIRECTLY),)),
    "falcon": FALCON,
    "RefinedWeb": FALCON,
    "RefinedWebModel": FALCON,
    "ibert": Family(
        keep=(
            KeptModules(
                r"(^|\.)encoder\.",
                "not an nn.Linear: I-BERT quantizes to integers itself",
            ),
        )
    ),
}
"""Packed, these weights would be cast to another dtype or computed with as the bytes they are."""


QKV: Final = ("q_proj", "k_proj", "v_proj")
GATE_UP: Final = ("gate_proj", "up_proj")


def _converted(on_disk: str, in_memory: tuple[str, ...]) -> Family:
    """Returns the family of projections that transformers 5 takes apart or puts together.

    Args:
        on_disk: names on disk, a regular expression for the last part of a path.
        in_memory: names of the results, of which the last part of the path is enough.
    """
    pattern = rf"(^|\.)({on_disk})$"
    return Family(
        keep=(KeptModules(pattern, CONVERTED),),
        renamed=tuple(Renaming(f".*{pattern}", name) for name in in_memory),
    )


NOMIC: Final = _converted("Wqkv", QKV)
MOLMO2: Final = _converted("att_proj|ff_proj", QKV + GATE_UP)
TIPS: Final = _converted("qkv|w12", QKV + GATE_UP)

_SPLIT_OR_MERGED: Final[Mapping[str, Family]] = {
    "nomic_bert": NOMIC,
    "jina_embeddings_v3": NOMIC,
    "gte": _converted("qkv_proj|up_gate_proj", QKV + GATE_UP),
    "hrm_text": _converted("gqkv_proj|gate_up_proj", QKV + GATE_UP),
    "molmo2": replace(MOLMO2, renames_towers=True),
    "molmo2_text": MOLMO2,
    "tipsv2": TIPS,
    "tipsv2_vision_model": TIPS,
    "tipsv2_dpt": replace(
        TIPS,
        renamed=(
            *TIPS.renamed,
            Renaming(r"^\w+_head\.reassemble\.", "neck.reassemble_stage."),
            Renaming(r"^\w+_head\.\w+_head$", "decoder.head"),
        ),
    ),
    "tipsv2_text_model": Family(heads=(*QKV, "self_attn.out_proj")),
    "sapiens2": _converted("w12", GATE_UP),
    "radio": replace(_converted("qkv", QKV), heads=("embeddings.patch_projection",)),
    "gradium_phonon_tts": _converted("in_proj", QKV),
    "nemo_speechlm": _converted("w_qkv", QKV),
    "minimax_m3_vl": _converted(r"shared_experts\.(gate|up)_proj", ("gate_up_proj",)),
}
"""transformers 5 takes these weights apart or merges them when it loads them."""

BLOCK_SPARSE: Final = Family(renamed=(Renaming(r"\.block_sparse_moe\.", ".mlp."),))
NEMOTRON_H: Final = Family(
    renamed=(
        Renaming(r"(^|\.)backbone\.", r"\1model."),
        Renaming(r"^(backbone|model)\.", ""),
    )
)

_RENAMED: Final[Mapping[str, Family]] = {
    "phimoe": BLOCK_SPARSE,
    "mixtral": BLOCK_SPARSE,
    "minimax": BLOCK_SPARSE,
    "minimax_m2": BLOCK_SPARSE,
    "bailing_hybrid": Family(
        renamed=(
            Renaming(r"\.attention\.(f_proj)$", r".self_attn.forget_gate.\1"),
            Renaming(r"\.attention\.", ".self_attn."),
        )
    ),
    "lfm3": Family(renamed=(Renaming(r"\.self_attn\.gate_proj$", ".self_attn.g_proj"),)),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_omni": replace(NEMOTRON_H, renames_towers=True),
    "qwen2_5_omni": Family(
        renamed=(Renaming(r"^thinker\.(visual|audio_tower)(\.|$)", r"thinker.model.\1\2"),)
    ),
    "pi0": Family(renamed=(Renaming(r"^paligemma_with_expert\.paligemma\.model\.", "model.vlm."),)),
    "hyperclovax_vision_v2": Family(
        renamed=(Renaming(r"^model\.vision_projector$", "model.projector"),)
    ),
}
"""transformers 5 renames these modules."""

SAM3: Final = Family(renamed=(Renaming(r"^tracker_model\.", ""),))

_SAME_LAYERS: Final[Mapping[str, Family]] = {
    "diffusion_gemma": Family(
        renamed=(Renaming(r"(^|\.)decoder\.layers\.", r"\1encoder.language_model.layers."),)
    ),
    "sam3_tracker": SAM3,
    "sam3_video": SAM3,
}
"""The encoder has the decoder's layers, and they are not on disk as its own. Skipping "encoder" as
a whole would skip them.
"""

_SAVED_BY_TRANSFORMERS_4: Final[Mapping[str, Family]] = {
    "gemma3n_text": Family(
        renamed=(
            Renaming(r"^model\.language_model\.", "model."),
            Renaming(
                r"^model\.language_model\.per_layer_model\.language_model_",
                "model.per_layer_model_",
            ),
        )
    ),
    "gpt_neox": Family(renamed=(Renaming(r"^embed_out$", "lm_head"),)),
}
"""Names as transformers 4 saves them."""

ENCODER_DECODER_HEAD: Final = Family(heads=("proj_out",))
OUTPUT_PROJECTION: Final = Family(heads=("output_projection",))
MODERNBERT: Final = Family(heads=("decoder", "head"))
XLM: Final = Family(heads=("pred_layer", "sequence_summary"))
ELECTRA: Final = Family(heads=("generator_lm_head",))
ZAMBA: Final = Family(
    keep=(KeptModules(r"\.shared_transf\.", SHARED),),
    heads=(
        "shared_transf",
        "shared_transf.self_attn.q_proj",
        "shared_transf.self_attn.k_proj",
        "shared_transf.self_attn.v_proj",
        "shared_transf.self_attn.o_proj",
        "shared_transf.feed_forward.gate_proj",
        "shared_transf.feed_forward.up_proj",
        "shared_transf.feed_forward.down_proj",
    ),
)

_NOT_ON_DISK: Final[Mapping[str, Family]] = {
    "gpt_neox_japanese": Family(heads=("embed_out",)),
    "biogpt": OUTPUT_PROJECTION,
    "trocr": OUTPUT_PROJECTION,
    "modernbert": MODERNBERT,
    "modernbert-decoder": MODERNBERT,
    "distilbert": Family(heads=("vocab_projector",)),
    "whisper": ENCODER_DECODER_HEAD,
    "canary": ENCODER_DECODER_HEAD,
    "cohere_asr": ENCODER_DECODER_HEAD,
    "moonshine": ENCODER_DECODER_HEAD,
    "granite_speech5_ctc": Family(heads=("ctc_head",)),
    "bark": Family(heads=("fine_acoustics.lm_heads",)),
    "xlm": XLM,
    "flaubert": XLM,
    "xlnet": Family(heads=("lm_loss", "sequence_summary", "logits_proj")),
    "qwen4_exp_text": Family(heads=("block_inject_weight",)),
    "lfm3_vl_vision": Family(heads=("patch_embed",)),
    "ultravbert": Family(heads=("projection_head",)),
    "zamba": ZAMBA,
    "shieldgemma2": Family(heads=("model.model.vision_tower", "model.model.multi_modal_projector")),
    "electra": ELECTRA,
    "convbert": ELECTRA,
    "luke": Family(heads=("entity_predictions",)),
}
"""Modules that are not on disk under their own name."""

DETECTOR: Final = Family(
    keep=(KeptModules(r"(bbox|class)_embed(\.|$)", TIED),),
    heads=("bbox_embed", "class_embed", "model.decoder.bbox_embed", "model.decoder.class_embed"),
)

_DETECTORS: Final[Mapping[str, Family]] = {
    "rf_detr": Family(
        keep=DETECTOR.keep,
        heads=(
            *DETECTOR.heads,
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
        ),
        renamed=(
            Renaming(r"^transformer\.", "model."),
            Renaming(r"^(model|transformer|segmentation_head)\.", ""),
            # with a segmentation head
            Renaming(r"^(bbox_embed|class_embed)", r"model.\1"),
            Renaming(r"^transformer\.", "model.model."),
        ),
    ),
    "grounding-dino": DETECTOR,
    "mm-grounding-dino": DETECTOR,
    "deformable_detr": DETECTOR,
    "d_fine": DETECTOR,
    "deimv2": DETECTOR,
    "rt_detr": DETECTOR,
    "rt_detr_v2": DETECTOR,
    "pp_doclayout_v3": DETECTOR,
    "lw_detr": DETECTOR,
    "pp_doclayout_v4": replace(
        DETECTOR,
        keep=(
            *DETECTOR.keep,
            KeptModules(
                r"(^|\.)decoder_(roor_)?(global_pointer|order_head)(\.|$)",
                "an output head",
            ),
        ),
        heads=(
            *DETECTOR.heads,
            "decoder.relative_order_head",
            "decoder.successor_order_head",
            "model.decoder.relative_order_head",
            "model.decoder.successor_order_head",
        ),
    ),
    "dab-detr": Family(
        keep=(KeptModules(r"^bbox_predictor\.", TIED),),
        heads=("model.decoder.bbox_embed",),
    ),
}
"""Object detectors share their box and class heads between the layers of the decoder. The attention
of RF-DETR is also taken apart when transformers 5 loads it.
"""

RENAMED_TOWERS: Final = Family(renames_towers=True)

_VISION: Final[Mapping[str, Family]] = {
    "blip-2": Family(keep=(KeptModules(r"^qformer\.", NEVER_QUANTIZED),)),
    "ernie4_5_vl_moe": RENAMED_TOWERS,
    "hunyuan_vl": RENAMED_TOWERS,
    "inkling2": RENAMED_TOWERS,
    "kimi_k25": RENAMED_TOWERS,
    "qianfan_ocr": RENAMED_TOWERS,
    "step3p7": RENAMED_TOWERS,
    "unlimited_ocr": RENAMED_TOWERS,
    # A vision part without a name of its own.
    "cosmos3_omni": Family(
        keep=(KeptModules(r"^(blocks|merger|deepstack_merger_list|patch_embed)\.", VISION),)
    ),
    "deepseek_ocr2": Family(
        keep=(KeptModules(r"(^|\.)(qwen2_model|sam_model|projector)\.", VISION),)
    ),
}
"""Vision parts that are never packed, or that have no name of their own."""

LLAMA4: Final = Family(splits_experts=True)
INKLING: Final = Family(float32=r"sconv")
AUDIO_CODEC: Final = Family(
    keep=(KeptModules(r"^(codec_model|audio_encoder)\.", "an audio codec"),)
)

_OTHERS: Final[Mapping[str, Family]] = {
    # Experts that load packed in transformers 4 and 5 alike, once they are split.
    "llama4": LLAMA4,
    "llama4_text": LLAMA4,
    # Weights in float32.
    "hy_v4": Family(float32=r"(weights_proj|k_norm|^lm_head)$"),
    "inkling_text": INKLING,
    "inkling_model": INKLING,
    "inkling2_text": Family(float32=r"sconv|convolution"),
    # These compute in float32 what they make sound of.
    "csm": AUDIO_CODEC,
    "kyutai_speech_to_text": AUDIO_CODEC,
    "moshi": AUDIO_CODEC,
    # Its head is called "output"; listed, that name would hit the output of every attention.
    "git": Family(linear=r"^output$"),
}
"""Families that deviate in a way of their own."""

MODEL_TYPES: Final[Mapping[str, Family]] = {
    **_TRANSPOSED,
    **_KEPT_BY_TRANSFORMERS,
    **_READ_ELSEWHERE,
    **_SPLIT_OR_MERGED,
    **_RENAMED,
    **_SAME_LAYERS,
    **_SAVED_BY_TRANSFORMERS_4,
    **_NOT_ON_DISK,
    **_DETECTORS,
    **_VISION,
    **_OTHERS,
}
"""The family of each model type."""
