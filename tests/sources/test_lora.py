"""`--lora`: what we merge piece by piece is what the installed PEFT merges in memory."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import INPUT, LINEAR, load, make_model, merged_by_peft, train
from checkpoints import contents, save_adapter
from hub_server import Hub, Repo
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertModel,
    CLIPVisionConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
)

import nf4conv
from nf4conv.commands.planning import make_plan
from nf4conv.errors import Nf4convError, OutputError, PlanError, SourceError
from nf4conv.options import DequantizeOptions

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),  # PEFT's, about ties and names that it does not find
]

CPU = {"device": "cpu", "workers": 2, "buffer_size": 2 * 65536}
ROUNDING = {torch.float32: 2**-21, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Of a value, relative to the largest of its tensor: PEFT rounds the product, the norm and the sum,
we the sum.
"""

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "scaled by rank": (
        "llama",
        {"use_rslora": True, "rank_pattern": {"q_proj": 8, r".*layers\.1\.mlp\.up_proj": 2}},
    ),
    "alpha by module": ("llama", {"alpha_pattern": {"v_proj": 3, "layers.1.mlp.up_proj": 30}}),
    "modules by pattern": ("llama", {"target_modules": r".*layers\.0\..*(q|up)_proj"}),
    "all linear modules": ("llama", {"target_modules": "all-linear"}),
    "some layers": ("llama", {"layers_to_transform": [1], "layers_pattern": "layers"}),
    "DoRA": ("llama", {"use_dora": True}),
    "all biases": ("llama", {"bias": "all"}),
    "biases of LoRA's modules": ("llama", {"bias": "lora_only"}),
    "modules to save": ("llama", {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "DoRA of an embedding": ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "Conv1D": ("gpt2", {"fan_in_fan_out": True}),
    "Conv1D, square ones": ("gpt2", {"target_modules": ["attn.c_proj"]}),
    "Conv1D with DoRA": ("gpt2", {"use_dora": True}),
    "encoder": ("bert", {"modules_to_save": ["classifier"]}),
    "encoder with DoRA": ("bert", {"task_type": "SEQ_CLS", "use_dora": True}),
    "mixture of experts": ("qwen3_moe", {"target_parameters": EXPERTS}),
    "one parameter of experts": ("qwen3_moe", {"target_parameters": EXPERTS[1:]}),
    "router and experts": (
        "qwen3_moe",
        {
            "target_parameters": [EXPERTS[0], "mlp.gate.weight"],
            "rank_pattern": {EXPERTS[0]: 2, "gate.weight": 6},
        },
    ),
}


def largest_difference(ours: Any, theirs: Any) -> float:
    """Returns the largest difference of two values, relative to the largest of their tensor."""
    found, expected = ours.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    return max(
        float(
            (found[name].double() - value.double()).abs().max()
            / value.double().abs().max().clamp(min=1e-9)
        )
        for name, value in expected.items()
    )


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=INPUT).logits


def changed(model: Any, base: Any) -> set[str]:
    before = base.state_dict()
    return {
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }


@pytest.mark.parametrize(
    ("feature", "dtype"),
    [(name, torch.float32) for name in FEATURES]
    + [
        (name, dtype)
        for name in ("llama", "DoRA", "mixture of experts")
        for dtype in (torch.bfloat16, torch.float16)
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_the_merged_model_is_that_of_peft(tmp_path, feature, dtype):
    kind, config = FEATURES[feature]
    base = make_model(tmp_path / "base", kind, dtype)
    adapted = train(
        load(base).float(), tmp_path / "adapter", **{"target_modules": LINEAR[kind], **config}
    )
    options = {"lora": (str(tmp_path / "adapter"),)}
    report = nf4conv.dequantize(base, tmp_path / "merged", **options, **CPU)
    ours, theirs = load(tmp_path / "merged"), merged_by_peft(load(base), tmp_path / "adapter")
    assert largest_difference(ours, theirs) <= ROUNDING[dtype]
    assert changed(ours, load(base)) == changed(theirs, load(base)) != set()
    assert "merged" in " ".join(report.notes)
    if dtype is torch.float32:
        torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=5e-6)
        torch.testing.assert_close(logits(ours), logits(adapted), rtol=0, atol=5e-6)


@pytest.mark.parametrize("feature", ["llama", "DoRA", "Conv1D", "mixture of experts", "encoder"])
def test_a_merged_4bit_model_is_that_of_the_merged_model_quantized(tmp_path, feature):
    kind, config = FEATURES[feature]
    base = make_model(tmp_path / "base", kind, torch.bfloat16)
    train(load(base).float(), tmp_path / "adapter", **{"target_modules": LINEAR[kind], **config})
    lora = (str(tmp_path / "adapter"),)
    nf4conv.dequantize(base, tmp_path / "merged", lora=lora, **CPU)
    nf4conv.quantize(tmp_path / "merged", tmp_path / "expected", **CPU)
    # in pieces of another size
    run = {"device": "cpu", "workers": 3, "buffer_size": 3 * 2**20, "verify": True}
    nf4conv.quantize(base, tmp_path / "direct", lora=lora, **run)
    assert weights_of(tmp_path / "direct") == weights_of(tmp_path / "expected")
    assert json.loads((tmp_path / "direct/config.json").read_text())["quantization_config"][
        "load_in_4bit"
    ]


def weights_of(folder: Path) -> dict[str, bytes]:
    return {
        name: content for name, content in contents(folder).items() if name.endswith(".safetensors")
    }


def test_several_adapters_are_merged_in_their_order(tmp_path):
    base, adapters = (
        make_model(tmp_path / "base", "llama"),
        [tmp_path / f"adapter{number}" for number in range(3)],
    )
    for number, adapter in enumerate(adapters):
        train(
            load(base),
            adapter,
            target_modules=["q_proj", "up_proj"],
            r=2 + number,
            use_dora=number < 2,
        )
    options = {"lora": tuple(map(str, adapters))}
    nf4conv.dequantize(base, tmp_path / "merged", **options, **CPU)
    assert (
        largest_difference(load(tmp_path / "merged"), merged_by_peft(load(base), *adapters))
        <= 2**-20
    )


TIES = {
    "head": {"target_modules": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize("stored", [False, True], ids=["head not stored", "head stored too"])
@pytest.mark.parametrize("what", TIES)
def test_a_tied_head_does_what_it_was_trained_to_do(tmp_path, what, stored):
    """PEFT's merge adds LoRA of one of the two to both, and of tied ones twice; the adapted model
    did neither.
    """
    base = make_model(tmp_path / "base", "llama", tie_word_embeddings=True)
    adapted = train(load(base), tmp_path / "adapter", **TIES[what])
    if stored:
        tensors = load_file(base / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
    options = {"lora": (str(tmp_path / "adapter"),)}
    nf4conv.dequantize(base, tmp_path / "merged", **options, **CPU)
    merged = load(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=0, atol=2e-5)
    assert not merged.config.tie_word_embeddings


def small(kind: str) -> Any:
    """Models that name things otherwise on disk than in memory."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if kind == "gpt-oss":  # whose down_proj is square, and stored [in, out]
        return GptOssForCausalLM(
            GptOssConfig(**sizes | {"intermediate_size": 64, "head_dim": 16}, num_local_experts=4)
        )
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))
    if kind == "bert":
        return BertModel(
            BertConfig(**{**sizes, "num_key_value_heads": None}), add_pooling_layer=False
        )
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=LlamaConfig(**sizes), vision_config=vision)
    )


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gpt-oss", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
        ("mixtral", {"target_modules": ["o_proj"], "target_parameters": EXPERTS}),
        ("llava", {"target_modules": r".*language_model.*(q|up)_proj|lm_head"}),
    ],
    ids=["gpt-oss", "mixtral", "llava"],
)
def test_names_in_memory_are_found_on_disk(tmp_path, kind, config):
    model = small(kind)
    model.save_pretrained(tmp_path / "base")
    get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **config)).save_pretrained(
        tmp_path / "adapter"
    )
    options = {"lora": (str(tmp_path / "adapter"),)}
    nf4conv.dequantize(tmp_path / "base", tmp_path / "merged", **options, **CPU)
    theirs = merged_by_peft(load(tmp_path / "base"), tmp_path / "adapter")
    assert largest_difference(load(tmp_path / "merged"), theirs) <= ROUNDING[torch.float32]


def test_an_adapter_of_a_model_without_its_head_fits_the_one_with_it(tmp_path):
    """AutoModel drops "bert." from all names."""
    base = make_model(tmp_path / "base", "bert")
    encoder = BertModel.from_pretrained(base)
    adapted = get_peft_model(
        encoder, LoraConfig(init_lora_weights=False, target_modules=["query", "output.dense"])
    )
    adapted.save_pretrained(tmp_path / "adapter")
    options = {"lora": (str(tmp_path / "adapter"),)}
    nf4conv.dequantize(base, tmp_path / "merged", **options, **CPU)
    theirs = merged_by_peft(BertModel.from_pretrained(base), tmp_path / "adapter")
    assert (
        largest_difference(BertModel.from_pretrained(tmp_path / "merged"), theirs)
        <= ROUNDING[torch.float32]
    )


def test_an_adapter_of_single_experts_is_merged_into_them(tmp_path):
    """transformers 4 trained such adapters. transformers 5 stacks the experts, and PEFT puts the
    factors together.
    """
    base = make_model(tmp_path / "base", "qwen3_moe")
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj"
    up, down = torch.randn(48, 4), torch.randn(4, 64)
    write_adapter(
        tmp_path / "adapter", {f"{name}.lora_B.weight": up, f"{name}.lora_A.weight": down}
    )
    options = {"lora": (str(tmp_path / "adapter"),)}
    nf4conv.dequantize(base, tmp_path / "merged", **options, **CPU)
    merged = load_file(tmp_path / "merged/model.safetensors")
    expected = (tensors[f"{name}.weight"].double() + 2 * up.double() @ down.double()).float()
    assert torch.equal(merged.pop(f"{name}.weight"), expected)
    assert all(torch.equal(value, tensors[key]) for key, value in merged.items())


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    described = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "base_model_name_or_path": "org/base",
    }
    factors = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    return save_adapter(folder, factors, described | config)


def test_pickled_adapters_are_read_too(tmp_path):
    base = make_model(tmp_path / "base", "llama")
    train(load(base), tmp_path / "safe", target_modules=["q_proj"])
    shutil.copytree(tmp_path / "safe", tmp_path / "pickled")
    torch.save(
        load_file(tmp_path / "safe/adapter_model.safetensors"),
        tmp_path / "pickled/adapter_model.bin",
    )
    (tmp_path / "pickled/adapter_model.safetensors").unlink()
    for name in ("safe", "pickled"):
        nf4conv.dequantize(base, tmp_path / f"{name}-out", lora=(str(tmp_path / name),), **CPU)
    assert weights_of(tmp_path / "safe-out") == weights_of(tmp_path / "pickled-out")


@pytest.mark.gpu
@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_device_changes_no_byte(tmp_path, kind, use_dora):
    base = make_model(tmp_path / "base", kind, torch.bfloat16)
    train(load(base).float(), tmp_path / "adapter", target_modules=LINEAR[kind], use_dora=use_dora)
    options = {"lora": (str(tmp_path / "adapter"),)}
    for device in ("cpu", "cuda"):
        nf4conv.dequantize(base, tmp_path / device, **options, device=device)
    assert weights_of(tmp_path / "cpu") == weights_of(tmp_path / "cuda")


def test_an_adapter_is_merged_into_the_4bit_model_it_was_trained_on(tmp_path):
    """QLoRA: the loss falls on our output, and the merged model computes what was trained."""
    base = make_model(tmp_path / "base", "llama")
    nf4conv.quantize(base, tmp_path / "nf4", compute_dtype="float32", **CPU)
    model = load(tmp_path / "nf4", device_map="cpu")
    before = model(INPUT, labels=INPUT).loss.item()
    adapted = train(model, tmp_path / "adapter", steps=12, target_modules=LINEAR["llama"])
    assert adapted(INPUT, labels=INPUT).loss.item() < before - 0.5
    lora = (str(tmp_path / "adapter"),)
    nf4conv.dequantize(tmp_path / "nf4", tmp_path / "merged", lora=lora, **CPU)
    # bitsandbytes multiplies in bfloat16 on a CPU; what it decodes is multiplied exactly
    nf4conv.dequantize(tmp_path / "nf4", tmp_path / "decoded", **CPU)
    exact = PeftModel.from_pretrained(load(tmp_path / "decoded"), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(load(tmp_path / "merged")), logits(exact), rtol=0, atol=5e-6)
    nf4conv.quantize(tmp_path / "nf4", tmp_path / "again", lora=lora, **CPU)
    assert nf4conv.verify(
        tmp_path / "again", source=tmp_path / "nf4", lora=lora, exact=True, device="cpu"
    ).passed
    again = PeftModel.from_pretrained(
        load(tmp_path / "nf4", device_map="cpu"), tmp_path / "adapter"
    )
    torch.testing.assert_close(logits(again), logits(adapted))


def merge_llama(tmp_path: Path, adapter: Path, **options: Any) -> Any:
    base = tmp_path / "base"
    if not base.exists():
        make_model(base, "llama")
    return make_plan(base, DequantizeOptions(lora=(str(adapter),), **options))


Q = "model.layers.0.self_attn.q_proj"
FACTORS = {f"{Q}.lora_A.weight": torch.ones(4, 64), f"{Q}.lora_B.weight": torch.ones(64, 4)}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({}, {"peft_type": "LOHA"}, "an adapter of the kind LOHA"),
        ({}, {"peft_type": None}, "an adapter of the kind None"),
        ({}, {"alora_invocation_tokens": [1]}, "aLoRA"),
        ({}, {"kasa_config": {"beta": 1}}, "KaSA"),
        ({}, {"trainable_token_indices": [3]}, "trainable tokens"),
        ({}, {"lora_bias": True}, "biases of lora_B"),
        ({}, {"ensure_weight_tying": True}, "a head that is kept tied"),
        ({}, {"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({}, {"init_lora_weights": "loftq"}, "changed the base's weights"),
        ({}, {"rank_pattern": {"(": 3}}, "rank_pattern: expected .*missing \\)"),
        ({}, {"alpha_pattern": ["q"]}, "alpha_pattern: expected a JSON object"),
        ({}, {"alpha_pattern": {"q" * 1001: 3}}, "alpha_pattern: .* of up to 1,000 characters"),
        ({}, {"target_parameters": "up"}, "target_parameters: not a list of names"),
        ({}, {"r": 8}, "rank 8 of its config"),
        ({}, {"r": "4"}, "'4' is no rank"),
        ({}, {"lora_alpha": None}, "None is no lora_alpha"),
        ({f"{Q}.lora_diag": torch.ones(4)}, {}, "lora_diag: not a tensor of LoRA"),
        ({f"{Q}.lora_A.default.weight": torch.ones(4)}, {}, "not a tensor of LoRA"),
        (
            {f"layers.7.lora_{name}.weight": torch.ones(4, 4) for name in "AB"},
            {},
            r"layers\.7: .* has nothing",
        ),
        (
            {f"{{x}}.experts.lora_{name}.weight": torch.ones(4, 4) for name in "AB"},
            {"target_parameters": ["experts.gate_up_proj"]},
            r"\{x\}\.experts: .* has nothing",
        ),
        (
            {"score.weight": torch.ones(2, 64)},
            {},
            "score.weight: .* has nothing that the adapter could change there",
        ),
        (
            {"lm_head.weight": torch.ones(98, 64)},
            {},
            r"\[98, 64\] does not go with lm_head.weight \[96, 64\].*resized",
        ),
        (
            {f"{Q}.lora_B.weight": torch.ones(96, 4)},
            {},
            r"lora_B.weight \[96, 4\] does not go with .*\[64, 64\]",
        ),
        (
            {f"{Q}.lora_magnitude_vector": torch.ones(5)},
            {},
            r"lora_magnitude_vector \[5\] does not go",
        ),
        (
            {"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 64)},
            {},
            "one of lora_A and lora_B, but not both",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(tmp_path, tensors, config, message):
    adapter = write_adapter(tmp_path / "adapter", FACTORS | tensors, **config)
    with pytest.raises(SourceError, match=message) as error:
        merge_llama(tmp_path, adapter)
    assert str(adapter) in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_adapter_is_refused(tmp_path):
    with pytest.raises(SourceError, match="no such folder"):
        merge_llama(tmp_path, tmp_path / "nothing")
    with pytest.raises(SourceError, match=r"no adapter_config\.json in it"):
        merge_llama(tmp_path, tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", FACTORS)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(SourceError, match="neither adapter_model"):
        merge_llama(tmp_path, adapter)


def test_one_of_two_adapters_may_replace_a_tensor(tmp_path):
    adapters = [
        write_adapter(tmp_path / name, {"lm_head.weight": torch.ones(96, 64)})
        for name in ("one", "two")
    ]
    make_model(tmp_path / "base", "llama")
    with pytest.raises(SourceError, match="only one of them can"):
        make_plan(tmp_path / "base", DequantizeOptions(lora=tuple(map(str, adapters))))


def test_a_base_of_another_name_is_a_note(tmp_path):
    plan = merge_llama(
        tmp_path, write_adapter(tmp_path / "adapter", FACTORS, base_model_name_or_path="org/other")
    )
    assert any("was trained on org/other, and is merged into" in note for note in plan.notes)
    same = write_adapter(tmp_path / "same", FACTORS, base_model_name_or_path="/elsewhere/base")
    assert not any("was trained on" in note for note in merge_llama(tmp_path, same).notes)


def test_the_plan_shows_what_is_merged(tmp_path):
    adapter = write_adapter(tmp_path / "adapter", FACTORS | {"lm_head.weight": torch.ones(96, 64)})
    make_model(tmp_path / "base", "llama")
    plan = nf4conv.plan_quantize(tmp_path / "base", lora=(str(adapter),))
    merged = [row.name for row in plan.rows if "merged with an adapter" in str(row)]
    assert merged == [f"{Q}.weight"]
    assert any("1 modules changed, 1 tensors replaced" in note for note in plan.made.notes)


def test_an_adapter_in_the_place_of_a_model_is_refused_with_the_command_to_use(tmp_path, hub):
    adapter = write_adapter(tmp_path / "adapter", FACTORS)
    for source in (adapter, adapter / "adapter_model.safetensors"):
        for command in (nf4conv.quantize, nf4conv.dequantize):
            with pytest.raises(SourceError) as error:
                command(source, tmp_path / "out")
            assert f"nf4conv quantize BASE OUT --lora {adapter}" in str(error.value)
    upload(hub, "org/adapter", adapter)
    with pytest.raises(SourceError, match="nf4conv quantize BASE OUT --lora org/adapter"):
        nf4conv.plan_quantize("org/adapter", cache_dir=tmp_path / "cache")


def upload(hub: Hub, repo: str, folder: Path) -> None:
    hub.repos[repo] = Repo()
    hub.repos[repo].commit({path.name: path.read_bytes() for path in folder.iterdir()})


def test_base_and_adapter_come_from_the_hub_and_are_named_in_the_card(tmp_path, hub):
    base = make_model(tmp_path / "base", "llama", torch.bfloat16)
    train(load(base), tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["lm_head"])
    for name in ("base", "adapter"):
        upload(hub, f"org/{name}", tmp_path / name)
    commit = hub.repos["org/adapter"].head
    hub.repos["org/adapter"].commit({"README.md": b"the adapter is in an earlier revision"})
    where = {"cache_dir": tmp_path / "cache", "stream": True}
    lora = (f"org/adapter@{commit}",)
    nf4conv.quantize("org/base", tmp_path / "streamed", lora=lora, **CPU, **where)
    local = {"lora": (str(tmp_path / "adapter"),)}
    nf4conv.quantize(base, tmp_path / "local", **local, **CPU)
    assert weights_of(tmp_path / "streamed") == weights_of(tmp_path / "local")
    card = (tmp_path / "streamed/README.md").read_text()
    assert f"--source org/base --lora org/adapter@{commit}" in card
    assert "base_model:\n- org/base\n- org/adapter\nbase_model_relation: merge\n" in card
    nf4conv.dequantize("org/base", tmp_path / "plain", lora=lora, **CPU, **where)
    assert (
        f"merged with the LoRA adapter [org/adapter@{commit}]"
        in (tmp_path / "plain/README.md").read_text()
    )
    assert "merged with the LoRA adapter `adapter`" in (tmp_path / "local/README.md").read_text()


def test_an_interrupted_merge_resumes_with_the_same_adapter_only(tmp_path, monkeypatch):
    base = make_model(tmp_path / "base", "llama", torch.bfloat16)
    train(load(base), tmp_path / "adapter", target_modules=LINEAR["llama"])
    options = {"lora": (str(tmp_path / "adapter"),), "max_shard_size": 20_000}
    nf4conv.quantize(base, tmp_path / "whole", **options, **CPU)
    with monkeypatch.context() as patched:
        patched.setattr("nf4conv.output.workspace.Workspace.write", fail)
        with pytest.raises(Nf4convError, match="stopped"):
            nf4conv.quantize(base, tmp_path / "out", **options, **CPU)
    config = tmp_path / "adapter/adapter_config.json"
    original = config.read_text()
    config.write_text(original.replace('"lora_alpha": 10', '"lora_alpha": 11'))
    with pytest.raises(OutputError, match="unfinished run that differs in adapters"):
        nf4conv.quantize(base, tmp_path / "out", **options, **CPU)
    config.write_text(original)
    report = nf4conv.quantize(base, tmp_path / "out", **options, **CPU)
    assert report.shards_resumed > 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def fail(*_: object) -> None:
    raise OutputError("stopped")


def test_an_adapter_that_changes_meanwhile_is_noticed(tmp_path):
    base = make_model(tmp_path / "base", "llama")
    adapter = write_adapter(tmp_path / "adapter", FACTORS)

    def touch(_: int) -> None:
        (adapter / "adapter_model.safetensors").touch()

    changed = r"adapter_model\.safetensors: changed (while it was read|since it was planned)"
    with pytest.raises(SourceError, match=changed):
        nf4conv.dequantize(base, tmp_path / "out", lora=(str(adapter),), **CPU, progress=touch)


def test_a_diffusers_pipeline_takes_adapters_part_by_part(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    for command in (nf4conv.quantize, nf4conv.dequantize):
        with pytest.raises(PlanError, match="--subfolder transformer"):
            command(tmp_path, tmp_path / "out", lora=("adapter",))


def test_what_an_adapter_ruins_is_not_packed(tmp_path):
    adapter = write_adapter(
        tmp_path / "adapter", FACTORS | {f"{Q}.lora_A.weight": torch.full((4, 64), float("nan"))}
    )
    make_model(tmp_path / "base", "llama")
    message = rf"{Q}.weight: has values that are NaN.*repair the adapter"
    with pytest.raises(SourceError, match=message):
        nf4conv.quantize(tmp_path / "base", tmp_path / "out", lora=(str(adapter),), **CPU)
