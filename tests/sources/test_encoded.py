"""Quantized sources: the output has the bytes that the decoded checkpoint would give."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import integers
import pytest
import torch
from checkpoints import save_model
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import nf4conv
from nf4conv import dequantize_4bit, quantize_4bit
from nf4conv.errors import SourceError

BF16 = torch.bfloat16
Q, UP, DOWN = (
    f"model.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
)
SHAPES = {Q: (64, 128), UP: (320, 128), DOWN: (128, 320)}
PLAIN = {
    "model.embed_tokens.weight": torch.randn(
        96, 128, generator=torch.Generator().manual_seed(7)
    ).bfloat16(),
    "model.layers.0.input_layernorm.weight": torch.ones(128).bfloat16(),
    "lm_head.weight": torch.randn(96, 128, generator=torch.Generator().manual_seed(8)).bfloat16(),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "dtype": "bfloat16",
}


class Encoded(NamedTuple):
    """A quantized checkpoint.

    Attributes:
        stored: tensors of the file.
        decoded: what those that are not PLAIN stand for.
        description: quantization_config, or None.
    """

    stored: dict[str, torch.Tensor]
    decoded: dict[str, torch.Tensor]
    description: dict[str, Any] | None = None


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def random_bytes(*shape: int, high: int = 256) -> torch.Tensor:
    return torch.randint(
        0, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape))
    )


def spread(scale: torch.Tensor, shape: tuple[int, int], block: tuple[int, int]) -> torch.Tensor:
    """[rows, columns] of scales, an element at a time."""
    return torch.tensor(
        [[scale[i // block[0], j // block[1]] for j in range(shape[1])] for i in range(shape[0])]
    )


def of_layers(
    make: Callable[..., tuple[dict[str, torch.Tensor], torch.Tensor]],
    description: dict[str, Any] | None = None,
    **more: torch.Tensor,
) -> Encoded:
    """Encodes all weights by a function of their shapes; `more` are parts of Q alone."""
    stored, decoded = {f"{Q}.{name}": part for name, part in more.items()}, {}
    for module, shape in SHAPES.items():
        parts, weight = make(*shape)
        stored |= {f"{module}.{name}": part for name, part in parts.items()}
        decoded[f"{module}.weight"] = weight.to(BF16)
    return Encoded(stored, decoded, description)


def fp8(*shape: int) -> torch.Tensor:
    return random(*shape).to(torch.float8_e4m3fn)


def fp8_blocks() -> Encoded:
    def make(rows: int, columns: int) -> Any:
        values, scale = fp8(rows, columns), random(-(-rows // 128), -(-columns // 128)).abs()
        decoded = values.float() * spread(scale, (rows, columns), (128, 128))
        return {"weight": values, "weight_scale_inv": scale}, decoded

    return of_layers(make, {"quant_method": "fp8", "weight_block_size": [128, 128]})


def fp8_blocks_of_powers_of_two() -> Encoded:
    def make(rows: int, columns: int) -> Any:
        values = fp8(rows, columns)
        exponents = random_bytes(-(-rows // 64), -(-columns // 32), high=8) + 124
        scale = torch.exp2(exponents.float() - 127)
        decoded = values.float() * spread(scale, (rows, columns), (64, 32))
        return {"weight": values, "scale": exponents.view(torch.float8_e8m0fnu)}, decoded

    description = {"quant_method": "fp8", "weight_block_size": [64, 32], "scale_fmt": "ue8m0"}
    return of_layers(make, description)


def fp8_with(
    scale_of: Callable[[int], torch.Tensor],
    suffix: str,
    description: dict[str, Any] | None,
    **more: torch.Tensor,
) -> Encoded:
    def make(rows: int, columns: int) -> Any:
        values, scale = fp8(rows, columns), scale_of(rows)
        return {"weight": values, suffix: scale}, values.float() * scale.float().view(-1, 1)

    return of_layers(make, description, **more)


def fp8_per_tensor() -> Encoded:
    more = {"activation_scale": torch.tensor(1.0)}
    description = {"quant_method": "fp8"}
    return fp8_with(lambda _: torch.tensor(0.25), "weight_scale_inv", description, **more)


def fp8_fbgemm() -> Encoded:
    description = {"quant_method": "fbgemm_fp8"}
    return fp8_with(lambda rows: random(rows, 1).abs(), "weight_scale", description)


def fp8_compressed_tensors() -> Encoded:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    description = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    encoded = fp8_with(
        lambda rows: random(rows, 1).abs().to(BF16),
        "weight_scale",
        description,
        input_scale=torch.ones(1),
    )
    cache = {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    return encoded._replace(stored=encoded.stored | cache)


def fp8_modelopt() -> Encoded:
    description = {"quant_method": "modelopt", "quant_algo": "FP8"}
    more = {"input_scale": torch.tensor(1.0)}
    return fp8_with(lambda _: torch.tensor(0.3), "weight_scale", description, **more)


def fp8_casts() -> Encoded:
    def make(rows: int, columns: int) -> Any:
        values = random(rows, columns).to(torch.float8_e5m2)
        return {"weight": values}, values

    return of_layers(make)


def int8_compressed_tensors() -> Encoded:
    def make(rows: int, columns: int) -> Any:
        values, scale = random_bytes(rows, columns).view(torch.int8), random(rows, 1).abs()
        return {"weight": values, "weight_scale": scale}, values.float() * scale

    return of_layers(make, {"quant_method": "compressed-tensors", "format": "int-quantized"})


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def unpacked(pairs: torch.Tensor) -> torch.Tensor:
    return torch.stack([E2M1[(pairs & 15).long()], E2M1[(pairs >> 4).long()]], dim=-1).flatten(-2)


def nvfp4_compressed_tensors() -> Encoded:
    def make(rows: int, columns: int) -> Any:
        pairs, divisor = random_bytes(rows, columns // 2), torch.tensor([17.0])
        scale = random(rows, columns // 16).abs().to(torch.float8_e4m3fn)
        parts = {"weight_packed": pairs, "weight_scale": scale, "weight_global_scale": divisor}
        factors = (scale.float() / divisor).repeat_interleave(16, dim=1)
        return parts | {"input_global_scale": torch.ones(1)}, unpacked(pairs) * factors

    description = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    return of_layers(make, description)


def nvfp4_modelopt() -> Encoded:
    def make(rows: int, columns: int) -> Any:
        pairs, factor = random_bytes(rows, columns // 2), torch.tensor(0.07)
        scale = random(rows, columns // 16).abs().to(torch.float8_e4m3fn)
        parts = {"weight": pairs, "weight_scale": scale, "weight_scale_2": factor}
        factors = (scale.float() * factor).repeat_interleave(16, dim=1)
        return parts | {"input_scale": torch.tensor(1.0)}, unpacked(pairs) * factors

    return of_layers(make, {"quant_method": "modelopt_fp4"})


def mxfp4_rows() -> Encoded:
    """Encodes experts as DeepSeek-V4 does."""

    def make(rows: int, columns: int) -> Any:
        pairs = random_bytes(rows, columns // 2)
        exponents = random_bytes(rows, columns // 32, high=8) + 120
        factors = torch.exp2(exponents.float() - 127).repeat_interleave(32, dim=1)
        scale = exponents.view(torch.float8_e8m0fnu)
        return {"weight": pairs.view(torch.int8), "scale": scale}, unpacked(pairs) * factors

    description = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    return of_layers(make, description)


def mxfp4_experts() -> Encoded:
    """Encodes experts as gpt-oss does: stacked and stored transposed. They stay in 16 bits."""
    experts = "model.layers.0.mlp.experts"
    blocks, scales = random_bytes(3, 64, 4, 16), random_bytes(3, 64, 4, high=8) + 120
    bias = random(3, 64).to(BF16)
    stored = {f"{experts}.gate_up_proj_blocks": blocks, f"{experts}.gate_up_proj_scales": scales}
    decoded = {f"{experts}.gate_up_proj": convert_moe_packed_tensors(blocks, scales)}
    weight = {f"{Q}.weight": random(64, 128).to(BF16), f"{experts}.gate_up_proj_bias": bias}
    return Encoded(
        stored | weight,
        decoded | weight,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    )


def bitsandbytes_4bit() -> Encoded:
    def make(*shape: int) -> Any:
        weight = random(*shape).to(BF16)
        packed, state = quantize_4bit(weight, quant_type="fp4", double_quant=shape != SHAPES[Q])
        components = {f"weight.{suffix}": part for suffix, part in state.components().items()}
        return {"weight": packed} | components, dequantize_4bit(packed, state)

    return of_layers(make, {"quant_method": "bitsandbytes", "load_in_4bit": True})


def bitsandbytes_8bit() -> Encoded:
    def make(rows: int, columns: int) -> Any:
        values, scale = random_bytes(rows, columns).view(torch.int8), random(rows).abs()
        parts = {
            "weight": values,
            "SCB": scale,
            "weight_format": torch.zeros((), dtype=torch.uint8),
        }
        return parts, values.float() * scale.view(-1, 1) * (1 / 127)

    return of_layers(make, {"quant_method": "bitsandbytes", "load_in_8bit": True})


def integer_weights(
    weight_of: Callable[..., integers.Weight], description: dict[str, Any], **options: Any
) -> Encoded:
    """Encodes all weights; in the dtype of the config, so that nothing is cast to another."""

    def make(*shape: int) -> Any:
        weight = weight_of(*shape, dtype=BF16, **options)
        return weight.parts, weight.decoded

    return of_layers(make, description)


def pack_quantized(bits: int, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def int4_compressed_tensors() -> Encoded:
    return integer_weights(integers.compressed, pack_quantized(4, group_size=32))


def int4_compressed_tensors_with_zeros() -> Encoded:
    encoded = integer_weights(
        integers.compressed,
        pack_quantized(4, group_size=32),
        is_symmetric=False,
        is_reordered=True,
    )
    kv_cache = {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    return encoded._replace(stored=encoded.stored | kv_cache)


def int8_compressed_tensors_in_words() -> Encoded:
    description = pack_quantized(8, strategy="channel")
    return integer_weights(
        integers.compressed, description, bits=8, group_size=None, is_symmetric=False
    )


def gptq_4bit() -> Encoded:
    encoded = integer_weights(
        integers.gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    )
    bias = random(64).to(BF16)
    return Encoded(
        encoded.stored | {f"{Q}.bias": bias}, encoded.decoded | {f"{Q}.bias": bias}, encoded[2]
    )


def gptq_3bit_in_another_order() -> Encoded:
    description = {"quant_method": "gptq", "bits": 3, "group_size": 64, "desc_act": True}
    return integer_weights(
        integers.gptq,
        description | {"checkpoint_format": "gptq_v2"},
        bits=3,
        group_size=64,
        version=2,
        is_reordered=True,
    )


def awq_4bit() -> Encoded:
    description = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    return integer_weights(integers.awq, description)


ENCODINGS = [
    fp8_blocks,
    fp8_blocks_of_powers_of_two,
    fp8_per_tensor,
    fp8_fbgemm,
    fp8_compressed_tensors,
    fp8_modelopt,
    fp8_casts,
    int8_compressed_tensors,
    nvfp4_compressed_tensors,
    nvfp4_modelopt,
    mxfp4_rows,
    mxfp4_experts,
    int4_compressed_tensors,
    int4_compressed_tensors_with_zeros,
    int8_compressed_tensors_in_words,
    gptq_4bit,
    gptq_3bit_in_another_order,
    awq_4bit,
    bitsandbytes_4bit,
    bitsandbytes_8bit,
]


def write(
    folder: Path, tensors: dict[str, torch.Tensor], description: dict[str, Any] | None = None
) -> Path:
    config = CONFIG | ({} if description is None else {"quantization_config": description})
    return save_model(folder, tensors, config)


def quantized(source: Path, **options: Any) -> dict[str, torch.Tensor]:
    out = source.with_name(f"{source.name}-out")
    run = {"device": "cpu", "workers": 2, "buffer_size": 1, "overwrite": out.exists()}
    nf4conv.quantize(source, out, **options, **run)
    return load_file(out / "model.safetensors")


def same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == expected[name].dtype, name
        assert tensor.shape == expected[name].shape, name
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


@pytest.mark.parametrize("encode", ENCODINGS, ids=lambda encode: encode.__name__)
def test_a_quantized_source_gives_what_its_decoded_form_gives(
    tmp_path: Path, encode: Callable[[], Encoded]
):
    encoded = encode()
    source = write(tmp_path / "encoded", PLAIN | encoded.stored, encoded.description)
    plain = write(tmp_path / "plain", PLAIN | encoded.decoded)
    # what is in 4 bits already would otherwise stay in its own format
    same_tensors(
        quantized(source, quant_type="nf4", blocksize=64, double_quant=True), quantized(plain)
    )
    config = json.loads((tmp_path / "encoded-out/config.json").read_text())
    assert config == json.loads((tmp_path / "plain-out/config.json").read_text())
    blobs = [
        name
        for name in load_file(tmp_path / "encoded-out/model.safetensors")
        if "quant_state" in name
    ]
    assert blobs, "nothing was packed"


@pytest.mark.parametrize("encode", ENCODINGS, ids=lambda encode: encode.__name__)
def test_what_was_packed_from_a_quantized_source_verifies_against_it(
    tmp_path: Path, encode: Callable[[], Encoded]
):
    encoded = encode()
    source = write(tmp_path / "encoded", PLAIN | encoded.stored, encoded.description)
    quantized(source, exclude=("*up_proj.weight",))
    run = {"device": "cpu", "buffer_size": 1}
    report = nf4conv.verify(tmp_path / "encoded-out", source=source, exact=True, **run)
    assert report.passed, [finding.line() for finding in report.findings]
    assert report.identical


@pytest.mark.parametrize("encode", [fp8_blocks, nvfp4_modelopt], ids=lambda encode: encode.__name__)
def test_weights_that_are_kept_are_stored_decoded(tmp_path: Path, encode: Callable[[], Encoded]):
    encoded = encode()
    source = write(tmp_path / "encoded", PLAIN | encoded.stored, encoded.description)
    kept = quantized(source, exclude=("*q_proj*", "*down_proj*"))
    for name in (f"{Q}.weight", f"{DOWN}.weight"):
        assert torch.equal(kept[name].view(torch.uint8), encoded.decoded[name].view(torch.uint8)), (
            name
        )


def test_parts_of_a_weight_in_different_files(tmp_path: Path):
    """DeepSeek's scales are not always beside their weights."""
    encoded = fp8_blocks()
    source = write(tmp_path / "encoded", PLAIN, encoded.description)
    weights = {name: tensor for name, tensor in encoded.stored.items() if not name.endswith("_inv")}
    scales = {name: tensor for name, tensor in encoded.stored.items() if name.endswith("_inv")}
    weight_map = {}
    (source / "model.safetensors").unlink()
    for number, tensors in enumerate((scales, PLAIN, weights), start=1):
        save_file(tensors, source / f"model-0000{number}-of-00003.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-0000{number}-of-00003.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    same_tensors(quantized(source), quantized(write(tmp_path / "plain", PLAIN | encoded.decoded)))


def test_modelopts_file_of_its_own_names_the_method(tmp_path: Path):
    encoded = nvfp4_modelopt()
    source = write(tmp_path / "encoded", PLAIN | encoded.stored)
    (source / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "NVFP4"}})
    )
    [note] = [note for note in nf4conv.plan_quantize(source).made.notes if "quantized" in note]
    assert note == "the source is quantized (modelopt): 3 of fp4"
    same_tensors(quantized(source), quantized(write(tmp_path / "plain", PLAIN | encoded.decoded)))
    assert not (tmp_path / "encoded-out/hf_quant_config.json").exists()


def test_float16_checkpoints_decode_to_float16(tmp_path: Path):
    encoded = bitsandbytes_8bit()
    source = write(tmp_path / "encoded", PLAIN | encoded.stored, encoded.description)
    (source / "config.json").write_text(json.dumps(CONFIG | {"dtype": "float16"}))
    values, scale = encoded.stored[f"{Q}.weight"], encoded.stored[f"{Q}.SCB"]
    kept = quantized(source, exclude=("*q_proj*",))
    expected = (values.float() * scale.view(-1, 1) * (1 / 127)).half()
    assert torch.equal(kept[f"{Q}.weight"], expected)


def test_llama_4_experts_in_fp8_are_split(tmp_path: Path):
    """fbgemm stores the stack [expert, in, 2 × intermediate] with a scale for each output."""
    name = "model.layers.0.feed_forward.experts.gate_up_proj"
    values, scale = random(2, 64, 256).to(torch.float8_e4m3fn), random(2, 1, 256).abs()
    down = {"model.layers.0.feed_forward.experts.down_proj": random(2, 128, 64).to(BF16)}
    decoded = {name: (values.float() * scale).to(BF16)}
    config = {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "dtype": "bfloat16",
    }
    source = write(tmp_path / "encoded", down | {name: values, f"{name}_scale": scale})
    plain = write(tmp_path / "plain", down | decoded)
    for folder in (source, plain):
        (folder / "config.json").write_text(json.dumps(config))
    expected = quantized(plain)
    assert "model.layers.0.feed_forward.experts.1.up_proj.weight.absmax" in expected
    same_tensors(quantized(source), expected)


def test_a_nan_in_an_encoded_weight_is_found(tmp_path: Path):
    encoded = fp8_blocks()
    encoded.stored[f"{UP}.weight"].view(torch.uint8)[3, 5] = 0x7F
    source = write(tmp_path / "encoded", PLAIN | encoded.stored, encoded.description)
    with pytest.raises(SourceError, match=rf"{UP}.weight: 1 of 40,960 values are NaN or infinite"):
        quantized(source)
    kept = quantized(source, exclude=(f"{UP}.weight",))
    assert kept[f"{UP}.weight"].dtype == BF16
    assert int(torch.isnan(kept[f"{UP}.weight"]).sum()) == 1


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["hqq", "aqlm", "marlin", "gguf", "never-heard-of"])
@pytest.mark.parametrize("nested", [False, True], ids=["top", "text_config"])
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str, nested: bool):
    source = write(tmp_path / "source", PLAIN)
    description = {"quantization_config": {"quant_method": method}}
    (source / "config.json").write_text(
        json.dumps(CONFIG | ({"text_config": description} if nested else description))
    )
    with pytest.raises(
        SourceError,
        match=f"source: already quantized: quant_method {method}, which nf4conv does not decode",
    ):
        nf4conv.plan_quantize(source)


INT4 = torch.zeros(64, 16, dtype=torch.int32)


@pytest.mark.parametrize(
    ("tensors", "description", "message"),
    [
        (
            {f"{Q}.qweight": INT4, f"{Q}.qzeros": INT4.clone()},
            None,
            f"{Q}.qweight: part of a weight that is already quantized",
        ),
        (
            {f"{Q}.weight_packed": INT4, f"{Q}.weight_scale": torch.ones(64, 1)},
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            rf"{Q}.weight_packed: I32 \[64, 16\] and its other tensors fit no compressed-tensors",
        ),
        (
            {f"{Q}.weight": random_bytes(64, 64), f"{Q}.weight_scale": torch.ones(64, 1)},
            {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
            f"{Q}.weight_scale: part of a weight",
        ),
        (
            {f"{Q}.weight": random(64, 64).to(torch.float8_e4m3fn)},
            {"quant_method": "fp8"},
            f"{Q}.weight: F8_E4M3 without a scale; the checkpoint is incomplete",
        ),
        (
            {
                f"{Q}.weight": random_bytes(64, 64).view(torch.int8),
                f"{Q}.weight_scale": torch.ones(64, 1),
            }
            | {f"{Q}.weight_zero_point": torch.ones(64, 1)},
            {"quant_method": "compressed-tensors", "format": "int-quantized"},
            rf"{Q}.weight: I8 \[64, 64\] does not go with .*weight_zero_point, F32",
        ),
        (
            {f"{Q}.weight": random_bytes(64, 64).view(torch.int8), f"{Q}.SCB": torch.ones(64)}
            | {f"{Q}.weight_format": torch.tensor(2, dtype=torch.uint8)},
            {"quant_method": "bitsandbytes"},
            f"{Q}.weight_format: a layout for one kind of GPU",
        ),
        (
            {f"{Q}.weight": random_bytes(64, 1), f"{Q}.weight.absmax": torch.ones(2)}
            | {f"{Q}.weight.quant_state.bitsandbytes__nf4": torch.zeros(5, dtype=torch.uint8)},
            {"quant_method": "bitsandbytes"},
            f"{Q}.weight.quant_state.bitsandbytes__nf4: not JSON",
        ),
        ({f"{Q}.weight.absmax": torch.ones(2)}, None, f"{Q}.weight.absmax: part of a weight"),
        (
            {f"{Q}.weight_packed": INT4, f"{Q}.weight_scale": torch.ones(64, 0)}
            | {f"{Q}.weight_shape": torch.tensor([64, 128])},
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            rf"{Q}.weight_packed: I32 .* does not go with .*weight_scale, F32 \[64, 0\]",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    description: dict[str, Any] | None,
    message: str,
):
    with pytest.raises(SourceError, match=message):
        nf4conv.plan_quantize(write(tmp_path / "source", PLAIN | tensors, description))


def test_names_like_those_of_scales_are_nothing_in_a_plain_checkpoint(tmp_path: Path):
    """A model may have parameters of its own that end in k_scale."""
    own = {
        "model.layers.0.self_attn.k_scale": torch.ones(3).bfloat16(),
        f"{Q}.weight": random(64, 128).bfloat16(),
    }
    assert "model.layers.0.self_attn.k_scale" in quantized(write(tmp_path / "source", PLAIN | own))


# --- pickles --------------------------------------------------------------------------------------


def test_a_pickle_gives_what_safetensors_give(tmp_path: Path):
    weight = random(128, 64).bfloat16()
    state = PLAIN | {
        f"{Q}.weight": weight.t(),
        f"{UP}.weight": weight,
        f"{DOWN}.weight": weight[32:96],
    }
    plain = write(
        tmp_path / "plain", {name: tensor.clone().contiguous() for name, tensor in state.items()}
    )
    source = write(tmp_path / "pickle", {"a": torch.ones(1)})
    (source / "model.safetensors").unlink()
    torch.save(state, source / "pytorch_model.bin")
    same_tensors(quantized(source), quantized(plain))


def test_sharded_pickles(tmp_path: Path):
    state = PLAIN | {f"{Q}.weight": random(64, 128).bfloat16()}
    source = write(tmp_path / "pickle", {"a": torch.ones(1)})
    (source / "model.safetensors").unlink()
    files = {
        name: f"pytorch_model-0000{1 + number % 2}-of-00002.bin"
        for number, name in enumerate(state)
    }
    for file in set(files.values()):
        torch.save(
            {name: tensor for name, tensor in state.items() if files[name] == file}, source / file
        )
    (source / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )
    same_tensors(quantized(source), quantized(write(tmp_path / "plain", state)))


def test_safetensors_are_preferred_to_pickles(tmp_path: Path):
    source = write(tmp_path / "both", PLAIN | {f"{Q}.weight": random(64, 128).bfloat16()})
    (source / "pytorch_model.bin").write_bytes(b"never read")
    assert [file.name for file in nf4conv.plan_quantize(source).made.source.files] == [
        "model.safetensors"
    ]


def test_a_single_pickle_is_a_source(tmp_path: Path):
    path = tmp_path / "consolidated.00.pth"
    torch.save(PLAIN | {f"{Q}.weight": random(64, 128).bfloat16()}, path)
    assert f"{Q}.weight" in {
        row.name for row in nf4conv.plan_quantize(path).made.rows() if row.action == "pack"
    }


# --- AutoRound 0.16: names and configs are those that it wrote for a Llama ------------------------

AUTO_ROUND = {"quant_method": "auto-round", "autoround_version": "0.16.1", "sym": True}
AS_COMPRESSED = AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}


def fp8_of_rows() -> Encoded:
    more = {"input_scale": torch.ones(1).to(BF16)}
    return fp8_with(lambda rows: random(rows).abs().to(BF16), "weight_scale", None, **more)


def mxfp4() -> Encoded:
    def make(rows: int, columns: int) -> Any:
        pairs, scale = random_bytes(rows, columns // 2), random_bytes(rows, columns // 32, high=8)
        factors = torch.exp2(scale.float() - 7).repeat_interleave(32, dim=1)
        return {"weight_packed": pairs, "weight_scale": scale + 120}, unpacked(pairs) * factors

    return of_layers(make)


def mxfp8() -> Encoded:
    def make(rows: int, columns: int) -> Any:
        values, scale = fp8(rows, columns), random_bytes(rows, columns // 32, high=8)
        factors = torch.exp2(scale.float() - 7).repeat_interleave(32, dim=1)
        return {"weight": values, "weight_scale": scale + 120}, values.float() * factors

    return of_layers(make)


@pytest.mark.parametrize(
    ("encode", "description"),
    [
        (
            fp8_blocks,
            {
                "packing_format": "auto_round:fp8",
                "data_type": "fp",
                "group_size": [128, 128],
                "weight_block_size": [128, 128],
            },
        ),
        (fp8_of_rows, {"packing_format": "auto_round:fp8_static", "data_type": "fp"}),
        (mxfp4, AS_COMPRESSED | {"data_type": "mx_fp", "group_size": 32}),
        (mxfp8, AS_COMPRESSED | {"data_type": "mx_fp", "group_size": 32}),
        (nvfp4_compressed_tensors, AS_COMPRESSED | {"data_type": "nv_fp", "group_size": 16}),
    ],
)
def test_floats_of_autoround(
    tmp_path: Path, encode: Callable[[], Encoded], description: dict[str, Any]
):
    encoded = encode()
    source = write(tmp_path / "source", PLAIN | encoded.stored, AUTO_ROUND | description)
    nf4conv.dequantize(source, tmp_path / "out", device="cpu")
    found = load_file(tmp_path / "out/model.safetensors")
    for name, tensor in encoded.decoded.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-e5m3-pack-quantized"},
            "weight_packed: U8 .* does not go with .*weight_scale, U8",
        ),
        (
            AUTO_ROUND
            | {"packing_format": "auto_round:llm_compressor_nvfp4_e5m3", "data_type": "nvfp4_v2"},
            "data_type 'nvfp4_v2'",
        ),
    ],
)
def test_scales_in_e5m3_are_no_powers_of_two(
    tmp_path: Path, description: dict[str, Any], message: str
):
    stored = {}
    for module, (rows, columns) in SHAPES.items():
        stored[f"{module}.weight_packed"] = random_bytes(rows, columns // 2)
        stored[f"{module}.weight_scale"] = random_bytes(rows, columns // 16)
    source = write(tmp_path / "source", PLAIN | stored, description)
    with pytest.raises(SourceError, match=message) as error:
        nf4conv.dequantize(source, tmp_path / "out", device="cpu")
    assert "\n" not in str(error.value)
