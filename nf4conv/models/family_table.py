"""Lists the model families that deviate from the rules of choose/selection.py.

A family is listed only where names and shapes cannot tell. The key is config.json's model_type, or
for submodels of diffusers the class that "_class_name" names. Patterns are regular expressions,
searched in the path of a module on disk, which is a tensor's name without ".weight". An empty
pattern matches nothing. tests/architectures and tests/diffusers convert and load tiny models of
these families; how experts are stacked was read off transformers 5.23.
"""

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

GATE_UP: Final = ("gate_proj", "up_proj")
DOWN: Final = ("down_proj",)


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Describes one kind of tensor that holds the same projections of all experts of a layer.

    It has three dimensions.

    Attributes:
        end: the end of the name of such a tensor, from a dot on.
        experts: what stands in its place in the path below which single experts are numbered.
        projections: the projections in the tensor, in order; two of them are fused.
        is_transposed: True if each matrix is stored as [in, out].
        is_interleaved: True if the outputs of fused projections alternate; False if those of the
            first precede those of the second.
    """

    end: str
    experts: str
    projections: tuple[str, ...]
    is_transposed: bool = False
    is_interleaved: bool = False


class ExpertLayout(NamedTuple):
    """Describes how a family stacks its experts.

    Attributes:
        stacks: the kinds of tensors.
        fits_either_way: True if files of both orientations exist, and shapes tell which one it is.
    """

    stacks: tuple[ExpertStack, ...]
    fits_either_way: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """Lists the deviations of one model family from the general rules.

    Attributes:
        transposed: matches modules that store their weight as [in, out], as transformers' Conv1D
            does. They are packed as [out, in].
        linear: matches modules that are packed although their names speak against it.
        keep: matches modules that loaders do not take in 4 bits, although their names look it.
        renamed: patterns in a path on disk and what stands there in memory, with the meaning of
            `re.sub`, where loaders rename modules that are not packed.
        heads: modules that exist in memory but not on disk, because they are tied to others or
            merged from them. None of them is packed.
        float32: matches modules whose weights loaders want in float32, if they are stored so.
        splits_experts: True if experts that are stacked as [expert, in, out] are loaded as one
            `nn.Linear` each when they are packed.
        only_blocks: True if linear layers outside of the numbered blocks are kept.
        renames_towers: True if loaders know vision and audio parts by other names than those on
            disk. Nothing inside such a part could be told from the rest, so all of it is kept.
        experts: the layouts in which experts are stacked. The first that matches a tensor's name
            counts.
        has_single_experts: True if authors store the experts one by one; only other tools stack.
        stacks_alone: True if a model of its own stores its experts stacked and [out, in], as
            transformers 5 computes; as a part of another model it has single or transposed ones.
        has_uneven_experts: True if layers have experts of several kinds, or fewer than their
            routers know.
        counts_experts_twice: True if transformers 4 reads num_experts where 5 writes
            num_local_experts.
    """

    transposed: str = ""
    linear: str = ""
    keep: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    heads: tuple[str, ...] = ()
    float32: str = ""
    splits_experts: bool = False
    only_blocks: bool = False
    renames_towers: bool = False
    experts: tuple[ExpertLayout, ...] = ()
    has_single_experts: bool = False
    stacks_alone: bool = False
    has_uneven_experts: bool = False
    counts_experts_twice: bool = False


# --- experts --------------------------------------------------------------------------------------


def _layout(
    gate_up: str,
    down: str,
    experts: str = ".experts",
    *,
    is_transposed: bool = False,
    is_interleaved: bool = False,
    fits_either_way: bool = False,
) -> ExpertLayout:
    """Returns the layout of a family with a fused tensor and another for what follows."""
    stacks = (
        ExpertStack(gate_up, experts, GATE_UP, is_transposed, is_interleaved),
        ExpertStack(down, experts, DOWN, is_transposed),
    )
    return ExpertLayout(stacks, fits_either_way)


_FUSED: Final = (".experts.gate_up_proj", ".experts.down_proj")

STANDARD: Final = _layout(*_FUSED)
"""The layout of most models in transformers 5: [experts, out, in], gate before up."""

TRANSPOSED: Final = _layout(*_FUSED, is_transposed=True)
GPT_OSS: Final = _layout(*_FUSED, is_transposed=True, is_interleaved=True)
# repositories have [in, out], and what transformers 5 saves may have [out, in]
QWEN3_VL: Final = _layout(*_FUSED, is_transposed=True, fits_either_way=True)
GRANITE: Final = _layout(
    ".block_sparse_moe.input_linear.weight",
    ".block_sparse_moe.output_linear.weight",
    ".block_sparse_moe.experts",
)
ARIA: Final = _layout(".experts.fc1.weight", ".experts.fc2.weight", is_transposed=True)
# models that transformers saves without towers have the standard names instead
INKLING: Final = ExpertLayout(
    (
        ExpertStack(".experts.w13_weight", ".experts", GATE_UP, is_interleaved=True),
        ExpertStack(".experts.w2_weight", ".experts", DOWN),
    )
)
STEP: Final = ExpertLayout(
    tuple(ExpertStack(f".moe.{name}.weight", ".mlp.experts", (name,)) for name in (*GATE_UP, *DOWN))
)

# --- what several families share ------------------------------------------------------------------

QKV: Final = ("q_proj", "k_proj", "v_proj")


def _converted(on_disk: str, in_memory: tuple[str, ...]) -> Family:
    """Returns the family of projections that transformers 5 takes apart or puts together."""
    pattern = rf"(^|\.)({on_disk})$"
    renamed = tuple((f".*{pattern}", name) for name in in_memory)
    return Family(keep=pattern, renamed=renamed)


def _in_float32(names: str) -> Family:
    """Returns the family of a class that lists `names` as its _keep_in_fp32_modules.

    diffusers skips linear layers below a module of such a name when it quantizes.
    """
    return Family(keep=rf"({names})(\.|$)", float32=rf"(^|\.)({names})(\.|$)")


SINGLE: Final = Family(experts=(STANDARD,), has_single_experts=True)
"""Experts that transformers 5 computes with `use_experts_implementation` as it is by default."""

STACKED: Final = Family(experts=(STANDARD,))
RENAMED_TOWERS: Final = Family(renames_towers=True)
BLOCK_SPARSE: Final = replace(SINGLE, renamed=((r"\.block_sparse_moe\.", ".mlp."),))
# object detectors share their box and class heads between the layers of the decoder
DETECTOR: Final = Family(
    keep=r"(bbox|class)_embed(\.|$)",
    heads=("bbox_embed", "class_embed", "model.decoder.bbox_embed", "model.decoder.class_embed"),
)
LLAMA4: Final = Family(splits_experts=True, experts=(TRANSPOSED,))

FAMILIES: Final[dict[str, Family]] = {}
"""The family of each model_type, and of each class of diffusers."""


def _add(names: str, base: Family = Family(), **changes: Any) -> None:
    FAMILIES.update(dict.fromkeys(names.split(), replace(base, **changes)))


# Conv1D stores [in, out]
_add(
    "gpt2 openai-gpt imagegpt decision_transformer clvp_decoder",
    transposed=r"(^|\.)h\.\d+\.(attn|crossattention|mlp)\.(c_attn|q_attn|c_proj|c_fc)$",
)
# of `wo` the weight is read outside of the module; transformers itself keeps T5's out of 4 bits
_add("t5 mt5 umt5 udop pop2piano longt5", keep=r"(^|\.)wo$")
_add("switch_transformers pix2struct kosmos-2.5", keep=r"(^|\.)wo$")
_add("axk2", SINGLE, renamed=((r"W_down$", "mlp.fc1"), (r"W_up$", "mlp.fc2")))
_add(
    "deepseek_v4",
    SINGLE,
    # never quantized, and an nn.Linear subclass
    keep=r"compressor\.(wgate|wkv)$|\.wo_a$",
    renamed=((r".*\.wgate$", "compressor.gate_proj"), (r".*\.wo_a$", "o_a_proj")),
)
_add("blip-2", keep=r"^qformer\.")
# packed, these weights would be cast to another dtype, or computed with as the bytes they are
_add(
    "colpali colqwen2 colmodernvbert",
    keep=r"(^|\.)embedding_proj_layer$",
    # as transformers 5.0 has them
    heads=("vlm.model.vision_tower", "vlm.model.visual", "vlm.model.multi_modal_projector"),
)
_add("neomme", keep=r"(^|\.)proj$", heads=("unembedding_projection",))
_add("wavlm", keep=r"(^|\.)attention\.(q|k|v|out)_proj$")
_add("falcon RefinedWeb RefinedWebModel", keep=r"(self_attention|mlp)\.")
_add("ibert", keep=r"(^|\.)encoder\.")
# transformers 5 takes these weights apart or merges them when it loads them
_add("nomic_bert jina_embeddings_v3", _converted("Wqkv", QKV))
_add("gte", _converted("qkv_proj|up_gate_proj", QKV + GATE_UP))
_add("hrm_text", _converted("gqkv_proj|gate_up_proj", QKV + GATE_UP))
_add("molmo2_text", _converted("att_proj|ff_proj", QKV + GATE_UP))
_add("tipsv2_vision_model", _converted("qkv|w12", QKV + GATE_UP))
_add(
    "tipsv2_dpt",
    renamed=(
        (r"^\w+_head\.reassemble\.", "neck.reassemble_stage."),
        (r"^\w+_head\.\w+_head$", "decoder.head"),
    ),
)
_add("tipsv2_text_model", heads=(*QKV, "self_attn.out_proj"))
_add("sapiens2", _converted("w12", GATE_UP))
_add("radio", _converted("qkv", QKV), heads=("embeddings.patch_projection",))
_add("gradium_phonon_tts", _converted("in_proj", QKV))
_add("nemo_speechlm", _converted("w_qkv", QKV))
_add("minimax_m3_vl", _converted(r"shared_experts\.(gate|up)_proj", ("gate_up_proj",)))
# transformers 5 renames these modules
_add("phimoe mixtral minimax minimax_m2", BLOCK_SPARSE)
_add(
    "bailing_hybrid",
    SINGLE,
    float32=r"conv1d$",
    renamed=(
        (r"\.attention\.(f_proj)$", r".self_attn.forget_gate.\1"),
        (r"\.attention\.", ".self_attn."),
    ),
)
_add("lfm3", renamed=((r"\.self_attn\.gate_proj$", ".self_attn.g_proj"),))
_add("nemotron_h", renamed=((r"(^|\.)backbone\.", r"\1model."), (r"^(backbone|model)\.", "")))
_add("qwen2_5_omni", renamed=((r"^thinker\.(visual|audio_tower)(\.|$)", r"thinker.model.\1\2"),))
_add("pi0", renamed=((r"^paligemma_with_expert\.paligemma\.model\.", "model.vlm."),))
_add("hyperclovax_vision_v2", renamed=((r"^model\.vision_projector$", "model.projector"),))
# the encoder has the decoder's layers, and they are not on disk as its own; skipping "encoder"
# as a whole would skip them
_add(
    "diffusion_gemma", renamed=((r"(^|\.)decoder\.layers\.", r"\1encoder.language_model.layers."),)
)
_add("sam3_tracker sam3_video", renamed=((r"^tracker_model\.", ""),))
# names as transformers 4 saves them
_add(
    "gemma3n_text",
    renamed=(
        (r"^model\.language_model\.", "model."),
        (r"^model\.language_model\.per_layer_model\.language_model_", "model.per_layer_model_"),
    ),
)
# modules that are not on disk under their own name
_add("gpt_neox_japanese", heads=("embed_out",))
_add("biogpt trocr", heads=("output_projection",))
_add("modernbert modernbert-decoder", heads=("decoder", "head"))
_add("distilbert", heads=("vocab_projector",))
_add("whisper canary cohere_asr moonshine", heads=("proj_out",))
_add("granite_speech5_ctc", heads=("ctc_head",))
_add("bark", heads=("fine_acoustics.lm_heads",))
_add("xlm flaubert", heads=("pred_layer", "sequence_summary"))
_add("xlnet", heads=("lm_loss", "sequence_summary", "logits_proj"))
_add("qwen4_exp_text", SINGLE, heads=("block_inject_weight",))
_add("lfm3_vl_vision", heads=("patch_embed",))
_add("ultravbert", heads=("projection_head",))
_add(
    "zamba",
    keep=r"\.shared_transf\.",
    heads=(
        "shared_transf",
        *(f"shared_transf.self_attn.{name}" for name in (*QKV, "o_proj")),
        *(f"shared_transf.feed_forward.{name}" for name in (*GATE_UP, *DOWN)),
    ),
)
_add("shieldgemma2", heads=("model.model.vision_tower", "model.model.multi_modal_projector"))
_add("electra convbert", heads=("generator_lm_head",))
_add("luke", heads=("entity_predictions",))
# the attention of RF-DETR is also taken apart when transformers 5 loads it
_add(
    "rf_detr",
    DETECTOR,
    heads=(*DETECTOR.heads, *(f"self_attn.{name}" for name in QKV)),
    renamed=(
        (r"^transformer\.", "model."),
        (r"^(model|transformer|segmentation_head)\.", ""),
        # with a segmentation head
        (r"^(bbox_embed|class_embed)", r"model.\1"),
        (r"^transformer\.", "model.model."),
    ),
)
_add("grounding-dino mm-grounding-dino deformable_detr d_fine deimv2 rt_detr rt_detr_v2", DETECTOR)
_add("pp_doclayout_v3 lw_detr", DETECTOR)
_add(
    "pp_doclayout_v4",
    DETECTOR,
    keep=rf"{DETECTOR.keep}|(^|\.)decoder_(roor_)?(global_pointer|order_head)(\.|$)",
    heads=(
        *DETECTOR.heads,
        "decoder.relative_order_head",
        "decoder.successor_order_head",
        "model.decoder.relative_order_head",
        "model.decoder.successor_order_head",
    ),
)
_add("dab-detr", keep=r"^bbox_predictor\.", heads=("model.decoder.bbox_embed",))
# vision and audio parts that are renamed, or have no name of their own
_add("hunyuan_vl kimi_k25 mistral_large4 molmo2", RENAMED_TOWERS)
_add("nemotron_h_omni qianfan_ocr unlimited_ocr", RENAMED_TOWERS)
_add("ernie4_5_vl_moe", RENAMED_TOWERS, has_uneven_experts=True)
_add("inkling2", RENAMED_TOWERS, experts=(INKLING, STANDARD))
_add("step3p7", RENAMED_TOWERS, experts=(STEP,))
_add(
    "cosmos3_omni",
    keep=r"^(blocks|merger|deepstack_merger_list|patch_embed)\.",
)
_add("deepseek_ocr2", keep=r"(^|\.)(qwen2_model|sam_model|projector)\.")
# these compute in float32 what they make sound of
_add("csm kyutai_speech_to_text moshi", keep=r"^(codec_model|audio_encoder)\.")
# its head is called "output"; listed, that name would hit the output of every attention
_add("git", linear=r"^output$")
# experts that are stored one by one
_add("afmoe axk1 beam cohere2_moe deepseek_ocr2_text deepseek_v2 deepseek_v3 dots1", SINGLE)
_add("deepseek_v32 glm_moe_dsa mistral_large4_text", SINGLE)
_add("dots3_note_text ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite", SINGLE)
_add("glm5_next_text hunyuan_v1_moe hy_v3 jamba kimi_linear kolibri1 laguna lfm2_moe", SINGLE)
_add("mellum mimo_v2_flash olmoe qwen2_moe qwen3_5_moe_text qwen3_next", SINGLE)
_add("qwen3_omni_moe_text solar_open unlimited_ocr_text", SINGLE)
_add("qwen3_moe qwen3_omni_moe_talker_text", SINGLE, counts_experts_twice=True)
_add("glm4v_moe_text minimax_m3_vl_text", SINGLE, stacks_alone=True)
_add("ernie4_5_vl_moe_text longcat_flash", has_uneven_experts=True)
# experts that authors store as stacks
_add("diffusion_gemma_text gemma4_text granitemoe_swa mistral4 muse_spark_text zaya", STACKED)
_add("hy_v4", STACKED, float32=r"(weights_proj|k_norm|^lm_head)$")
_add("voxtral_encoder", float32=r"embed_positions$")
_add("openai_privacy_filter", experts=(TRANSPOSED,))
# load packed in transformers 4 and 5 alike, once they are split
_add("llama4 llama4_text", LLAMA4)
_add("qwen3_vl_moe", experts=(QWEN3_VL,))
_add("qwen3_vl_moe_text", experts=(QWEN3_VL,), stacks_alone=True, counts_experts_twice=True)
_add("granitemoe granitemoehybrid granitemoeshared", experts=(GRANITE, STANDARD))
_add("inkling_mm_model", experts=(INKLING, STANDARD))
_add("inkling_model", float32=r"sconv")
_add("inkling_text", float32=r"sconv", experts=(INKLING, STANDARD))
_add("inkling2_text", float32=r"sconv|convolution", experts=(INKLING, STANDARD))
_add("aria aria_text", experts=(ARIA, TRANSPOSED))
_add("step3p5", experts=(STEP,))
_add("gpt_oss", experts=(GPT_OSS,))
# Submodels of diffusers. Every one has the first key in its config, with its class as value;
# experts of theirs are one nn.Linear each, as in HiDream
_add("_class_name", only_blocks=True, linear=r"\.experts\.\d+\.")
_add(
    "AnyFlowTransformer3DModel AnyFlowFARTransformer3DModel ChronoEditTransformer3DModel "
    "SkyReelsV2Transformer3DModel WanTransformer3DModel WanVACETransformer3DModel",
    _in_float32("rope|time_embedder|scale_shift_table|norm1|norm2|norm3"),
)
_add("Cosmos3OmniTransformer", _in_float32("time_embedder"))
_add("Flux3Transformer2DModel", _in_float32("norm_q|norm_k"))
_add(
    "HeliosTransformer3DModel",
    _in_float32("time_embedder|scale_shift_table|norm1|norm2|norm3|history_key_scale"),
)
_add(
    "JoyImageEditTransformer3DModel JoyImageEditPlusTransformer3DModel",
    _in_float32("time_embedder|norm1|norm2|norm_out"),
)
_add(
    "Kandinsky5Transformer3DModel Kandinsky6Transformer3DModel Kandinsky6SRTransformer3DModel",
    _in_float32(r"time_embeddings|pooled_bias|\w*modulation"),
)
_add(
    "Krea2Transformer2DModel",
    _in_float32("norm|norm1|norm2|norm_q|norm_k"),
    linear=r"\.ff\.gate$",  # of a gated feed-forward network: no router
)
_add(
    "MiniMaxH3Transformer3DModel",
    _in_float32("proj_in|audio_proj_in|time_embedder|proj_out|audio_proj_out|rope"),
)
_add("RFD4ProteinaTransformer", _in_float32("cond_factory|norm|ln_out"))
_add(
    "UNet2DModel",
    keep=r"\.(query|key|value|proj_attn)$",
    renamed=(
        (r"\.query$", ".to_q"),
        (r"\.key$", ".to_k"),
        (r"\.value$", ".to_v"),
        (r"\.proj_attn$", ".to_out.0"),
    ),
)
_add(
    "WanAnimateTransformer3DModel",
    _in_float32("rope|time_embedder|scale_shift_table|norm1|norm2|norm3|motion_synthesis_weight"),
)
_add(
    "WanAnimate2Transformer3DModel",
    _in_float32("time_embedding|time_projection|scale_shift_table|norm1|norm2|norm3|modulation"),
)
