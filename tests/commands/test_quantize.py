"""`quantize` from a folder to a folder, on the CPU, without transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents, save_model, tensors_of
from safetensors.torch import load_file, save_file

import nf4conv
from nf4conv.codec.ops import quantize_4bit

CPU = {"device": "cpu"}

KEYS = [
    "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
    "llm_int8_skip_modules", "llm_int8_threshold", "load_in_4bit", "load_in_8bit", "quant_method",
]  # fmt: skip


def assert_is(folder: Path, name: str, weight: torch.Tensor, options: dict[str, Any]) -> None:
    """The checkpoint's tensors for a weight are those that the codec makes of it."""
    tensors = tensors_of(folder)
    packed, state = quantize_4bit(
        weight,
        options.get("quant_type", "nf4"),
        options.get("blocksize", 64),
        options.get("double_quant", True),
    )
    expected = {name: packed} | {
        f"{name}.{suffix}": part for suffix, part in state.components().items()
    }
    assert {key for key in tensors if key == name or key.startswith(f"{name}.")} == expected.keys()
    for key, part in expected.items():
        assert tensors[key].dtype == part.dtype
        assert torch.equal(tensors[key], part), key


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [32, 64, 4096])
@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
def test_weights_are_what_the_codec_makes_of_them(
    source, tmp_path, quant_type, blocksize, double_quant
):
    options = {"quant_type": quant_type, "blocksize": blocksize, "double_quant": double_quant}
    nf4conv.quantize(source, tmp_path / "out", **options, **CPU)
    for name, weight in tensors_of(source).items():
        if "proj" in name:
            assert_is(tmp_path / "out", name, weight, options)
        else:
            assert torch.equal(tensors_of(tmp_path / "out")[name], weight)


@pytest.mark.parametrize("workers", [1, 5])
@pytest.mark.parametrize("buffer_size", [1, 3 * 2**16, 10**9])
def test_bytes_depend_on_neither_workers_nor_buffers(source, tmp_path, workers, buffer_size):
    nf4conv.quantize(source, tmp_path / "expected", **CPU)
    nf4conv.quantize(
        source, tmp_path / "out", device="cpu", workers=workers, buffer_size=buffer_size
    )
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


@pytest.mark.parametrize("limit", [1, 30_000, 100_000])
def test_shards_and_index(source, tmp_path, limit):
    nf4conv.quantize(source, tmp_path / "whole", **CPU)
    nf4conv.quantize(source, tmp_path / "out", max_shard_size=limit, **CPU)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    shards = {file.name: load_file(file) for file in (tmp_path / "out").glob("*.safetensors")}
    assert index["weight_map"] == {
        name: file for file, tensors in sorted(shards.items()) for name in tensors
    }
    tensors = {name: tensor for shard in shards.values() for name, tensor in shard.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    expected = load_file(tmp_path / "whole/model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert not (tmp_path / "whole/model.safetensors.index.json").exists()


def test_config_and_auxiliary_files(source, tmp_path):
    for name in (
        "tokenizer.model",
        "chat_template.jinja",
        "LICENSE",
        "modeling_own.py",
        "code/deep.py",
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    for name in (
        "hf_quant_config.json",
        "pytorch_model.bin",
        "model.gguf",
        ".gitattributes",
        "README.md",
        "SHA256SUMS",
        "original/a.pth",
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text('{"must not": "come along"}')
    nf4conv.quantize(source, tmp_path / "out", **CPU)
    assert sorted(contents(tmp_path / "out")) == [
        "LICENSE", "README.md", "chat_template.jinja", "code/deep.py", "config.json",
        "model.safetensors", "modeling_own.py", "nf4conv.json", "tokenizer.json", "tokenizer.model",
    ]  # fmt: skip
    ours, _, theirs = (tmp_path / "out/README.md").read_text().rpartition("\n---\n")
    assert "must not" not in ours
    assert "must not" in theirs  # what the author wrote
    config = json.loads((tmp_path / "out/config.json").read_text())
    quantization = config.pop("quantization_config")
    assert sorted(quantization) == KEYS
    assert quantization["llm_int8_threshold"] == 6.0
    assert isinstance(quantization["llm_int8_threshold"], float)
    assert quantization["bnb_4bit_compute_dtype"] == "bfloat16"
    assert "lm_head" in quantization["llm_int8_skip_modules"]
    assert config.items() >= json.loads((source / "config.json").read_text()).items()


def write_single(folder: Path, tensors: dict[str, torch.Tensor], **config: str) -> Path:
    save_model(
        folder, tensors, {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **config}
    )
    return folder


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
def test_a_config_without_dtype_leaves_it_to_what_most_bytes_are_stored_in(tmp_path, stored):
    other = torch.float16 if stored == "float32" else torch.float32
    tensors = {UP: random(256, 128).to(getattr(torch, stored)), DOWN: random(64, 64).to(other)}
    nf4conv.quantize(write_single(tmp_path / "source", tensors), tmp_path / "out", **CPU)
    for name, weight in tensors.items():
        assert_is(tmp_path / "out", name, weight.to(getattr(torch, stored)), {})
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == stored
    expected = "bfloat16" if stored == "float32" else stored  # float32 is slow to compute in
    assert config["quantization_config"]["bnb_4bit_compute_dtype"] == expected


@pytest.mark.parametrize(
    "stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("workers", [1, 3])
def test_weights_in_many_pieces_are_cast_piece_by_piece(tmp_path, stored, dtype, workers):
    """Pieces of 64 KiB: 11 to 41 of each tensor, the last one partial, absmax gathered from all of
    them.
    """
    tensors = {
        UP: random(1003, 333).to(stored),
        "model.embed_tokens.weight": random(3001, 111).to(stored),
    }
    options = {"dtype": dtype}
    source = write_single(tmp_path / "source", tensors)
    nf4conv.quantize(
        source, tmp_path / "out", **options, device="cpu", workers=workers, buffer_size=1
    )
    assert_is(tmp_path / "out", UP, tensors[UP].to(getattr(torch, dtype)), options)
    kept = tensors_of(tmp_path / "out")["model.embed_tokens.weight"]
    assert kept.dtype == getattr(torch, dtype)
    assert torch.equal(kept, tensors["model.embed_tokens.weight"].to(kept.dtype))


@pytest.mark.parametrize("parts", [2, 5])
def test_tensors_do_not_depend_on_the_source_s_files(tmp_path, parts):
    tensors = {
        f"model.layers.{layer}.mlp.up_proj.weight": random(128 + layer, 192).half()
        for layer in range(9)
    }
    tensors["model.norm.weight"] = random(64).half()
    whole = write_single(tmp_path / "whole", tensors)
    (tmp_path / "parts").mkdir()
    weight_map = {}
    for number in range(parts):
        held = {name: tensors[name] for name in sorted(tensors, reverse=True)[number::parts]}
        file = f"model-{number + 1:05d}-of-{parts:05d}.safetensors"
        save_file(held, tmp_path / "parts" / file)
        weight_map |= dict.fromkeys(held, file)
    (tmp_path / "parts/model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
    (tmp_path / "parts/config.json").write_bytes((whole / "config.json").read_bytes())
    for source in ("whole", "parts"):
        nf4conv.quantize(tmp_path / source, tmp_path / f"{source}-out", **CPU)
    left, right = tensors_of(tmp_path / "whole-out"), tensors_of(tmp_path / "parts-out")
    assert left.keys() == right.keys()
    assert all(
        torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)) for name in left
    )
    assert (tmp_path / "whole-out/config.json").read_bytes() == (
        tmp_path / "parts-out/config.json"
    ).read_bytes()


def test_what_is_no_weight_is_kept_bit_for_bit(tmp_path):
    """NaN, infinity and -0.0 included: only weights that are to be packed must be finite."""
    kept = {
        "ids": torch.arange(7),
        "mask": torch.tensor([True, False, True]),
        "bytes": torch.arange(256, dtype=torch.int64).to(torch.uint8),
        "short": torch.tensor([-5, 300], dtype=torch.int16),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(-0.0),
        "model.layers.0.mlp.up_proj.bias": torch.tensor(
            [torch.nan, torch.inf, -torch.inf, 1e-45]
        ).repeat(16),
        "model.layers.0.input_layernorm.weight": torch.tensor([0x7FC12345], dtype=torch.int32).view(
            torch.float32
        ),
    }
    source = write_single(tmp_path / "source", kept | {UP: random(64, 64)})
    nf4conv.quantize(source, tmp_path / "out", **CPU)
    found = tensors_of(tmp_path / "out")
    for name, tensor in kept.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes(), name


def test_include_and_exclude(source, tmp_path):
    options = {
        "include": ("*.up_proj.*", "model.layers.0.*"),
        "exclude": ("*.3.*", "model.layers.4.mlp.*"),
    }
    nf4conv.quantize(source, tmp_path / "out", **options, **CPU)
    packed = {
        name.removesuffix(".absmax")
        for name in tensors_of(tmp_path / "out")
        if name.endswith(".weight.absmax")
    }
    assert packed == {
        "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight",
        *(f"model.layers.{layer}.mlp.up_proj.weight" for layer in (1, 2, 5)),
    }  # fmt: skip


def test_a_single_file_and_transposed_weights(tmp_path):
    """GPT-2 stores [in, out]; a single file takes the config that lies beside it."""
    weight = torch.randn(64, 192, generator=torch.Generator().manual_seed(0))
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "torch_dtype": "float32"}
    save_model(tmp_path / "source", {"transformer.h.0.attn.c_attn.weight": weight}, config)
    nf4conv.quantize(tmp_path / "source/model.safetensors", tmp_path / "out", **CPU)
    assert_is(
        tmp_path / "out",
        "transformer.h.0.attn.c_attn.weight",
        weight.t().contiguous(),
        {},
    )
