"""Records what the formats' own libraries and scripts decode: decoded/NAME.safetensors.

Each file is a small checkpoint in the layout of a release, with every code, and with scales at the
edges of their dtype; beside it what the library named in the file's metadata made of it. README.md
says what must be installed. `python tests/golden/decoders.py NAME … --scripts FOLDER`, where FOLDER
holds DeepSeek's own scripts for the releases that have no library.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parent / "decoded"
BF16, FP8, E8M0 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu
Tensors = dict[str, torch.Tensor]


class Release(NamedTuple):
    """A small checkpoint.

    Attributes:
        config: config.json.
        kept: tensors that the release does not quantize.
        stored: parts of those that it does.
        decoded: what another's code makes of these.
        by: whose code that is.
    """

    config: dict[str, Any]
    kept: Tensors
    stored: Tensors
    decoded: Tensors
    by: str


# --- what every release is made of ----------------------------------------------------------------


def codes(rows: int, columns: int, count: int) -> torch.Tensor:
    """[rows, columns] in which each run of `count` columns holds every code once."""
    return (torch.arange(columns) + 5 * torch.arange(rows)[:, None]) % count


def pairs(rows: int, columns: int, *, has_minus_zero: bool = True) -> torch.Tensor:
    """[rows, columns / 2] bytes of two 4-bit codes, the first in the low bits."""
    nibbles = codes(rows, columns, 16)
    if not has_minus_zero:
        nibbles[nibbles == 8] = 0
    return (nibbles[:, ::2] | nibbles[:, 1::2] << 4).to(torch.uint8)


def words(nibbles: torch.Tensor, order: Iterable[int] = range(8)) -> torch.Tensor:
    """[rows, columns] 4-bit codes to [rows, columns / 8] I32; `order` is of the low bits first."""
    packed = torch.zeros(nibbles.shape[0], nibbles.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        packed |= nibbles[:, column::8].long() << 4 * place
    return packed.to(torch.uint32).view(torch.int32)


def in_turns(values: torch.Tensor, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return values.repeat(count)[:count].view(shape)


def edges(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Scales: zero, subnormal, the smallest normal, ordinary, the largest and NaN."""
    limits = torch.finfo(dtype)
    values = [0.0, limits.smallest_normal / 4, limits.smallest_normal, 0.3, 1.0, limits.max]
    return in_turns(torch.tensor([*values, float("nan")]).to(dtype), *shape)


def half_edges(*shape: int) -> torch.Tensor:
    """The same in float16; 255 times the largest is no infinity, which nf4conv refuses."""
    scales = edges(torch.float16, *shape)
    return torch.where(scales > 256, 256, scales).to(torch.float16)


def powers(*shape: int) -> torch.Tensor:
    """E8M0 as bytes: 2^-127, 2^-126, ordinary ones and 2^127."""
    return in_turns(torch.tensor([0, 1, 120, 127, 130, 254], dtype=torch.uint8), *shape)


def every_fp8(rows: int, columns: int) -> torch.Tensor:
    return codes(rows, columns, 256).to(torch.uint8).view(FP8)


def kept(*names: str, dtype: torch.dtype = BF16) -> Tensors:
    """Tensors that no release quantizes."""
    generator = torch.Generator().manual_seed(len(names))
    return {name: torch.randn(4, 8, generator=generator).to(dtype) for name in names}


def installed(*packages: str) -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)


# --- compressed-tensors: Kimi, Llama in FP8, NVFP4 ------------------------------------------------


def compressed(
    form: str, weights: dict[str, Any], parts: dict[str, Tensors], rest: Tensors, **config: Any
) -> Release:
    """A release of compressed-tensors, decompressed by the class that the package has for it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored, decoded = {}, {}
    for module, tensors in parts.items():
        stored |= {f"{module}.{name}": tensor for name, tensor in tensors.items()}
        decompressed = compressor.decompress(dict(tensors), scheme)["weight"]
        decoded[f"{module}.weight"] = decompressed.to(BF16)
    quantization = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        "quantization_status": "compressed",
    }
    inside = config.get("text_config", config)
    inside["quantization_config"] = quantization
    config |= {"dtype": "bfloat16"}
    return Release(config, rest, stored, decoded, installed("compressed-tensors"))


def kimi(form: str, weights: dict[str, Any], parts: Callable[[int], Tensors]) -> Release:
    layer = "language_model.model.layers.1"
    experts = {f"{layer}.mlp.experts.0.{name}": parts(7) for name in ("gate_proj", "down_proj")}
    rest = kept(
        "language_model.model.embed_tokens.weight", "language_model.lm_head.weight",
        f"{layer}.self_attn.q_a_proj.weight", f"{layer}.mlp.shared_experts.up_proj.weight",
        f"{layer}.mlp.gate.weight", "vision_tower.encoder.blocks.0.wqkv.weight",
        "mm_projector.proj.0.weight",
    )  # fmt: skip
    rest |= kept(f"{layer}.mlp.gate.e_score_correction_bias", dtype=torch.float32)
    text = {"model_type": "kimi_k2", "n_routed_experts": 1, "dtype": "bfloat16"}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    return compressed(form, weights, experts, rest, **config, text_config=text)


def kimi_k26(_: Path) -> Release:
    def parts(rows: int) -> Tensors:
        shape = torch.tensor([rows, 64], dtype=torch.int32)
        packed = words(codes(rows, 64, 16))
        return {
            "weight_packed": packed,
            "weight_scale": edges(BF16, rows, 2),
            "weight_shape": shape,
        }

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    return kimi("pack-quantized", weights, parts)


def kimi_k3(_: Path) -> Release:
    def parts(rows: int) -> Tensors:
        return {"weight_packed": pairs(rows, 64), "weight_scale": powers(rows, 2)}

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    return kimi("mxfp4-pack-quantized", weights, parts)


def llama_config(**more: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **more}


def llama_names(count: int) -> list[str]:
    return [f"model.layers.{layer}.mlp.up_proj" for layer in range(count)]


REST_OF_LLAMA = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight")


def llama_fp8(_: Path) -> Release:
    parts = {}
    for name in llama_names(2):
        parts[name] = {"weight": every_fp8(14, 256), "weight_scale": edges(BF16, 14, 1)}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    return compressed("float-quantized", weights, parts, kept(*REST_OF_LLAMA), **llama_config())


def llama_nvfp4(_: Path) -> Release:
    parts = {}
    for name, divisor in zip(llama_names(3), (1234.5, 2.0**-126, 3e38), strict=True):
        parts[name] = {
            "weight_packed": pairs(32, 128),
            "weight_scale": torch.arange(256, dtype=torch.uint8).view(32, 8).view(FP8),
            "weight_global_scale": torch.tensor([divisor]),
        }
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    rest = kept(*REST_OF_LLAMA)
    return compressed("nvfp4-pack-quantized", weights, parts, rest, **llama_config())


# --- ModelOpt -------------------------------------------------------------------------------------


def modelopt_nvfp4(_: Path) -> Release:
    """In float32, and without code 8, minus zero, which ModelOpt takes for zero."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    stored, decoded = {}, {}
    for name, factor in zip(llama_names(4), (0.0123, 0.0, 2.0**-149, 3e38), strict=True):
        values = pairs(32, 128, has_minus_zero=False)
        scale = torch.arange(256, dtype=torch.uint8).view(32, 8).view(FP8)
        parts = {
            "weight": values,
            "weight_scale": scale,
            "weight_scale_2": torch.tensor(factor),
            "input_scale": torch.tensor(1.0),
        }
        stored |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        packed = NVFP4QTensor(torch.Size([32, 128]), BF16, values)
        decoded[f"{name}.weight"] = packed.dequantize(
            torch.float32, scale=scale, double_scale=parts["weight_scale_2"], block_sizes={-1: 16}
        )
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    quantization |= {"producer": {"name": "modelopt", "version": "0.41.0"}}
    config = llama_config(dtype="bfloat16", quantization_config=quantization)
    return Release(config, kept(*REST_OF_LLAMA), stored, decoded, installed("nvidia-modelopt"))


def quark(_: Path) -> Release:
    """A layer of each kind, as Quark's own layers decode them, in float32.

    Its difference of a code and a zero point is a byte: codes are such that it does not overflow.
    """
    from quark.torch.export.nn.modules.realquantizer import StaticScaledRealQuantizer
    from quark.torch.quantization.config.config import QTensorConfig

    every_int8 = codes(16, 256, 256).to(torch.uint8).view(torch.int8)
    half_of_int8 = (codes(16, 128, 128) - 64).to(torch.int8)
    zeros = torch.arange(-8, 8, dtype=torch.int8)
    fp8_of_rows = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}
    int8_of_rows = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
    mxfp4 = {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32}
    kinds: list[tuple[dict[str, Any], Tensors]] = [
        (
            {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
            {"weight": every_fp8(2, 256), "weight_scale": torch.tensor(0.0123)},
        ),
        (
            {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [4, 64]},
            {"weight": every_fp8(8, 256), "weight_scale": edges(torch.float32, 2, 4)},
        ),
        (fp8_of_rows, {"weight": every_fp8(7, 256), "weight_scale": edges(torch.float32, 7)}),
        (
            {"dtype": "int8", "qscheme": "per_tensor"},
            {
                "weight": half_of_int8,
                "weight_scale": torch.tensor(0.0123),
                "weight_zero_point": torch.tensor(3, dtype=torch.int8),
            },
        ),
        (
            int8_of_rows,
            {
                "weight": every_int8,
                "weight_scale": edges(torch.float32, 16),
                "weight_zero_point": torch.zeros(16, dtype=torch.int8),
            },
        ),
        (
            int8_of_rows,
            {
                "weight": half_of_int8,
                "weight_scale": edges(torch.float32, 16),
                "weight_zero_point": zeros,
            },
        ),
        (
            {**mxfp4, "scale_format": "e8m0"},
            {"weight": pairs(32, 64), "weight_scale": powers(32, 2)},
        ),
    ]
    every_key = {"is_dynamic": False, "ch_axis": None, "group_size": None, "symmetric": True}
    every_key |= {"round_method": "half_even", "scale_type": "float"}
    observers = {"per_tensor": "PerTensorMinMaxObserver", "per_channel": "PerChannelMinMaxObserver"}
    observers |= {"per_group": "PerBlockMXObserver", "per_block": "PerBlock2DMinMaxObserver"}
    stored, decoded, of_layers = {}, {}, {}
    for (described, parts), name in zip(kinds, llama_names(len(kinds)), strict=True):
        described = every_key | described | {"observer_cls": observers[described["qscheme"]]}
        of_layers[name] = {"weight": described}
        stored |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        layer = StaticScaledRealQuantizer(
            QTensorConfig.from_dict(described),
            None,
            reorder=False,
            real_quantized=True,
            float_dtype=torch.float32,
            device=torch.device("cpu"),
        )
        layer.scale = parts["weight_scale"]
        layer.zero_point = parts.get("weight_zero_point")
        decoded[f"{name}.weight"] = layer(parts["weight"])
    quantization = {"quant_method": "quark", "global_quant_config": of_layers[llama_names(1)[0]]}
    quantization |= {"layer_quant_config": of_layers}
    config = llama_config(dtype="bfloat16", quantization_config=quantization)
    return Release(config, kept(*REST_OF_LLAMA), stored, decoded, installed("amd-quark"))


# --- GPTQ, AWQ, AutoRound -------------------------------------------------------------------------


def llama_in_half(
    quantization: dict[str, Any], stored: Tensors, decoded: Tensors, package: str
) -> Release:
    config = llama_config(dtype="float16", quantization_config=quantization)
    rest = kept(*REST_OF_LLAMA, dtype=torch.float16)
    return Release(config, rest, stored, decoded, installed(package))


def random_words(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)


def gptq(_: Path) -> Release:
    """Every code of 4 bits, in order and not; words of 2, 3 and 8 bits, and of zero points."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    groups, rows, columns = 4, 32, 128
    order = torch.arange(columns, dtype=torch.int32)
    indices = {4: order // 32, 44: order * 7 % columns // 32}
    stored, decoded, dynamic = {}, {}, {}
    for name, kind in zip(llama_names(5), (4, 44, 2, 3, 8), strict=True):
        bits = kind % 40
        every = words(codes(rows, columns, 16)).t().contiguous()
        parts = {
            "qweight": every if bits == 4 else random_words(columns * bits // 32, rows),
            "qzeros": random_words(groups, rows * bits // 32),
            "scales": half_edges(groups, rows),
            "g_idx": indices.get(kind, order // 32),
        }
        stored |= {f"{name}.{part}": tensor.clone() for part, tensor in parts.items()}
        layer = TorchLinear(
            bits=bits, group_size=32, sym=False, desc_act=kind == 44, in_features=columns,
            out_features=rows, bias=False, register_buffers=True,
        )  # fmt: skip
        layer.load_state_dict(parts, strict=False)
        convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
        layer.post_init()
        decoded[f"{name}.weight"] = layer.dequantize_weight().t().contiguous()
        dynamic[f"+:{name}"] = {"bits": bits}
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    quantization |= {"desc_act": True, "checkpoint_format": "gptq", "dynamic": dynamic}
    return llama_in_half(quantization, stored, decoded, "gptqmodel")


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(_: Path) -> Release:
    from awq.utils.packing_utils import dequantize_gemm

    groups, rows, name = 4, 32, llama_names(1)[0]
    parts = {
        "qweight": words(codes(rows, 32 * groups, 16).t().contiguous(), AWQ_ORDER),
        "qzeros": words(codes(groups, rows, 16), AWQ_ORDER),
        "scales": half_edges(groups, rows),
    }
    stored = {f"{name}.{part}": tensor for part, tensor in parts.items()}
    decoded = dequantize_gemm(**parts, bits=4, group_size=32).t().contiguous()
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    quantization |= {"zero_point": True, "modules_to_not_convert": None}
    return llama_in_half(quantization, stored, {f"{name}.weight": decoded}, "autoawq")


def autoround(_: Path) -> Release:
    """Scales are finite and not zero, since its layer can only be asked for products with the
    identity. No zero point is the largest code: it stands for 0, which AutoRound takes for 2^bits.
    """
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    groups, rows, columns = 4, 32, 128
    stored, decoded, extra = {}, {}, {}
    for name, bits in zip(llama_names(4), (4, 2, 3, 8), strict=True):
        every = words(codes(rows, columns, 16)).t().contiguous()
        even = sum((2**bits - 2) << bits * place for place in range(32))
        of_zeros = [(even >> 32 * place) & 0xFFFFFFFF for place in range(bits)]
        mask = torch.tensor(of_zeros).to(torch.uint32).view(torch.int32)
        parts = {
            "qweight": every if bits == 4 else random_words(columns * bits // 32, rows),
            "qzeros": random_words(groups, rows * bits // 32) & mask,
            "scales": half_edges(groups, rows).nan_to_num(0.7).clamp(min=2.0**-24),
        }
        stored |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        layer = QuantLinear(bits, 32, columns, rows, bias=False)
        layer.load_state_dict(parts)
        decoded[f"{name}.weight"] = layer(torch.eye(columns)).t().half().contiguous()
        extra[name] = {"bits": bits}
    quantization = {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4,
        "group_size": 32, "data_type": "int", "sym": True, "autoround_version": "0.16.1",
        "extra_config": extra,
    }  # fmt: skip
    return llama_in_half(quantization, stored, decoded, "auto-round")


# --- gpt-oss and DeepSeek -------------------------------------------------------------------------


def gpt_oss(_: Path) -> Release:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts = "model.layers.0.mlp.experts"
    rest = kept(
        "model.embed_tokens.weight", "model.layers.0.self_attn.sinks",
        "model.layers.0.mlp.router.weight", "model.layers.0.mlp.router.bias",
    )  # fmt: skip
    stored, decoded = {}, {}
    for name, rows in {"gate_up_proj": 16, "down_proj": 8}.items():
        blocks = pairs(2 * rows, 64).view(2, rows, 2, 16)
        scales = powers(2, rows, 2)
        stored |= {f"{experts}.{name}_blocks": blocks, f"{experts}.{name}_scales": scales}
        rest[f"{experts}.{name}_bias"] = in_turns(torch.tensor([0.5, -2.0]), 2, rows).to(BF16)
        decoded[f"{experts}.{name}"] = convert_moe_packed_tensors(blocks, scales).contiguous()
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "dtype": "bfloat16"}
    config["quantization_config"] = quantization
    return Release(config, rest, stored, decoded, installed("transformers"))


V3 = "deepseek-ai/DeepSeek-V3@9b4e9788e4a3a731f7567338ed15d3ec549ce03b:inference/fp8_cast_bf16.py"
V4 = "lvyufeng/PocketMoE@3a34a3df28c7f6b9c009b96f01590d4daade00bc:inference/convert.py"


def cast_by_script(scripts: Path, tensors: Tensors) -> Tensors:
    """What fp8_cast_bf16.py makes of a checkpoint, on a GPU."""
    work = scripts / "work"
    work.mkdir(exist_ok=True)
    save_file(tensors, work / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (work / "model.safetensors.index.json").write_text(json.dumps(index))
    arguments = ["--input-fp8-hf-path", str(work), "--output-bf16-hf-path", str(work / "out")]
    subprocess.run([sys.executable, scripts / "v3/fp8_cast_bf16.py", *arguments], check=True)
    return load_file(work / "out/model.safetensors")


def fp8_config(model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    quantization |= {"weight_block_size": [128, 128], **more}
    config = {"architectures": [architecture], "model_type": model_type, "dtype": "bfloat16"}
    return config | {"quantization_config": quantization}


def deepseek_v32_weights(codes: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Weights of `codes` and their scales: whole blocks, partial ones, and every edge."""
    name = "model.layers.3.self_attn.kv_a_proj_with_mqa"
    weights = {name: (in_turns(codes, 130, 132), torch.tensor([[0.3, 2.0], [5.0, 7e-5]]))}
    for number, scale in enumerate(edges(torch.float32, 7)):
        name = f"model.layers.61.mlp.experts.{number}.up_proj"
        weights[name] = in_turns(codes, 2, 256), scale.repeat(1, 2)
    return weights


def deepseek_v32_kept() -> Tensors:
    layer, mtp = "model.layers.3", "model.layers.61"
    rest = kept(
        "model.embed_tokens.weight", f"{layer}.self_attn.indexer.weights_proj.weight",
        f"{layer}.mlp.gate.weight", f"{mtp}.eh_proj.weight", f"{mtp}.enorm.weight",
        f"{mtp}.shared_head.head.weight",
    )  # fmt: skip
    return rest | kept(
        f"{layer}.mlp.gate.e_score_correction_bias", f"{layer}.self_attn.indexer.k_norm.bias",
        dtype=torch.float32,
    )  # fmt: skip


def deepseek_v32_of(
    codes: torch.Tensor, decode: Callable[[Tensors, list[str]], Tensors], by: str
) -> Release:
    """Every edge, whole blocks and partial ones; `decode` takes the checkpoint and modules."""
    name = "model.layers.3.self_attn.kv_a_proj_with_mqa"
    weights = {name: (in_turns(codes, 130, 132), torch.tensor([[0.3, 2.0], [5.0, 7e-5]]))}
    for number, scale in enumerate(edges(torch.float32, 7)):
        name = f"model.layers.61.mlp.experts.{number}.up_proj"
        weights[name] = in_turns(codes, 2, 256), scale.repeat(1, 2)
    stored = {}
    for name, (values, scale) in weights.items():
        stored |= {f"{name}.weight": values.view(FP8), f"{name}.weight_scale_inv": scale}
    rest = deepseek_v32_kept()
    converted = decode(rest | stored, list(weights))
    decoded = {f"{name}.weight": converted[f"{name}.weight"] for name in weights}
    config = fp8_config("deepseek_v32", "DeepseekV32ForCausalLM")
    return Release(config, rest, stored, decoded, by)


def deepseek_v32(_: Path) -> Release:
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    return deepseek_v32_of(
        torch.arange(256, dtype=torch.uint8),
        lambda tensors, modules: FP8BlockDequantizer(targets=modules).process(tensors),
        installed("compressed-tensors"),
    )


def deepseek_v32_by_script(scripts: Path) -> Release:
    codes = torch.arange(256, dtype=torch.uint8)
    return deepseek_v32_of(codes, lambda tensors, _: cast_by_script(scripts, tensors), V3)


def deepseek_v4_kept() -> Tensors:
    rest = kept(
        "embed.weight", "head.weight", "layers.0.ffn.gate.weight", "mtp.0.e_proj.norm.weight"
    )
    return rest | kept(
        "layers.0.attn.attn_sink", "layers.0.attn.compressor.ape", "layers.0.hc_attn_fn",
        "layers.0.ffn.gate.bias", dtype=torch.float32,
    )  # fmt: skip


def deepseek_v4_config() -> dict[str, Any]:
    config = fp8_config("deepseek_v4", "DeepseekV4ForCausalLM", scale_fmt="ue8m0")
    return config | {"expert_dtype": "fp4"}


def by_fp8_dequantize(
    config: dict[str, Any], parts: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> Release:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored, decoded = {}, {}
    for name, (weight, scale) in parts.items():
        stored |= {f"{name}.weight": weight, f"{name}.scale": scale.contiguous()}
        decoded[f"{name}.weight"] = Fp8Dequantize(None)._dequantize_one(weight, scale, BF16)
    return Release(config, deepseek_v4_kept(), stored, decoded, installed("transformers"))


def deepseek_v41(_: Path) -> Release:
    """FP8 in blocks of 32 × 32, and tables of which each row has scales of its own."""
    grid = torch.arange(118, 126, dtype=torch.uint8).view(E8M0)
    parts = {
        "layers.0.attn.wq_a": (every_fp8(64, 128), grid.view(2, 4)),
        "layers.0.ffn.experts.0.w1": (pairs(4, 64).view(torch.int8), grid.view(4, 2)),
        "layers.1.engram.embed": (every_fp8(4, 64), grid.view(4, 2)),
    }
    config = fp8_config("deepseek_v41", "DeepseekV41ForCausalLM", scale_fmt="ue8m0")
    config["quantization_config"] |= {"weight_block_size": [32, 32], "expert_dtype": "fp4"}
    return by_fp8_dequantize(config, parts)


def deepseek_v4(_: Path) -> Release:
    """Every power of two that E8M0 has, and its NaN."""
    every = torch.arange(256, dtype=torch.uint8).view(E8M0)
    parts = {
        "layers.0.ffn.experts.0.w1": (pairs(128, 64).view(torch.int8), every.view(128, 2)),
        "mtp.0.ffn.experts.0.w2": (pairs(14, 32).view(torch.int8), powers(14, 1).view(E8M0)),
    }
    for number, scale in enumerate(powers(7).view(E8M0)):
        name = f"layers.{number}.ffn.shared_experts.w1"
        parts[name] = every_fp8(1, 256), scale.repeat(1, 2)
    return by_fp8_dequantize(deepseek_v4_config(), parts)


def deepseek_v4_by_script(scripts: Path) -> Release:
    """convert.py makes FP8 of experts, without loss if their scales differ by 2^6 at most, and
    bfloat16 of wo_a; fp8_cast_bf16.py decodes that FP8. Without code 8, minus zero, which
    convert.py takes for zero.
    """
    work = scripts / "v4-work"
    work.mkdir(exist_ok=True)
    packed = pairs(128, 128, has_minus_zero=False).view(torch.int8)
    exponents = (codes(128, 4, 7) + 119).to(torch.uint8).view(E8M0)
    rest = deepseek_v4_kept()
    stored = {
        "layers.0.ffn.experts.0.w1.weight": packed,
        "layers.0.ffn.experts.0.w1.scale": exponents,
        "layers.0.attn.wo_a.weight": every_fp8(128, 128),
        "layers.0.attn.wo_a.scale": torch.tensor([[118]], dtype=torch.uint8).view(E8M0),
    }
    save_file(rest | stored, work / "model.safetensors")
    subprocess.run(
        [
            sys.executable, str(scripts / "v4/convert.py"), "--hf-ckpt-path", str(work),
            "--save-path", str(work / "out"), "--n-experts", "1", "--model-parallel", "1",
            "--expert-dtype", "fp8",
        ],
        check=True,
    )  # fmt: skip
    [file] = (work / "out").glob("*.safetensors")
    converted = load_file(file)
    expert = "layers.0.ffn.experts.0.w1.weight"
    fp8 = {
        expert: converted[expert],
        f"{expert}_scale_inv": converted[expert.replace("weight", "scale")].float(),
    }
    decoded = {expert: cast_by_script(scripts, fp8)[expert].bfloat16()}  # which is exact
    decoded["layers.0.attn.wo_a.weight"] = converted["layers.0.attn.wo_a.weight"]
    return Release(deepseek_v4_config(), rest, stored, decoded, f"{V4}, {V3}")


RELEASES = {
    make.__name__: make
    for make in (
        kimi_k26, kimi_k3, deepseek_v41, deepseek_v4, deepseek_v4_by_script, deepseek_v32,
        deepseek_v32_by_script, gpt_oss, gptq, awq, autoround, llama_fp8, llama_nvfp4,
        modelopt_nvfp4, quark,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[*RELEASES, []])
    parser.add_argument("--scripts", type=Path)
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name in arguments.names or RELEASES:
        release = RELEASES[name](arguments.scripts)
        tensors = {}
        for kind in ("kept", "stored", "decoded"):
            for key, tensor in getattr(release, kind).items():
                tensors[f"{kind} {key}"] = tensor.clone().contiguous()
        metadata = {"by": release.by, "config": json.dumps(release.config)}
        save_file(tensors, FOLDER / f"{name}.safetensors", metadata)


if __name__ == "__main__":
    main()
