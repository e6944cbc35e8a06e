"""One model in every encoding that nf4conv reads, with random content.

Random bytes serve as weights: they are finite, and nothing that is measured depends on the values.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gguf_file import write_gguf
from benchmarks.synthetic import Llama, Tensors, write_layers
from nf4conv import quantize_4bit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT8 = torch.float8_e4m3fn
EXPERTS = 4
GROUP: Final = 128


def random_bytes(*shape: int, high: int = 120) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.uint8, device=DEVICE)


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, device=DEVICE).to(torch.int32)


def scales(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (torch.rand(shape, device=DEVICE) * 0.01 + 1e-3).to(dtype)


def bfloat16(name: str, rows: int, columns: int) -> Tensors:
    return {name: torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE) * 0.02}


def fp8_blocks(name: str, rows: int, columns: int) -> Tensors:
    scale = torch.rand(-(-rows // 128), -(-columns // 128))
    return {name: random_bytes(rows, columns).view(FLOAT8), f"{name}_scale_inv": scale}


def fp8_tensor(name: str, rows: int, columns: int) -> Tensors:
    return {name: random_bytes(rows, columns).view(FLOAT8), f"{name}_scale": torch.rand(1)}


def fp8_channels(name: str, rows: int, columns: int) -> Tensors:
    return {name: random_bytes(rows, columns).view(FLOAT8), f"{name}_scale": torch.rand(rows, 1)}


def mxfp8(name: str, rows: int, columns: int) -> Tensors:
    scale = random_bytes(rows, columns // 32, high=8) + 118
    return {name: random_bytes(rows, columns).view(FLOAT8), f"{name}_scale": scale}


def int8(name: str, rows: int, columns: int) -> Tensors:
    values = random_bytes(rows, columns, high=256).view(torch.int8)
    return {name: values, f"{name}_scale": torch.rand(rows, 1)}


def mxfp4(name: str, rows: int, columns: int) -> Tensors:
    scale = random_bytes(rows, columns // 32, high=8) + 124
    return {f"{name}_packed": random_bytes(rows, columns // 2, high=256), f"{name}_scale": scale}


def nvfp4(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}_packed": random_bytes(rows, columns // 2, high=256),
        f"{name}_scale": random_bytes(rows, columns // 16).view(FLOAT8),
        f"{name}_global_scale": torch.tensor([17.0]),
    }


def gpt_oss(name: str, rows: int, columns: int) -> Tensors:
    """Four experts for a matrix of a feed-forward network, which stay in 16 bits; attention is in
    bfloat16.
    """
    if ".mlp." not in name:
        return bfloat16(name, rows, columns)
    stem, shape = name.removesuffix(".weight"), (EXPERTS, rows // EXPERTS, columns // 32)
    blocks = random_bytes(*shape, 16, high=256)
    return {f"{stem}_blocks": blocks, f"{stem}_scales": random_bytes(*shape, high=8) + 118}


def bfloat16_experts(name: str, rows: int, columns: int) -> Tensors:
    """Returns the tensors that those of `gpt_oss` decode to."""
    if ".mlp." not in name:
        return bfloat16(name, rows, columns)
    stacked = torch.randn(EXPERTS, columns, rows // EXPERTS, dtype=torch.bfloat16, device=DEVICE)
    return {name.removesuffix(".weight"): stacked}


def bitsandbytes_8bit(name: str, rows: int, columns: int) -> Tensors:
    values = random_bytes(rows, columns, high=256).view(torch.int8)
    return {name: values, f"{name.removesuffix('weight')}SCB": torch.rand(rows)}


def bitsandbytes_4bit(name: str, rows: int, columns: int) -> Tensors:
    packed, state = quantize_4bit(torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE))
    tensors = {name: packed}
    for suffix, component in state.components().items():
        tensors[f"{name}.{suffix}"] = component
    return tensors


def int4(name: str, rows: int, columns: int, *, group_size: int) -> Tensors:
    return {
        f"{name}_packed": words(rows, columns // 8),
        f"{name}_scale": scales(rows, columns // group_size, dtype=torch.bfloat16),
        f"{name}_shape": torch.tensor([rows, columns]),
    }


def gptq(name: str, rows: int, columns: int, *, is_reordered: bool) -> Tensors:
    module = name.removesuffix(".weight")
    index = torch.arange(columns) // GROUP
    if is_reordered:
        index = index[torch.randperm(columns)]
    return {
        f"{module}.qweight": words(columns // 8, rows),
        f"{module}.qzeros": words(columns // GROUP, rows // 8),
        f"{module}.scales": scales(columns // GROUP, rows),
        f"{module}.g_idx": index.to(torch.int32),
    }


def awq(name: str, rows: int, columns: int) -> Tensors:
    module = name.removesuffix(".weight")
    return {
        f"{module}.qweight": words(columns, rows // 8),
        f"{module}.qzeros": words(columns // GROUP, rows // 8),
        f"{module}.scales": scales(columns // GROUP, rows),
    }


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Returns the quantization_config that compressed-tensors writes."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "model.embed_tokens"],
    }


def floats(bits: int, strategy: str, **others: int) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, **others}


def integers(bits: int, strategy: str, **others: int) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, **others}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}

ENCODINGS: Final[dict[str, tuple[Callable[[str, int, int], Tensors], dict[str, Any] | None]]] = {
    "bfloat16": (bfloat16, None),
    "bfloat16 experts": (bfloat16_experts, None),
    "fp8 blocks": (
        fp8_blocks,
        {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    ),
    "fp8 channels": (fp8_channels, compressed("float-quantized", **floats(8, "channel"))),
    "fp8 tensor": (fp8_tensor, compressed("float-quantized", **floats(8, "tensor"))),
    "mxfp8": (mxfp8, compressed("mxfp8-quantized", **floats(8, "group", group_size=32))),
    "int8": (int8, compressed("int-quantized", **integers(8, "channel"))),
    "gpt-oss mxfp4": (gpt_oss, {"quant_method": "mxfp4"}),
    "mxfp4": (mxfp4, compressed("mxfp4-pack-quantized", **floats(4, "group", group_size=32))),
    "nvfp4": (
        nvfp4, compressed("nvfp4-pack-quantized", **floats(4, "tensor_group", group_size=16))
    ),
    "bitsandbytes 8-bit": (
        bitsandbytes_8bit, {"quant_method": "bitsandbytes", "load_in_8bit": True}
    ),
    "bitsandbytes 4-bit": (
        bitsandbytes_4bit,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "int4 g32": (
        partial(int4, group_size=32),
        compressed("pack-quantized", **integers(4, "group", group_size=32)),
    ),
    "int4 g128": (
        partial(int4, group_size=128),
        compressed("pack-quantized", **integers(4, "group", group_size=128)),
    ),
    "gptq": (partial(gptq, is_reordered=False), GPTQ),
    "gptq desc_act": (partial(gptq, is_reordered=True), GPTQ | {"desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP}),
}  # fmt: skip
"""How each encoding stores a matrix, and the quantization_config that says so."""


def write_source(shape: Llama, encoding: str, folder: Path) -> Path:
    """Writes a checkpoint whose layers are all alike, or a GGUF file; returns its path."""
    if encoding.startswith("gguf "):
        write_gguf(shape, encoding.removeprefix("gguf "), folder)
        return folder / "model.gguf"
    encode, description = ENCODINGS[encoding]
    first: Tensors = {}
    rest: Tensors = {}
    for name, dimensions in shape.tensors():
        if ".layers." not in name:
            rest[name] = torch.ones(dimensions, dtype=torch.bfloat16)
        elif ".layers.0." in name and len(dimensions) == 2:
            encoded = encode(name, *dimensions)
            first |= {part: tensor.cpu().clone() for part, tensor in encoded.items()}
        elif ".layers.0." in name:
            first[name] = torch.ones(dimensions, dtype=torch.bfloat16)
    config = shape.config()
    if description is not None:
        config["quantization_config"] = description
    write_layers(folder, first, rest, shape.layers, config)
    return folder
