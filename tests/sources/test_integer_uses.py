"""What is done with checkpoints of packed integers beside decoding: each command, each option.

The measure is the checkpoint that they decode to: whatever is made of both has the same bytes.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import load, train
from api import (
    DequantizeOptions,
    QuantizeOptions,
    RunOptions,
    dequantize_checkpoint,
    describe_plan,
    inspect_checkpoint,
    plan_dequantization,
    quantize_checkpoint,
)
from calibrations import make_model, make_text
from evaluated import evaluated
from hub_server import Hub, Repo
from integers import Weight, awq, compressed, gptq, torchao
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from nf4conv.errors import SourceError
from nf4conv.options import SourceOptions

CPU = RunOptions(device="cpu", workers=2, buffer_size=1)
FILE = "model.safetensors"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*vision.*"],
}
MAKERS = {"gptq": (gptq, GPTQ), "awq": (awq, AWQ), "compressed": (compressed, PACKED)}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:gptqmodel",
    "bits": 4,
    "group_size": 32,
}
TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 32}}},
}
MAKERS_AND_OTHERS = MAKERS | {
    "auto-round": (partial(gptq, version=2), AUTO_ROUND),
    "torchao": (torchao, TORCHAO),
}


def write(
    folder: Path,
    tensors: dict[str, torch.Tensor | Weight],
    config: dict[str, Any],
    description: dict[str, Any],
) -> tuple[Path, Path]:
    """Writes a checkpoint with quantized weights, and the one that it decodes to."""
    stored: dict[str, torch.Tensor] = {}
    decoded: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Weight):
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{suffix}": part for suffix, part in tensor.parts.items()}
            decoded[name] = tensor.decoded
        else:
            stored[name] = decoded[name] = tensor
    plain = folder.with_name(f"{folder.name}-plain")
    for place, content, more in (
        (folder, stored, {"quantization_config": description}),
        (plain, decoded, {}),
    ):
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config | more))
        save_file({name: part.clone() for name, part in content.items()}, place / FILE)
    return folder, plain


def llama(make: Any, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor | Weight]:
    torch.manual_seed(0)
    found: dict[str, torch.Tensor | Weight] = {}
    for name, tensor in LlamaForCausalLM(LLAMA).state_dict().items():
        is_linear = name.endswith("_proj.weight")
        found[name] = make(*tensor.shape, dtype=dtype) if is_linear else tensor.to(dtype)
    return found


LLAMA = LlamaConfig(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=96,
    dtype="float16",
    pad_token_id=0,
)
LLAMA_CONFIG = LLAMA.to_dict() | {"architectures": ["LlamaForCausalLM"]}


def same(one: Path, other: Path) -> None:
    """Asserts that two folders hold the same tensors, whatever files they are in."""
    tensors: list[dict[str, torch.Tensor]] = []
    for folder in (one, other):
        found: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            found |= load_file(file)
        tensors.append(found)
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert tensor.dtype == tensors[1][name].dtype, name
        same_bytes = torch.equal(
            tensor.reshape(-1).view(torch.uint8), tensors[1][name].reshape(-1).view(torch.uint8)
        )
        assert same_bytes, name


@pytest.mark.parametrize("method", MAKERS_AND_OTHERS)
def test_inspect_names_method_bits_and_groups(tmp_path: Path, method: str):
    make, description = MAKERS_AND_OTHERS[method]
    source, plain = write(tmp_path / "source", llama(make), LLAMA_CONFIG, description)
    found = inspect_checkpoint(source)
    packing = {
        "gptq": "GPTQ",
        "awq": "AWQ",
        "compressed": "compressed-tensors",
        "auto-round": "GPTQ",
    }.get(method, method)
    [kind] = [kind for kind in found.kinds if kind.kind.endswith("mlp.up_proj")]
    assert kind.formats == (f"{packing} 4-bit, groups of 32",)
    assert 4 < kind.bits_per_parameter < 6
    assert found.totals.parameters == inspect_checkpoint(plain).totals.parameters


def test_inspect_shows_what_cannot_be_decoded(tmp_path: Path):
    tensors = llama(gptq)
    source, _ = write(
        tmp_path / "source", tensors, LLAMA_CONFIG, GPTQ | {"checkpoint_format": "marlin"}
    )
    formats = {row.stored for row in inspect_checkpoint(source).tensors}
    assert formats == {"float16", "I32"}


def test_a_dry_run_knows_the_size(tmp_path: Path):
    source, _ = write(tmp_path / "source", llama(gptq), LLAMA_CONFIG, GPTQ)
    plan = plan_dequantization(source)
    report = dequantize_checkpoint(source, tmp_path / "out", None, CPU)
    assert plan.totals().bytes_after == report.run.bytes_after
    assert describe_plan(plan).notes[0].startswith("the source is quantized (gptq): 14 of GPTQ")


def test_old_releases_describe_gptq_and_awq_in_a_file_of_its_own(tmp_path: Path):
    for method, (make, description) in {"gptq": (gptq, GPTQ), "awq": (awq, AWQ)}.items():
        source, plain = write(tmp_path / method, llama(make), LLAMA_CONFIG, {})
        (source / "config.json").write_text(json.dumps(LLAMA_CONFIG))
        name = {"gptq": "quantize_config.json", "awq": "quant_config.json"}[method]
        fields = {key: value for key, value in description.items() if key != "quant_method"}
        (source / name).write_text(json.dumps(fields))
        dequantize_checkpoint(source, tmp_path / f"{method}-out", None, CPU)
        same(tmp_path / f"{method}-out", plain)
        assert not (tmp_path / f"{method}-out" / name).exists()


@pytest.mark.parametrize("method", MAKERS_AND_OTHERS)
def test_adapters_are_merged(tmp_path: Path, method: str):
    make, description = MAKERS_AND_OTHERS[method]
    source, plain = write(tmp_path / "source", llama(make), LLAMA_CONFIG, description)
    train(
        load(plain, dtype=torch.float32), tmp_path / "adapter", target_modules=["q_proj", "up_proj"]
    )
    options = DequantizeOptions(lora=(str(tmp_path / "adapter"),))
    for folder in (source, plain):
        dequantize_checkpoint(folder, tmp_path / f"{folder.name}-out", options, CPU)
    same(tmp_path / "source-out", tmp_path / "source-plain-out")
    assert "merged" in (tmp_path / "source-out/README.md").read_text()


@pytest.mark.parametrize("method", MAKERS)
def test_parts_join_to_the_whole(tmp_path: Path, method: str):
    make, description = MAKERS[method]
    source, plain = write(tmp_path / "source", llama(make), LLAMA_CONFIG, description)
    options = DequantizeOptions(max_shard_size=200_000)
    for part in ("1/2", "2/2"):
        run = replace(CPU, part=part)
        dequantize_checkpoint(source, tmp_path / "out", options, run)
    same(tmp_path / "out", plain)


@pytest.mark.parametrize("method", MAKERS_AND_OTHERS)
def test_streamed_from_the_hub(tmp_path: Path, hub: Hub, method: str):
    make, description = MAKERS_AND_OTHERS[method]
    source, plain = write(tmp_path / "source", llama(make), LLAMA_CONFIG, description)
    hub.repos["org/model"] = Repo()
    hub.repos["org/model"].commit({file.name: file.read_bytes() for file in source.iterdir()})
    where = SourceOptions(cache_dir=tmp_path / "cache", stream=True)
    dequantize_checkpoint("org/model", tmp_path / "out", None, CPU, where=where)
    same(tmp_path / "out", plain)


def test_experts_one_by_one_as_in_kimi_k2(tmp_path: Path):
    """Experts in groups of 32, everything else in 16 bits, packed straight from their integers."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "dtype": "bfloat16",
        "n_routed_experts": 4,
        "num_hidden_layers": 2,
        "moe_intermediate_size": 64,
        "hidden_size": 128,
    }
    bf16 = torch.bfloat16
    layer = "model.layers.1"
    tensors: dict[str, torch.Tensor | Weight] = {
        f"{layer}.self_attn.o_proj.weight": torch.randn(128, 128).to(bf16),
        f"{layer}.mlp.gate.weight": torch.randn(4, 128).to(bf16),
        f"{layer}.mlp.gate.e_score_correction_bias": torch.randn(4),
        "vision_tower.blocks.0.wqkv.weight": torch.randn(96, 32).to(bf16),
    }
    for expert in range(4):
        for name, shape in {
            "gate_proj": (64, 128),
            "up_proj": (64, 128),
            "down_proj": (128, 64),
        }.items():
            weight = compressed(*shape, dtype=bf16)
            tensors[f"{layer}.mlp.experts.{expert}.{name}.weight"] = weight
    source, plain = write(tmp_path / "source", tensors, config, PACKED)
    options = QuantizeOptions(moe="packed")
    for folder in (source, plain):
        quantize_checkpoint(folder, tmp_path / f"{folder.name}-out", options, CPU)
    same(tmp_path / "source-out", tmp_path / "source-plain-out")
    packed = load_file(tmp_path / "source-out" / FILE)
    assert f"{layer}.mlp.experts.3.down_proj.weight.absmax" in packed
    dequantize_checkpoint(source, tmp_path / "whole", None, CPU)
    same(tmp_path / "whole", plain)


def test_evaluate_says_what_to_give_instead(tmp_path: Path):
    """transformers loads no GPTQ without a package that the tests do not install."""
    source, plain = write(tmp_path / "source", llama(gptq), LLAMA_CONFIG, GPTQ)
    np.save(tmp_path / "ids.npy", np.arange(256, dtype=np.int32) % 96)
    options = {"text": tmp_path / "ids.npy"}
    said = r"source: transformers cannot load it: .+; `nf4conv dequantize` makes a 16-bit model"
    with pytest.raises(SourceError, match=said):
        evaluated(plain, source, **options)


def test_calibrated_by_a_text(tmp_path: Path):
    """It reads the decoded weights, as from any other source."""
    model = load_all(make_model(tmp_path / "model"))
    tensors: dict[str, torch.Tensor | Weight] = {}
    for name, tensor in model.items():
        is_linear = name.endswith("_proj.weight")
        tensors[name] = gptq(*tensor.shape, dtype=torch.bfloat16) if is_linear else tensor
    config = json.loads((tmp_path / "model/config.json").read_text())
    source, plain = write(tmp_path / "source", tensors, config, GPTQ)
    text = make_text(tmp_path / "ids.npy")
    options = QuantizeOptions(calibrate=str(text), calibration_tokens=512)
    for folder in (source, plain):
        run = RunOptions(device="cpu")
        quantize_checkpoint(folder, tmp_path / f"{folder.name}-out", options, run)
    same(tmp_path / "source-out", tmp_path / "source-plain-out")


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found
