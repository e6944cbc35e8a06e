"""Decides by name, shape and config which tensors are packed and which are kept."""

from pathlib import Path

import pytest

from nf4conv.choose.decisions import Keep, Pack
from nf4conv.choose.evidence import Why
from nf4conv.choose.loader_rules import transformers_5, vllm
from nf4conv.choose.selection import select
from nf4conv.options import QuantizeOptions
from nf4conv.sources.tensors import TensorInfo


def tensors(**shapes: tuple[int, ...]) -> list[TensorInfo]:
    """Tensors by name; `__` stands for a dot."""
    return [tensor(name.replace("__", "."), shape) for name, shape in shapes.items()]


def tensor(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> TensorInfo:
    count = 4 if dtype == "F32" else 2
    for size in shape:
        count *= size
    return TensorInfo(name, dtype, shape, Path("model.safetensors"), 0, count)


def packed(selection) -> list[str]:
    return [
        matrix.name
        for decision in selection.decisions.values()
        if isinstance(decision, Pack)
        for matrix in decision.matrices
    ]


LLAMA = [
    tensor("model.embed_tokens.weight", (1000, 64)),
    *(
        tensor(f"model.layers.{layer}.{module}.weight", shape)
        for layer in range(2)
        for module, shape in (
            ("self_attn.q_proj", (64, 64)),
            ("self_attn.o_proj", (64, 64)),
            ("mlp.up_proj", (128, 64)),
            ("mlp.down_proj", (64, 128)),
            ("input_layernorm", (64,)),
        )
    ),
    tensor("model.norm.weight", (64,)),
    tensor("lm_head.weight", (1000, 64)),
]
LLAMA_CONFIG = {"model_type": "llama", "vocab_size": 1000, "num_hidden_layers": 2}
EXTRA_LAYER = "a layer beyond the model's, for predicting several tokens"
FAMILY = Why.FAMILY
TOWER = "in a vision or audio part"
LLAMA_PACKED = [info.name for info in LLAMA if "_proj" in info.name]


def test_the_linear_layers_of_a_language_model_are_packed_and_nothing_else():
    selection = select(LLAMA, LLAMA_CONFIG, QuantizeOptions())
    assert packed(selection) == LLAMA_PACKED
    assert list(selection.decisions) == [info.name for info in LLAMA], (
        "a decision for every tensor, in order"
    )
    assert "lm_head" in selection.skip_modules


def test_a_tied_head_is_listed_though_it_is_not_on_disk():
    selection = select(LLAMA[:-1], {**LLAMA_CONFIG, "tie_word_embeddings": True}, QuantizeOptions())
    assert "lm_head" in selection.skip_modules


@pytest.mark.parametrize(
    ("name", "shape", "config", "reason"),
    [
        ("transformer.wte.weight", (64, 64), {}, "an embedding"),
        ("transformer.wpe.weight", (64, 64), {}, "an embedding"),
        ("embeddings.token_type_embeddings.weight", (2, 64), {}, "an embedding"),
        ("shared.weight", (64, 64), {}, "an embedding"),
        (
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            (32, 8),
            {},
            "an embedding",
        ),
        ("model.layers.0.embed_tokens_per_layer.weight", (64, 64), {}, "an embedding"),
        ("odd_name.weight", (1000, 64), {"vocab_size": 1000}, "an output head"),
        ("gpt_neox.embed_out.weight", (1000, 64), {}, "an output head"),
        ("classifier.dense.weight", (64, 64), {}, "an output head"),
        ("model.layers.0.mlp.gate.weight", (128, 64), {}, "a router"),
        ("model.layers.0.block_sparse_moe.gate.weight", (8, 64), {}, "a router"),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 64), {}, "a router"),
        ("model.layers.0.mixer.conv1d.weight", (64, 1, 4), {}, "a convolution or another tensor"),
        (
            "model.layers.0.self_attn.in_proj_weight",
            (192, 64),
            {},
            "a bare parameter, not a module's weight",
        ),
        ("odd_projection.weight", (64, 64), {}, "unsure: outside the layers and without a bias"),
        ("model.layers.0.self_attn.beta.weight", (16, 64), {}, "fewer than 32 rows"),
        ("model.layers.2.mlp.up_proj.weight", (64, 64), LLAMA_CONFIG, EXTRA_LAYER),
        ("mtp.fc.weight", (64, 64), {}, EXTRA_LAYER),
        (
            "encoder.block.0.layer.1.DenseReluDense.wo.weight",
            (64, 64),
            {"model_type": "t5"},
            FAMILY,
        ),
        ("transformer.h.0.mlp.dense_h_to_4h.weight", (64, 64), {"model_type": "falcon"}, FAMILY),
        ("vision_tower.layers.0.fc1.weight", (64, 64), {"text_config": {}}, TOWER),
    ],
)
def test_what_is_kept_and_why(name, shape, config, reason):
    selection = select([tensor(name, shape)], config, QuantizeOptions())
    assert selection.decisions[name].reason == reason


def test_the_pooler_of_a_bare_bert_is_packed_and_its_embeddings_are_not():
    source = tensors(
        embeddings__word_embeddings__weight=(30522, 384),
        embeddings__position_embeddings__weight=(512, 384),
        encoder__layer__0__attention__self__query__weight=(384, 384),
        encoder__layer__0__attention__self__query__bias=(384,),
        pooler__dense__weight=(384, 384),
        pooler__dense__bias=(384,),
    )
    selection = select(
        source, {"architectures": ["BertModel"], "vocab_size": 30522}, QuantizeOptions()
    )
    assert packed(selection) == [
        "encoder.layer.0.attention.self.query.weight",
        "pooler.dense.weight",
    ]


def test_conv1d_is_transposed():
    name = "transformer.h.0.attn.c_attn.weight"
    selection = select([tensor(name, (64, 192))], {"model_type": "gpt2"}, QuantizeOptions())
    (matrix,) = selection.decisions[name].matrices
    assert (matrix.shape, matrix.transpose) == ((192, 64), True)


def test_an_unlisted_family_with_transposed_weights_is_kept_not_packed_wrongly():
    name = "layers.0.c_attn"
    selection = select(
        [tensor(f"{name}.weight", (64, 192)), tensor(f"{name}.bias", (192,))], {}, QuantizeOptions()
    )
    assert selection.decisions[f"{name}.weight"].reason == "unsure: its bias has shape [192]"


MOE = [
    tensor("model.layers.0.self_attn.q_proj.weight", (64, 64)),
    tensor("model.layers.0.mlp.gate.weight", (4, 64)),
    *(
        tensor(f"model.layers.0.mlp.experts.{expert}.up_proj.weight", (64, 64))
        for expert in range(4)
    ),
    tensor("model.layers.0.mlp.shared_expert.up_proj.weight", (64, 64)),
]


def test_experts_stay_in_16_bits_if_the_user_says_so():
    selection = select(MOE, {"model_type": "qwen2_moe"}, QuantizeOptions(moe="portable"))
    assert packed(selection) == [MOE[0].name, MOE[-1].name]
    assert {"model.layers.0.mlp.experts", "model.layers.0.mlp.gate"} <= set(selection.skip_modules)
    assert any("--moe packed" in note for note in selection.notes)


@pytest.mark.parametrize("width", [64, 512])
def test_experts_are_packed_by_default_if_they_take_most_bytes(width: int):
    source = [MOE[0]._replace(shape=(width, width), stop=2 * width**2), *MOE[1:]]
    selection = select(source, {"model_type": "qwen2_moe"}, QuantizeOptions())
    assert len(packed(selection)) == (6 if width == 64 else 2)
    assert any("--moe portable" in note for note in selection.notes) is (width == 64)


def test_per_expert_packs_experts_but_never_routers():
    selection = select(MOE, {"model_type": "qwen2_moe"}, QuantizeOptions(moe="packed"))
    assert len(packed(selection)) == 6
    assert selection.decisions["model.layers.0.mlp.gate.weight"] == Keep(Why.ROUTER, is_linear=True)
    assert "model.layers.0.mlp.gate" in selection.skip_modules
    assert ["vLLM" in note for note in selection.notes] == [True]


def test_what_is_kept_in_a_layer_is_listed_for_auto_model_too():
    selection = select(MOE, {"model_type": "qwen2_moe"}, QuantizeOptions(moe="packed"))
    assert {"model.layers.0.mlp.gate", "layers.0.mlp.gate"} <= set(selection.skip_modules)


@pytest.mark.parametrize(
    "leaf", ["gate", "router", "router.proj", "router.layer", "gate.wg", "shared_expert_gate"]
)
def test_routers_of_many_experts_are_kept(leaf):
    router = tensor(f"model.layers.0.mlp.{leaf}.weight", (128, 64))
    selection = select([*LLAMA, router], LLAMA_CONFIG, QuantizeOptions())
    assert selection.decisions[router.name] == Keep(Why.ROUTER, is_linear=True)


def test_the_encoder_that_shares_the_decoders_layers_is_not_skipped_as_a_whole():
    source = [
        tensor("model.decoder.layers.0.mlp.up_proj.weight", (128, 64)),
        tensor("model.encoder.vision_tower.layers.0.fc1.weight", (64, 64)),
    ]
    config = {"model_type": "diffusion_gemma", "text_config": {}, "vision_config": {}}
    selection = select(source, config, QuantizeOptions())
    assert not transformers_5(selection.skip_modules)(
        "model.encoder.language_model.layers.0.mlp.up_proj"
    )
    assert transformers_5(selection.skip_modules)("model.encoder.vision_tower.layers.0.fc1")


def test_mixtral_is_listed_under_the_names_of_transformers_4_and_5():
    source = [
        tensor("model.layers.0.self_attn.q_proj.weight", (64, 64)),
        tensor("model.layers.0.block_sparse_moe.experts.0.w1.weight", (64, 64)),
    ]
    selection = select(source, {"model_type": "mixtral"}, QuantizeOptions())
    assert {"model.layers.0.block_sparse_moe", "model.layers.0.mlp"} <= set(selection.skip_modules)


def test_llama_4_experts_are_split_transposed_and_named_as_loaders_expect():
    prefix = "language_model.model.layers.0.feed_forward.experts"
    source = [
        tensor(f"{prefix}.gate_up_proj", (2, 64, 256)),
        tensor(f"{prefix}.down_proj", (2, 128, 64)),
    ]
    selection = select(source, {"model_type": "llama4", "text_config": {}}, QuantizeOptions())
    matrices = [matrix for decision in selection.decisions.values() for matrix in decision.matrices]
    assert [
        (m.name.removeprefix(prefix), m.shape, m.transpose, m.expert, m.columns) for m in matrices
    ] == [
        (".0.gate_proj.weight", (128, 64), True, 0, (0, 128)),
        (".0.up_proj.weight", (128, 64), True, 0, (128, 256)),
        (".1.gate_proj.weight", (128, 64), True, 1, (0, 128)),
        (".1.up_proj.weight", (128, 64), True, 1, (128, 256)),
        (".0.down_proj.weight", (64, 128), True, 0, (0, 64)),
        (".1.down_proj.weight", (64, 128), True, 1, (0, 64)),
    ]


@pytest.mark.parametrize(
    ("leaf", "beside", "reason"),
    [
        ("up_proj", ("up_proj.bias", (3,)), "unsure: its bias has shape [3]"),
        ("out_proj", ("D", (64,)), "state-space kernels read this weight directly"),
        (
            "out_proj",
            ("in_proj_weight", (64, 64)),
            "nn.MultiheadAttention reads this weight directly",
        ),
    ],
)
def test_experts_are_decided_alike_unless_what_is_beside_them_differs(leaf, beside, reason):
    experts = [f"model.layers.0.mlp.experts.{number}" for number in range(4)]
    weights = [tensor(f"{expert}.{leaf}.weight", (64, 64)) for expert in experts]
    weights[3] = tensor(weights[3].name, (8, 64))
    options = QuantizeOptions(moe="packed", exclude=("*.experts.2.*",))
    alike = select(weights, {}, options)
    assert packed(alike) == [weights[0].name, weights[1].name]
    assert alike.decisions[weights[2].name].reason == "excluded by the user"
    assert alike.decisions[weights[3].name].reason == "fewer than 32 rows"
    name, shape = beside
    differing = select([*weights, tensor(f"{experts[1]}.{name}", shape)], {}, options)
    assert packed(differing) == [weights[0].name]
    assert differing.decisions[weights[1].name].reason == reason


VLM = [
    tensor("language_model.model.layers.0.mlp.up_proj.weight", (64, 64)),
    tensor("language_model.lm_head.weight", (1000, 64)),
    tensor("vision_tower.layers.0.fc1.weight", (64, 64)),
    tensor("multi_modal_projector.linear_1.weight", (64, 64)),
]


def test_vision_parts_are_kept_and_listed_in_every_spelling():
    selection = select(VLM, {"model_type": "llava", "text_config": {}}, QuantizeOptions())
    assert packed(selection) == [VLM[0].name]
    assert {"lm_head", "vision_tower", "model.vision_tower", "model.multi_modal_projector"} <= set(
        selection.skip_modules
    )


def test_an_old_multimodal_config_without_a_part_for_words_is_recognised_by_its_part_for_pictures():
    source = [
        tensor("model.layers.0.mlp.up_proj.weight", (64, 64)),
        tensor("visual.blocks.0.mlp.fc1.weight", (64, 64)),
    ]
    selection = select(
        source,
        {"model_type": "qwen2_vl", "vocab_size": 1000, "vision_config": {}},
        QuantizeOptions(),
    )
    assert packed(selection) == [source[0].name]
    assert {"visual", "model.visual"} <= set(selection.skip_modules)


def test_towers_that_are_included_are_packed():
    selection = select(
        VLM, {"model_type": "llava", "text_config": {}}, QuantizeOptions(include=("*",))
    )
    assert VLM[2].name in packed(selection)
    assert "vision_tower" not in selection.skip_modules


def test_included_towers_keep_what_may_be_an_embedding_of_any_name():
    rows = "vision_tower.row_embedder.weight"
    source = [*VLM, tensor(rows, (64, 64))]
    selection = select(
        source, {"model_type": "llava", "text_config": {}}, QuantizeOptions(include=("*",))
    )
    assert VLM[2].name in packed(selection)
    assert rows not in packed(selection)
    assert "vision_tower.row_embedder" in selection.skip_modules


def test_a_dual_encoder_is_no_multimodal_language_model():
    config = {"model_type": "clip", "text_config": {}, "vision_config": {}}
    selection = select(
        [tensor("vision_model.encoder.layers.0.mlp.fc1.weight", (64, 64))],
        config,
        QuantizeOptions(),
    )
    assert len(packed(selection)) == 1


def test_include_restricts_and_exclude_adds():
    only = select(LLAMA, LLAMA_CONFIG, QuantizeOptions(include=("*.layers.0.*",)))
    assert packed(only) == LLAMA_PACKED[:4]
    without = select(
        LLAMA, LLAMA_CONFIG, QuantizeOptions(exclude=("*.down_proj.*", "model.layers.1.mlp.*"))
    )
    assert packed(without) == [*LLAMA_PACKED[:3], *LLAMA_PACKED[4:6]]
    assert {"model.layers.0.mlp.down_proj", "model.layers.1.mlp"} <= set(without.skip_modules)


def test_include_packs_what_the_rule_is_unsure_of_but_never_an_embedding():
    source = tensors(odd_projection__weight=(64, 64), model__embed_tokens__weight=(64, 64))
    assert packed(select(source, {}, QuantizeOptions())) == []
    assert packed(select(source, {}, QuantizeOptions(include=("*",)))) == ["odd_projection.weight"]


def test_a_packed_module_whose_name_ends_like_a_kept_one_is_kept_too():
    source = tensors(
        pre_classifier__weight=(64, 64),
        pre_classifier__bias=(64,),
        classifier__weight=(64, 64),
        classifier__bias=(64,),
    )
    selection = select(source, {"model_type": "distilbert"}, QuantizeOptions())
    assert selection.decisions["pre_classifier.weight"].reason.startswith(
        "a loader could not tell its name"
    )


@pytest.mark.parametrize(
    ("name", "dtype", "keep"),
    [
        ("model.layers.0.mlp.gate.e_score_correction_bias", "F32", True),
        ("model.layers.0.mixer.A_log", "F32", True),
        ("model.layers.0.mlp.gate.weight", "F32", True),
        ("model.layers.0.mlp.gate.weight", "BF16", False),
        ("model.norm.weight", "F32", False),
    ],
)
def test_only_what_is_float32_by_design_escapes_the_cast(name, dtype, keep):
    shape = (4, 64) if name.endswith("gate.weight") else (4,)
    decisions = select([*LLAMA, tensor(name, shape, dtype)], {}, QuantizeOptions()).decisions
    assert decisions[name].keep_dtype is keep


def test_a_diffusion_transformer_is_packed_in_its_blocks():
    source = tensors(
        x_embedder__weight=(64, 64),
        x_embedder__bias=(64,),
        time_text_embed__timestep_embedder__linear_1__weight=(64, 64),
        time_text_embed__timestep_embedder__linear_1__bias=(64,),
        transformer_blocks__0__attn__to_q__weight=(64, 64),
        transformer_blocks__0__attn__to_q__bias=(64,),
        transformer_blocks__0__attn__to_out__0__weight=(64, 64),
        single_transformer_blocks__0__proj_out__weight=(64, 128),
        single_transformer_blocks__0__proj_out__bias=(64,),
        norm_out__linear__weight=(128, 64),
        norm_out__linear__bias=(128,),
        proj_out__weight=(64, 64),
        proj_out__bias=(64,),
    )
    selection = select(source, {"_class_name": "FluxTransformer2DModel"}, QuantizeOptions())
    assert packed(selection) == [
        "transformer_blocks.0.attn.to_q.weight",
        "transformer_blocks.0.attn.to_out.0.weight",
        "single_transformer_blocks.0.proj_out.weight",
        "proj_out.weight",
    ]
    assert {"x_embedder", "time_text_embed", "norm_out"} <= set(selection.skip_modules)


@pytest.mark.parametrize(
    ("denoiser", "name", "is_packed"),
    [
        ("SD3Transformer2DModel", "proj_out", False),  # none in the blocks: it can be listed
        ("FluxTransformer2DModel", "blocks.0.proj_out", True),
        ("HiDreamImageTransformer2DModel", "blocks.0.ff_i.experts.1.w1", True),
        ("HiDreamImageTransformer2DModel", "blocks.0.ff_i.gate", False),
        ("Krea2Transformer2DModel", "blocks.0.ff.gate", True),
        ("Kandinsky5Transformer3DModel", "blocks.0.text_modulation.out_layer", False),
        ("DiTTransformer2DModel", "blocks.0.norm1.emb.class_embedder.embedding_table", False),
        ("UNet2DModel", "down_blocks.0.attentions.0.query", False),
    ],
)
def test_what_diffusers_cannot_load_packed_is_kept(denoiser, name, is_packed):
    blocks = [
        tensor("blocks.0.attn1.to_q.weight", (64, 64)),
        tensor("blocks.0.attn1.to_q.bias", (64,)),
    ]
    selection = select(
        [*blocks, tensor(f"{name}.weight", (64, 64))], {"_class_name": denoiser}, QuantizeOptions()
    )
    assert packed(selection) == ["blocks.0.attn1.to_q.weight"] + [f"{name}.weight"] * is_packed


def test_what_diffusers_keeps_in_float32_is_not_cast():
    source = [
        tensor("blocks.0.attn1.to_q.weight", (64, 64)),
        tensor("condition_embedder.time_embedder.linear_1.weight", (64, 64), "F32"),
        tensor("blocks.0.scale_shift_table", (1, 6, 64), "F32"),
        tensor("blocks.0.attn1.norm_q.weight", (64,), "F32"),
    ]
    decisions = select(
        source, {"_class_name": "WanTransformer3DModel"}, QuantizeOptions()
    ).decisions
    assert [
        decision.keep_dtype for decision in decisions.values() if isinstance(decision, Keep)
    ] == [True, True, False]


def test_fused_modules_are_listed_for_vllm_and_split_ones_noted():
    names = [
        f"model.layers.0.{name}.weight"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    ]
    names += ["model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.gate_proj.weight"]
    names += ["model.layers.0.mlp.up_proj.weight"]
    tensors = [tensor(name, (64, 64)) for name in names]
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    found = select(
        tensors,
        config,
        QuantizeOptions(exclude=("*.q_proj.*", "*.k_proj.*", "*.v_proj.*", "*.up_proj.*")),
    )
    assert "model.layers.0.self_attn.qkv_proj" in found.skip_modules
    assert "model.layers.0.mlp.gate_up_proj" not in found.skip_modules
    [note] = [note for note in found.notes if "vLLM" in note]
    assert "model.layers.0.mlp.gate_up_proj" in note
    assert vllm(found.skip_modules)("model.layers.0.self_attn.qkv_proj")


def test_a_narrow_proj_out_is_packed_because_its_name_cannot_be_told_from_those_in_the_blocks():
    source = tensors(
        single_transformer_blocks__0__proj_out__weight=(64, 128),
        proj_out__weight=(16, 64),
    )
    selection = select(source, {"_class_name": "FluxTransformer2DModel"}, QuantizeOptions())
    assert packed(selection) == ["single_transformer_blocks.0.proj_out.weight", "proj_out.weight"]
