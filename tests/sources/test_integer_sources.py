"""Checkpoints of packed integers as sources: decoded, packed, refused; each command."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import load, train
from checkpoints import assert_same_tensors, save_model
from hub_server import Hub, Repo
from integers import Weight, awq, compressed, gptq, torchao
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import nf4conv
from nf4conv.commands.planning import make_plan
from nf4conv.errors import Nf4convError, SourceError
from nf4conv.options import DequantizeOptions

CPU = {"device": "cpu", "workers": 2, "buffer_size": 1}
CONFIG = LlamaConfig(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=96,
    dtype="float16",
    pad_token_id=0,
)
LLAMA = CONFIG.to_dict() | {"architectures": ["LlamaForCausalLM"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
}
TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {
        "default": {
            "_type": "Int4WeightOnlyConfig",
            "_version": 2,
            "_data": {
                "group_size": 32,
                "int4_packing_format": {"_type": "Int4PackingFormat", "_data": "PLAIN"},
            },
        }
    },
}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 32,
    "data_type": "int",
    "sym": True,
    "autoround_version": "0.16.1",
}
MAKERS = {
    "gptq": (gptq, GPTQ),
    "awq": (awq, AWQ),
    "compressed": (compressed, PACKED),
    "torchao": (torchao, TORCHAO),
}
Q = "model.layers.0.self_attn.q_proj"


def plain_model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: part.half() for name, part in LlamaForCausalLM(CONFIG).state_dict().items()}


def write(
    folder: Path,
    make: Any,
    description: dict[str, Any],
    special: dict[str, Weight] | None = None,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Writes a small Llama whose layers are quantized; returns the tensors that it stands for."""
    tensors: dict[str, torch.Tensor | Weight] = {}
    for name, tensor in plain_model().items():
        module = name.removesuffix(".weight")
        tensors[name] = tensor
        if module.endswith("_proj"):
            made = (special or {}).get(module)
            tensors[name] = made or make(*tensor.shape, dtype=torch.float16)
    return write_tensors(folder, tensors, LLAMA, description)


def write_tensors(
    folder: Path,
    tensors: dict[str, torch.Tensor | Weight],
    config: dict[str, Any],
    description: dict[str, Any],
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Writes a checkpoint, some weights of which are quantized; returns what it stands for."""
    stored: dict[str, torch.Tensor] = {}
    decoded: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Weight):
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{suffix}": part for suffix, part in tensor.parts.items()}
            decoded[name] = tensor.decoded
        else:
            stored[name] = decoded[name] = tensor
    return save_model(folder, stored, config | {"quantization_config": description}), decoded


FILE = "model.safetensors"


@pytest.mark.parametrize("method", MAKERS)
def test_dequantized_it_loads_as_any_other_model(tmp_path: Path, method: str):
    source, decoded = write(tmp_path / "source", *MAKERS[method])
    report = nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert report.totals.decoded == 14
    assert_same_tensors(tmp_path / "out", decoded)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float16"
    loaded, info = LlamaForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(loaded.get_parameter(f"{Q}.weight"), decoded[f"{Q}.weight"])


def test_layers_of_different_bits(tmp_path: Path):
    """GPTQModel's `dynamic`: some layers in 8 bits, one in 2, one not quantized."""
    special = {
        Q: gptq(128, 128, bits=8, group_size=64),
        "model.layers.1.mlp.down_proj": gptq(128, 256, bits=2, group_size=128),
    }
    dynamic = {
        "+:.*q_proj.*": {"bits": 8, "group_size": 64},
        "+:.*down_proj": {"bits": 2, "group_size": 128},
        "-:.*lm_head.*": {},
    }
    source, decoded = write(tmp_path / "source", gptq, GPTQ | {"dynamic": dynamic}, special)
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert_same_tensors(tmp_path / "out", decoded)
    [note] = [
        note for note in nf4conv.plan_quantize(source).made.notes if note.startswith("the source")
    ]
    assert "12 of GPTQ 4-bit, groups of 32" in note
    assert "1 of GPTQ 8-bit, groups of 64" in note
    assert "1 of GPTQ 2-bit, groups of 128" in note


def test_a_model_in_bfloat16_stays_one(tmp_path: Path):
    """Its scales are float16, and so are its decoded weights; what computes is bfloat16."""
    source, decoded = write(tmp_path / "source", gptq, GPTQ)
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / FILE)
    kept = {name for name in tensors if name.endswith(".weight")}
    for name in kept:
        tensors[name] = decoded[name] = tensors[name].bfloat16()
    save_model(source, tensors, config | {"dtype": "bfloat16"})
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert_same_tensors(tmp_path / "out", decoded)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert {part.dtype for part in loaded.parameters()} == {torch.bfloat16}


def vision_and_language(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model that sees: its tower in 16 bits, experts in 4, attention in 8, heads in 3, cache."""
    prefix = "model.language_model.layers.0"
    bf16 = torch.bfloat16
    weights: dict[str, torch.Tensor | Weight] = {
        "model.visual.blocks.0.attn.qkv.weight": torch.randn(96, 32).to(bf16),
        "model.visual.merger.linear_fc1.weight": torch.randn(64, 32).to(bf16),
        "model.language_model.embed_tokens.weight": compressed(96, 64, bits=8, dtype=bf16),
        "lm_head.weight": compressed(96, 64, bits=3, is_symmetric=False, dtype=bf16),
        f"{prefix}.self_attn.q_proj.weight": compressed(64, 64, bits=8, group_size=None),
        f"{prefix}.self_attn.o_proj.weight": torch.randn(64, 64).to(bf16),
        f"{prefix}.mlp.up_proj.weight": compressed(128, 64, is_symmetric=False),
        f"{prefix}.mlp.gate_proj.weight": compressed(128, 64, bits=5, group_size=64),
    }
    for expert in range(2):
        name = f"{prefix}.mlp.experts.{expert}.down_proj.weight"
        weights[name] = compressed(64, 128, group_size=32)
    fp8 = torch.randn(64, 64).to(torch.float8_e4m3fn)
    key = f"{prefix}.self_attn.k_proj.weight"
    scale = torch.full((64, 1), 0.5).to(bf16)
    parts = {"weight": fp8, "weight_scale": scale}
    weights[key] = Weight(parts, (fp8.float() * 0.5).to(bf16))
    caches = [f"{prefix}.self_attn.{cache}" for cache in ("k_scale", "v_scale")]
    weights |= dict.fromkeys(caches, torch.ones(1).to(bf16))
    groups = {}
    for bits, size in ((4, 32), (8, 32), (8, None), (3, 32), (5, 64)):
        weights_of = {"num_bits": bits, "type": "int", "group_size": size}
        groups[f"{bits} {size}"] = {"targets": ["x"], "weights": weights_of}
    groups["fp8"] = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    description = PACKED | {"format": "mixed-precision", "config_groups": groups}
    config = {
        "model_type": "qwen3_vl_moe",
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": {"dtype": "bfloat16", "model_type": "qwen3_vl_moe_text"},
    }
    source, decoded = write_tensors(folder, weights, config, description)
    return source, {name: part for name, part in decoded.items() if name not in caches}


def test_a_mixed_model_that_sees(tmp_path: Path):
    """Integers of 3, 4, 5 and 8 bits, FP8 and 16 bits side by side, embeddings and head too."""
    source, decoded = vision_and_language(tmp_path / "source")
    plan = make_plan(source, DequantizeOptions())
    assert not any("cache" in note for note in plan.notes)
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    found = load_file(tmp_path / "out" / FILE)
    expected = {name: part for name, part in decoded.items() if ".experts." not in name}
    assert_same_tensors(
        {name: part for name, part in found.items() if ".experts" not in name}, expected
    )
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    visual = "model.visual.blocks.0.attn.qkv.weight"
    nf4conv.quantize(source, tmp_path / "nf4", **CPU)
    packed = load_file(tmp_path / "nf4" / FILE)
    assert torch.equal(packed[visual], decoded[visual])
    assert "model.language_model.layers.0.mlp.gate_proj.weight.absmax" in packed
    assert nf4conv.verify(tmp_path / "nf4", source=source, **CPU).passed


def test_rotations_that_cancel_are_as_good_as_none(tmp_path: Path):
    rotations = rotated("weight_input", "weight_output", "q_attn", "k_cache")
    description = PACKED | {"transform_config": rotations}
    source, decoded = write(tmp_path / "source", compressed, description)
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert_same_tensors(tmp_path / "out", decoded)


def test_tied_embeddings(tmp_path: Path):
    """A quantized embedding table stands for the head as well."""
    source, decoded = write(tmp_path / "source", gptq, GPTQ)
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / FILE)
    del tensors["lm_head.weight"], decoded["lm_head.weight"]
    weight = gptq(96, 128, bits=8)
    table = "model.embed_tokens"
    del tensors[f"{table}.weight"]
    tensors |= {f"{table}.{name}": part for name, part in weight.parts.items()}
    decoded[f"{table}.weight"] = weight.decoded
    save_file(tensors, source / FILE)
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert_same_tensors(tmp_path / "out", decoded)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(loaded.lm_head.weight, weight.decoded)


def without_index(make: Any, **fixed: Any) -> Any:
    """Makes weights as AutoRound does, which writes no g_idx but for GPTQModel."""

    def make_without(rows: int, columns: int, **more: Any) -> Weight:
        weight = make(rows, columns, **(fixed | more))
        weight.parts.pop("g_idx", None)
        return weight

    return make_without


@pytest.mark.parametrize(
    ("packing", "make"),
    [
        ("auto_round:auto_gptq", without_index(gptq)),
        ("auto_round:gptq", without_index(gptq)),
        ("auto_round:gptqmodel", partial(gptq, version=2)),
        ("auto_round", without_index(gptq, version=2)),
        ("auto_round:exllamav2", without_index(gptq, version=2)),
        ("auto_round:auto_gptq:exllamav2", without_index(gptq)),
        ("auto_round:auto_awq", awq),
    ],
)
def test_what_autoround_writes(tmp_path: Path, packing: str, make: Any):
    """Layers of other bits are named in `extra_config`."""
    special = {} if make is awq else {Q: make(128, 128, bits=8)}
    description = AUTO_ROUND | {
        "packing_format": packing,
        "extra_config": {".*0.self_attn.q_proj.*": {"bits": 8}, "lm_head": "x"},
    }
    source, decoded = write(tmp_path / "source", make, description, special)
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert_same_tensors(tmp_path / "out", decoded)


def test_old_names_of_autoround(tmp_path: Path):
    description = AUTO_ROUND | {"quant_method": "intel/auto-round", "backend": "auto_round:gptq"}
    del description["packing_format"]
    source, decoded = write(tmp_path / "source", without_index(gptq), description)
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert_same_tensors(tmp_path / "out", decoded)


def test_pack_quantized_of_any_bits(tmp_path: Path):
    modules = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkvo"]
    description = json.loads(json.dumps(PACKED))
    special = {}
    for bits, module in enumerate(modules[:7], start=1):
        group_size = None if bits in (5, 6) else 64
        special[module] = compressed(
            *(128, 128),
            bits=bits,
            group_size=group_size,
            is_symmetric=bits % 2 == 0,
            dtype=torch.float16,
        )
        strategy = "group" if group_size else "channel"
        weights = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group_size}
        description["config_groups"][f"of {bits}"] = {"targets": [module], "weights": weights}
    special[modules[7]] = compressed(*(1024, 1024), bits=3, is_symmetric=False, dtype=torch.float16)
    source, decoded = write(tmp_path / "source", compressed, description, special)
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert_same_tensors(tmp_path / "out", decoded)


@pytest.mark.parametrize("what", ["no shape", "words of 0.17"])
def test_bits_that_cannot_be_told_apart_are_refused(tmp_path: Path, what: str):
    """Before 0.18, a word of compressed-tensors held whole codes only."""
    description = json.loads(json.dumps(PACKED))
    for bits in (4, 8):
        weights = {"num_bits": bits, "type": "int", "strategy": "channel"}
        description["config_groups"][f"of {bits}"] = {"weights": weights}
    weight = compressed(128, 128, bits=8, group_size=None, dtype=torch.float16)
    if what == "no shape":
        del weight.parts["weight_shape"]
    else:
        weight.parts["weight_packed"] = torch.zeros((128, -(-128 // 10)), dtype=torch.int32)
    source, _ = write(tmp_path / "source", compressed, description, {Q: weight})
    with pytest.raises(SourceError, match=f"{Q}.weight_packed: .* does not go with"):
        make_plan(source, DequantizeOptions())


@pytest.mark.parametrize("method", MAKERS)
def test_in_parts_and_in_small_pieces(tmp_path: Path, method: str):
    """A weight of 1024 x 1024 takes several pieces of a buffer of 1 MB."""
    make, description = MAKERS[method]
    special = {Q: make(1024, 1024, dtype=torch.float16)}
    source, decoded = write(tmp_path / "source", make, description, special)
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert_same_tensors(tmp_path / "out", decoded)
    plain = tmp_path / "out"
    options = {"quant_type": "nf4"}
    nf4conv.quantize(source, tmp_path / "nf4", **options, **CPU)
    nf4conv.quantize(plain, tmp_path / "expected", **options, **CPU)
    assert_same_tensors(tmp_path / "nf4", tmp_path / "expected")
    assert nf4conv.verify(tmp_path / "nf4", source=source, **CPU).passed


def test_what_is_lost_is_said(tmp_path: Path):
    source, _ = write(tmp_path / "source", gptq, GPTQ)
    notes = nf4conv.plan_quantize(source).made.notes
    assert any("14 weights were rounded to integers of few bits before" in note for note in notes)
    out = tmp_path / "out"
    nf4conv.quantize(source, out, **CPU)
    assert "GPTQ 4-bit, groups of 32" in (out / "nf4conv.json").read_text()
    assert "GPTQ 4-bit, groups of 32" in (out / "README.md").read_text()


# --- each command, each option: whatever is made of both has the same bytes ----------------------

OTHERS = MAKERS | {
    "auto-round": (
        partial(gptq, version=2),
        AUTO_ROUND | {"packing_format": "auto_round:gptqmodel"},
    ),
}


@pytest.mark.parametrize("method", OTHERS)
def test_inspect_names_method_bits_and_groups(tmp_path: Path, method: str):
    source, decoded = write(tmp_path / "source", *OTHERS[method])
    plain = save_model(tmp_path / "plain", decoded, LLAMA)
    names = {"gptq": "GPTQ", "awq": "AWQ", "compressed": "compressed-tensors", "auto-round": "GPTQ"}
    found = nf4conv.inspect(source)
    [kind] = [kind for kind in found.kinds if kind.kind.endswith("mlp.up_proj")]
    assert kind.formats == (f"{names.get(method, method)} 4-bit, groups of 32",)
    assert 4 < kind.bits_per_parameter < 6
    assert found.totals.parameters == nf4conv.inspect(plain).totals.parameters


def test_inspect_shows_what_cannot_be_decoded(tmp_path: Path):
    source, _ = write(tmp_path / "source", gptq, GPTQ | {"checkpoint_format": "marlin"})
    assert {row.stored for row in nf4conv.inspect(source).tensors} == {"float16", "I32"}


@pytest.mark.parametrize(
    ("method", "name"), [("gptq", "quantize_config.json"), ("awq", "quant_config.json")]
)
def test_old_releases_describe_it_in_a_file_of_its_own(tmp_path: Path, method: str, name: str):
    make, description = MAKERS[method]
    source, decoded = write(tmp_path / "source", make, description)
    (source / "config.json").write_text(json.dumps(LLAMA))
    fields = {key: value for key, value in description.items() if key != "quant_method"}
    (source / name).write_text(json.dumps(fields))
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert_same_tensors(tmp_path / "out", decoded)
    assert not (tmp_path / "out" / name).exists()


@pytest.mark.parametrize("method", OTHERS)
def test_adapters_are_merged(tmp_path: Path, method: str):
    source, decoded = write(tmp_path / "source", *OTHERS[method])
    plain = save_model(tmp_path / "plain", decoded, LLAMA)
    model = load(plain, dtype=torch.float32)
    train(model, tmp_path / "adapter", target_modules=["q_proj", "up_proj"])
    options = {"lora": (str(tmp_path / "adapter"),)}
    for folder in (source, plain):
        nf4conv.dequantize(folder, tmp_path / f"{folder.name}-out", **options, **CPU)
    assert_same_tensors(tmp_path / "source-out", tmp_path / "plain-out")
    assert "merged" in (tmp_path / "source-out/README.md").read_text()


@pytest.mark.parametrize("method", OTHERS)
def test_streamed_from_the_hub(tmp_path: Path, hub: Hub, method: str):
    source, decoded = write(tmp_path / "source", *OTHERS[method])
    hub.repos["org/model"] = Repo()
    hub.repos["org/model"].commit({file.name: file.read_bytes() for file in source.iterdir()})
    where = {"cache_dir": tmp_path / "cache", "stream": True}
    nf4conv.dequantize("org/model", tmp_path / "out", **CPU, **where)
    assert_same_tensors(tmp_path / "out", decoded)


# --- refusals -------------------------------------------------------------------------------------


def rotated(*locations: str) -> dict[str, Any]:
    """A transform_config of compressed-tensors."""
    applied = [{"targets": ["Linear"], "location": location} for location in locations]
    return {"config_groups": {"R": {"type": "hadamard", "apply": applied}}}


def in_place_of(new: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return new


def cut(part: torch.Tensor) -> torch.Tensor:
    return part[..., :-1].contiguous()


@pytest.mark.parametrize(
    ("make", "description", "changes", "message"),
    [
        *(
            (
                compressed,
                PACKED,
                {"weight_shape": partial(in_place_of, torch.tensor(shape)), "weight_scale": cut},
                message,
            )
            for shape, message in (
                ([128, 10**9], "weight_packed: I32 .* does not go with"),
                ([10**9, 128], "weight_packed: .* does not go with .*weight_shape"),
                ([128, -1], "weight_packed: .* does not go with .*weight_shape"),
                ([0.5, 1.0], "weight_packed: I32 .* does not go with .*weight_shape, F32"),
            )
        ),
        (
            compressed,
            PACKED,
            {"weight_zero_point": lambda _: torch.ones(16, 3, dtype=torch.int32)},
            "weight_packed: I32 .* does not go with .*weight_zero_point",
        ),
        (
            compressed,
            PACKED,
            {"weight_g_idx": lambda _: torch.zeros(127, dtype=torch.int32)},
            "weight_packed: I32 .* does not go with .*weight_g_idx",
        ),
        (gptq, GPTQ, {"qweight": lambda part: part.to(torch.int64)}, "qweight: part of a weight"),
        (
            gptq,
            GPTQ,
            {"weight": lambda _: torch.ones(2)},
            "weight: is there twice, as it is and quantized",
        ),
        (awq, AWQ, {"act.scales": lambda _: torch.ones(2)}, "act.scales: part of a weight"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, make: Any, description: dict[str, Any], changes: dict[str, Any], message: str
):
    weight = make(128, 128, dtype=torch.float16)
    for name, change in changes.items():
        if change is None:
            del weight.parts[name]
        else:
            weight.parts[name] = change(weight.parts.get(name))
    source, _ = write(tmp_path / "source", make, description, {Q: weight})
    with pytest.raises(SourceError, match=f"{FILE}: {Q}.{message}") as error:
        make_plan(source, DequantizeOptions())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (GPTQ | {"checkpoint_format": "gptq_p"}, "words of 'gptq_p'"),
        (GPTQ | {"is_marlin_format": True}, "words of 'marlin'"),
        (AWQ | {"version": "GEMV"}, "words of 'gemv'"),
        (AWQ | {"backend": "llm-awq"}, "llm-awq"),
        (AWQ | {"pack_method": "order"}, "pack_method 'order'"),
        (AWQ | {"pack_method": "reorder", "zero_point": False}, "awq, pack_method 'reorder'"),
        (AUTO_ROUND | {"packing_format": "auto_round:mlx"}, "words of 'mlx'"),
        (AUTO_ROUND | {"data_type": "mx_int"}, "data_type 'mx_int'"),
        (AUTO_ROUND | {"packing_format": "auto_round", "act_bits": 8}, "act_bits 8"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type 'mx_fp'"),
        (AUTO_ROUND | {"rotation_config": {"block_size": 32}}, "rotation_config"),
        (
            PACKED | {"transform_config": rotated("weight_input", "input")},
            "transform_config that rotates activations",
        ),
        (PACKED | {"format": "marlin-24"}, "marlin-24"),
    ],
)
def test_other_layouts_are_refused_by_name(
    tmp_path: Path, description: dict[str, Any], message: str
):
    source, _ = write(tmp_path / "source", gptq, description)
    with pytest.raises(SourceError, match=f"already quantized: .*{message}, which nf4conv does"):
        make_plan(source, DequantizeOptions())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", MAKERS)
def test_scales_that_are_no_numbers(tmp_path: Path, method: str, value: float):
    """`dequantize` gives what the method does; `quantize` refuses it and names the weight."""
    make, description = MAKERS[method]
    weight = make(128, 128, dtype=torch.float16)
    names = {"torchao": "_weight_scale", "gptq": "scales", "awq": "scales"}
    name = names.get(method, "weight_scale")
    weight.parts[name].view(-1)[5] = value
    source, _ = write(tmp_path / "source", make, description, {Q: weight})
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    decoded = load_file(tmp_path / "out" / FILE)[f"{Q}.weight"]
    assert 0 < int((~torch.isfinite(decoded)).sum()) <= 128
    with pytest.raises(SourceError, match=f"{Q}.weight: .* NaN or infinite") as error:
        nf4conv.quantize(source, tmp_path / "nf4", **CPU)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "nf4/config.json").exists()


@pytest.mark.parametrize("group", [-5, 4])
def test_a_group_index_out_of_range_is_refused(tmp_path: Path, group: int):
    weight = gptq(128, 128)
    weight.parts["g_idx"][3] = group
    source, _ = write(tmp_path / "source", gptq, GPTQ, {Q: weight})
    for command in (nf4conv.dequantize, nf4conv.quantize):
        out = tmp_path / command.__name__
        with pytest.raises(
            Nf4convError, match=f"{FILE}: {Q}.weight: its group index names"
        ) as error:
            command(source, out, **CPU)
        assert "\n" not in str(error.value)
        assert not (out / "config.json").exists()
