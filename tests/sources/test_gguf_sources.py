"""GGUF files come back as the checkpoints that llama.cpp's converter made them from.

Hugging Face → GGUF → Hugging Face, for every family (`make test-others`).
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import assert_same_tensors, save_model, tensors_of
from gguf_families import (
    FAMILIES,
    MIXTURE,
    NEEDS_CONVERTER,
    ROUTED,
    SMALL,
    assert_equal_in_bfloat16,
    class_of,
    convert,
    convert_all,
    decoded_by_gguf,
    write_model,
)
from tokenizers import Tokenizer, pre_tokenizers

import nf4conv
from nf4conv.errors import SourceError, UndecodableError
from nf4conv.sources.gguf.families import architectures, families_of
from nf4conv.sources.opening import open_source

pytestmark = NEEDS_CONVERTER
CPU = {"device": "cpu"}

# what the converter does not put into the file
_POOLER = {"pooler.dense.weight", "pooler.dense.bias"}
LEFT_OUT = {"BertModel": _POOLER, "CamembertModel": _POOLER}
# classes of which no config.json is made; CamemBERT is read as BERT
NEED_CONFIG = {"CamembertModel"} | {
    family.architecture
    for name in architectures()
    for family in families_of(name)
    if family.needs_config
}
# the class of the model that the metadata alone stands for, which computes the same
STANDS_FOR = {"Glm4MoeLiteForCausalLM": "DeepseekV3ForCausalLM"}


@pytest.fixture(scope="session")
def converted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """The folder of each model that a test asks for, and the GGUF file of it."""
    folder = tmp_path_factory.mktemp("families")
    here = [item for item in request.session.items if item.path == Path(__file__)]
    asked = [getattr(item, "callspec", None) for item in here]
    families = [spec.params["family"] for spec in asked if spec and "family" in spec.params]
    sources = []
    for family in families:
        place = folder / family.replace(":", "-")
        sources.append(write_model(place, family, torch.bfloat16))
    files = convert_all(sources, "bf16")
    return dict(zip(families, zip(sources, files, strict=True), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_comes_back(tmp_path: Path, family: str, converted: dict[str, tuple[Path, Path]]):
    """bf16 bit for bit, with the config of the original and with that of the metadata."""
    source, gguf = converted[family]
    where = {"config_from": str(source)}
    nf4conv.dequantize(gguf, tmp_path / "back", **CPU, **where)
    expected, found = tensors_of(source), tensors_of(tmp_path / "back")
    assert found.keys() == expected.keys() - LEFT_OUT.get(family, set())
    assert_equal_in_bfloat16(found, expected)
    if family.partition(":")[0] in NEED_CONFIG:
        with pytest.raises(UndecodableError, match="--config-from REPO takes that of the original"):
            open_source(gguf)
        return
    nf4conv.dequantize(gguf, tmp_path / "alone", **CPU)
    alone = output_of(class_of(STANDS_FOR.get(family, family)), tmp_path / "alone")
    original = output_of(class_of(family), source)
    assert torch.equal(original, alone), (original - alone).abs().max()


def output_of(kind: type, folder: Path) -> torch.Tensor:
    """The logits of some tokens, or the last hidden states."""
    model = kind.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(3, 40).view(1, -1)
    inputs = {"input_ids": tokens}
    if model.config.is_encoder_decoder and hasattr(model, "lm_head"):
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        return model(**inputs)[0]


def rewrite(folder: Path, state: dict[str, torch.Tensor], **config: object) -> None:
    """Puts other tensors into a model, and other values into its config."""
    (folder / "model.safetensors").unlink()
    written = json.loads((folder / "config.json").read_text())
    save_model(folder, state, written | config)


def comes_back(folder: Path, out: Path) -> None:
    """Converts a model, and compares what comes back with it."""
    where = {"config_from": str(folder)}
    nf4conv.dequantize(convert(folder, "bf16"), out, **CPU, **where)
    assert_same_tensors(out, folder)


def test_the_layer_of_the_token_after_the_next_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A layer behind the last one, which transformers leaves out, and other loaders use."""
    monkeypatch.setenv("MTP", "1")
    source = write_model(tmp_path / "source", "Glm4MoeForCausalLM", torch.bfloat16)
    state = tensors_of(source)
    for name, values in list(state.items()):
        if name.startswith("model.layers.1."):
            state[name.replace("layers.1.", "layers.2.")] = values + 1
    for module, shape in (
        ("eh_proj", (64, 128)),
        ("enorm", (64,)),
        ("hnorm", (64,)),
        ("embed_tokens", (128, 64)),
        ("shared_head.norm", (64,)),
        ("shared_head.head", (128, 64)),
    ):
        state[f"model.layers.2.{module}.weight"] = torch.randn(shape).bfloat16()
    rewrite(source, state, num_nextn_predict_layers=1)
    comes_back(source, tmp_path / "back")
    nf4conv.dequantize(tmp_path / "source-bf16.gguf", tmp_path / "alone", **CPU)
    config = json.loads((tmp_path / "alone" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (2, 1)


@pytest.mark.parametrize(
    ("sees", "alone"),
    [
        ("Qwen2_5_VLForConditionalGeneration", "Qwen2ForCausalLM"),
        ("Qwen3VLForConditionalGeneration", "Qwen3ForCausalLM"),
        ("Qwen3VLMoeForConditionalGeneration", "Qwen3MoeForCausalLM"),
        ("Glm4vMoeForConditionalGeneration", "Glm4MoeForCausalLM"),
    ],
)
def test_the_text_model_of_one_that_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees: str, alone: str
):
    """Files of Qwen2.5-VL and Qwen3-VL have text models alone, which are Qwen2 and Qwen3."""
    sections = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    if "Glm4v" in sees:
        sections |= {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
    text = {
        **SMALL,
        **MIXTURE,
        **ROUTED,
        "attention_bias": True,
        "head_dim": 16,
        "rope_parameters": sections,
        "tie_word_embeddings": False,
    }
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"intermediate_size": 48, "deepstack_visual_indexes": [0]}
    monkeypatch.setitem(FAMILIES, sees, {"text_config": text, "vision_config": vision})
    source = write_model(tmp_path / "source", sees, torch.bfloat16)
    original = output_of(class_of(sees), source)
    state = tensors_of(source)
    for name, values in state.items():
        if "Qwen" in sees and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            # as models on the Hub have them; transformers 5 turns them when it loads
            state[name] = values.transpose(1, 2).contiguous()
    rewrite(source, state)
    nf4conv.dequantize(convert(source, "bf16"), tmp_path / "alone", **CPU)
    assert torch.equal(original, output_of(class_of(alone), tmp_path / "alone"))


def test_nemotron_h_without_experts_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its weights; the converter takes it for a mixture in transformers 5, and writes no widths."""
    dense = {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]}
    monkeypatch.setitem(
        FAMILIES, "NemotronHForCausalLM", {**FAMILIES["NemotronHForCausalLM"], **dense}
    )
    source = write_model(tmp_path / "source", "NemotronHForCausalLM", torch.bfloat16)
    comes_back(source, tmp_path / "back")


def test_an_embedding_model_of_qwen3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Qwen3-Embedding: the names have no "model." before them, and there is no head."""
    monkeypatch.setitem(FAMILIES, "Qwen3Model", {"head_dim": 32})
    source = write_model(tmp_path / "source", "Qwen3Model", torch.bfloat16)
    nf4conv.dequantize(convert(source, "bf16"), tmp_path / "alone", **CPU)
    expected, found = tensors_of(source), tensors_of(tmp_path / "alone")
    assert {f"model.{name}" for name in expected} == found.keys()
    for name, values in expected.items():
        assert torch.equal(found[f"model.{name}"], values), name
    kind = class_of("Qwen3Model")
    assert torch.equal(output_of(kind, source), output_of(kind, tmp_path / "alone"))


def test_qwen2_without_biases_is_llama(tmp_path: Path):
    """KORMo, whose class the converter takes for that of Qwen2; Qwen2 always has biases."""
    source = write_model(tmp_path / "source", "LlamaForCausalLM", torch.bfloat16)
    original = output_of(class_of("LlamaForCausalLM"), source)
    rewrite(source, tensors_of(source), architectures=["KORMoForCausalLM"])
    nf4conv.dequantize(convert(source, "bf16"), tmp_path / "alone", **CPU)
    assert torch.equal(original, output_of(class_of("LlamaForCausalLM"), tmp_path / "alone"))


def test_mistral_small_3_is_no_ministral_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The converter gives both the architecture mistral3, if the text model names no class."""
    text = {**SMALL, "model_type": "mistral", "head_dim": 16, "sliding_window": None}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = {"text_config": text, "vision_config": vision | {"num_attention_heads": 2}}
    sees = "Mistral3ForConditionalGeneration"
    monkeypatch.setitem(FAMILIES, sees, config)
    source = write_model(tmp_path / "source", sees, torch.bfloat16)
    nf4conv.dequantize(convert(source, "bf16"), tmp_path / "alone", **CPU)
    config = json.loads((tmp_path / "alone" / "config.json").read_text())
    assert config["model_type"] == "mistral"
    expected = output_of(class_of(sees), source)
    assert torch.equal(expected, output_of(class_of("MistralForCausalLM"), tmp_path / "alone"))


def test_a_decoder_that_sees_all_is_refused_without_a_config(tmp_path: Path):
    """No key of config.json tells transformers so."""
    source = write_model(tmp_path / "source", "Qwen2ForCausalLM", torch.bfloat16)
    rewrite(source, tensors_of(source), is_causal=False)
    path = convert(source, "bf16")
    with pytest.raises(UndecodableError, match="of which the metadata does not say all"):
        nf4conv.dequantize(path, tmp_path / "alone", **CPU)
    where = {"config_from": str(source)}
    nf4conv.dequantize(path, tmp_path / "back", **CPU, **where)
    assert tensors_of(tmp_path / "back").keys() == tensors_of(source).keys()


@pytest.mark.parametrize("encoder", ["RobertaModel", "XLMRobertaModel"])
def test_models_whose_positions_are_cut_off_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoder: str
):
    """Their positions are two rows further on than those of BERT."""
    monkeypatch.setitem(FAMILIES, encoder, {"pad_token_id": 1})
    source = write_model(tmp_path / "source", encoder, torch.bfloat16)
    where = {"config_from": str(source)}
    with pytest.raises(SourceError, match=r"is a bert, but --config-from names a .*roberta"):
        nf4conv.dequantize(convert(source, "bf16"), tmp_path / "out", **CPU, **where)


@pytest.mark.parametrize("out_type", ["f32", "f16", "q8_0"])
def test_values_are_those_that_the_file_holds(tmp_path: Path, out_type: str):
    """f32 bit for bit, f16 equal to the cast, Q8_0 equal to gguf's own decoding."""
    source = write_model(tmp_path / "source", "Qwen3ForCausalLM", torch.float32)
    path = convert(source, out_type)
    options = {"dtype": "float16" if out_type == "f16" else "float32"}
    where = {"config_from": str(source)}
    nf4conv.dequantize(path, tmp_path / "back", **options, **CPU, **where)
    expected, found = tensors_of(source), tensors_of(tmp_path / "back")
    assert found.keys() == expected.keys()
    if out_type == "f16":
        expected = {name: values.half() for name, values in expected.items()}
    if out_type == "q8_0":
        decoded = decoded_by_gguf(path)
        name = "model.layers.1.mlp.down_proj.weight"
        assert not torch.equal(expected[name], decoded["blk.1.ffn_down.weight"])
        expected = {name: decoded["blk.1.ffn_down.weight"]}
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


TEXTS = [
    "The quick brown fox's 12345 jumps, over   the lazy dog!\n\n  Ends\there.",
    "naïve café – 你好, мир 😀",
    "HTTPServer's 汉字English汉字, ЗДРАВСТВУЙ",
    " leading <s>special</s> and trailing ",
]


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "gpt-2", "kimi-k2"])
def test_a_byte_level_tokenizer_comes_back(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    from tokenizers import trainers

    from nf4conv.sources.gguf.header import Texts
    from nf4conv.sources.gguf.tokenizing import tokenizer_json

    source = write_model(tmp_path / "source", "LlamaForCausalLM", torch.bfloat16)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    none = Texts(b"", 0)
    metadata = {"tokenizer.ggml.pre": kind, "tokenizer.ggml.merges": none}
    metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": none}
    like = json.loads(b"".join(tokenizer_json(metadata)))
    whole = json.loads(tokenizer.to_str()) | {
        key: like[key] for key in ("normalizer", "pre_tokenizer", "decoder")
    }
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    tokenizer.save(str(source / "tokenizer.json"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"vocab_size": 400}))
    monkeypatch.setenv("PRE_TOKENIZER", kind)
    nf4conv.dequantize(convert(source, "bf16"), tmp_path / "back", **CPU)
    made = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in TEXTS:
        assert made.encode(text, add_special_tokens=False) == tokenizer.encode(text).ids
        assert made.decode(tokenizer.encode(text).ids) == text
    assert (made.bos_token, made.eos_token, made.pad_token) == ("<s>", "</s>", "<pad>")


def test_a_tokenizer_of_sentencepiece_comes_back(tmp_path: Path):
    import sentencepiece

    source = write_model(tmp_path / "source", "LlamaForCausalLM", torch.bfloat16)
    (source / "tokenizer.json").unlink()
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXTS * 50))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(source / "tokenizer"),
        model_type="bpe",
        vocab_size=380,
        byte_fallback=True,
        character_coverage=0.98,
        minloglevel=2,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"vocab_size": 380}))
    processor = sentencepiece.SentencePieceProcessor(str(source / "tokenizer.model"))
    nf4conv.dequantize(convert(source, "bf16"), tmp_path / "back", **CPU)
    made = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in TEXTS[:2]:
        assert made.encode(text) == [processor.bos_id(), *processor.encode(text)]
        assert made.decode(processor.encode(text)) == text
