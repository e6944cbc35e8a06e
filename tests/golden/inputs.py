"""Makes the checkpoints that `frozen.py` converts, from hashes: the same bytes with every version
of every library. Imports nothing of nf4conv, so that no change of the package changes an input.
"""

import hashlib
import io
import json
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

Q, K, UP, DOWN = "self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"
SHAPES = {Q: (64, 128), K: (32, 128), UP: (320, 128), DOWN: (128, 320)}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "dtype": "bfloat16",
}
CARD = "---\nlicense: mit\nlanguage:\n- en\ntags: [a, b]\n---\n# A model\n"


class Tensor(NamedTuple):
    """A tensor as a file of safetensors has it."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


Tensors = dict[str, Tensor]

_SIZES = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I64": 8}


def _noise(name: str, shape: tuple[int, ...], kind: str) -> Any:
    count = math.prod(shape)
    content = hashlib.shake_256(name.encode()).digest(count * np.dtype(kind).itemsize)
    return np.frombuffer(content, kind).reshape(shape)


def bits(name: str, dtype: str, *shape: int) -> Tensor:
    """Any bytes."""
    return Tensor(dtype, shape, _noise(name, (*shape, _SIZES.get(dtype, 1)), "u1").tobytes())


def _stored(values: Any, dtype: str) -> bytes:
    """Rounds float32 to the nearest, ties to even."""
    if dtype == "BF16":
        words = np.ascontiguousarray(values, "<f4").view("<u4").astype("u8")
        rounded = (words + 0x7FFF + ((words >> 16) & 1)) >> 16
        return bytes(rounded.astype("<u2").tobytes())
    return bytes(np.ascontiguousarray(values, {"F16": "<f2", "F32": "<f4"}[dtype]).tobytes())


def weight(name: str, dtype: str, *shape: int) -> Tensor:
    """Values as those of a normal distribution; a block of zeros, and one of tiny values."""
    sums = _noise(name, (*shape, 4), "<u2").astype("i8").sum(axis=-1) - 2 * 65535
    values = (sums / 2**21).astype("f4")
    if values.size >= 512:
        values.reshape(-1)[128:192] = 0
        values.reshape(-1)[256:320] *= np.float32(2**-20)
    return Tensor(dtype, shape, _stored(values, dtype))


def coarse(name: str, dtype: str, *shape: int) -> Tensor:
    """Multiples of 1/64, whose products and sums no order of summing changes."""
    values = (_noise(name, shape, "u1") & 15).astype("f4") / 64 - np.float32(0.125)
    return Tensor(dtype, shape, _stored(values, dtype))


def full(value: float, dtype: str, *shape: int) -> Tensor:
    return Tensor(dtype, shape, _stored(np.full(shape, value, "f4"), dtype))


def integers(dtype: str, *values: int) -> Tensor:
    kind = {"I64": "<i8", "I32": "<i4", "U8": "u1"}[dtype]
    return Tensor(dtype, (len(values),), np.array(values, kind).tobytes())


def scale(name: str, dtype: str, *shape: int) -> Tensor:
    """Positive numbers between 2^-7 and 1."""
    kind, mask, least = {
        "F32": ("<u4", 0x00FFFFFF, 0x3C000000),
        "BF16": ("<u2", 0x00FF, 0x3C00),
        "F16": ("<u2", 0x07FF, 0x2000),
        "F8_E4M3": ("u1", 0x1F, 0x10),
    }[dtype]
    return Tensor(dtype, shape, (_noise(name, shape, kind) & mask | least).tobytes())


def powers(name: str, dtype: str, *shape: int) -> Tensor:
    """Exponents of E8M0 for 2^-7 … 1."""
    return Tensor(dtype, shape, (_noise(name, shape, "u1") & 7 | 120).tobytes())


def eight_bits(name: str, dtype: str, *shape: int) -> Tensor:
    """Finite values of FP8, all of them less than 2."""
    return Tensor(dtype, shape, (_noise(name, shape, "u1") & 0xBF).tobytes())


# --- files ----------------------------------------------------------------------------------------


def save(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a file of safetensors."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, tensor in tensors.items():
        end = start + len(tensor.content)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(tensor.content for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def save_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1))


def write(
    folder: Path,
    *shards: Tensors,
    config: Mapping[str, Any] | None = None,
    stem: str = "model",
    **more: Any,
) -> None:
    """Writes a checkpoint in one file, or in several with an index.

    Args:
        folder: is made.
        shards: the tensors of each file.
        config: config.json; None is that of a small Llama.
        stem: the first word in the names of the files.
        more: further keys of the config.
    """
    folder.mkdir(parents=True)
    save_json(folder / "config.json", (CONFIG if config is None else config) | more)
    if len(shards) == 1:
        save(folder / f"{stem}.safetensors", shards[0], {"format": "pt"})
        return
    files = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        save(folder / file, tensors, {"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    save_json(folder / f"{stem}.safetensors.index.json", index)


def plain(dtype: str = "BF16", layers: int = 1, make: Callable[..., Tensor] = weight) -> Tensors:
    tensors = trunk(dtype, layers)
    for layer in range(layers):
        for module, shape in SHAPES.items():
            name = f"model.layers.{layer}.{module}.weight"
            tensors[name] = make(name, dtype, *shape)
    return tensors


def trunk(dtype: str = "BF16", layers: int = 1) -> Tensors:
    """What a checkpoint has beside the weights of its linear layers."""
    tensors = {"model.embed_tokens.weight": weight("embed", dtype, 96, 128)}
    for layer in range(layers):
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = full(1, dtype, 128)
    return tensors | {"lm_head.weight": weight("head", dtype, 96, 128)}


# --- 16 and 32 bits -------------------------------------------------------------------------------


def write_plain(folder: Path) -> None:
    """Two shards, and all the files that lie beside weights."""
    first, second = plain(layers=2), plain(layers=4)
    second = {name: tensor for name, tensor in second.items() if name not in first}
    write(folder, first, second, eos_token_id=2)
    save_json(folder / "tokenizer.json", {})
    save_json(folder / "generation_config.json", {"do_sample": True})
    (folder / "LICENSE").write_text("Free.\n")
    (folder / "README.md").write_text(CARD)


def write_float16(folder: Path) -> None:
    write(folder, plain("F16"), dtype="float16")


def write_float32(folder: Path) -> None:
    write(folder, plain("F32"), dtype="float32", tie_word_embeddings=True)


def write_odd(folder: Path) -> None:
    """Shapes that are no multiples of anything, dtypes that differ, and biases."""
    name = f"model.layers.0.{Q}"
    tensors = plain() | {
        f"{name}.weight": weight("odd", "F16", 63, 51),
        f"{name}.bias": weight("bias", "F32", 63),
        f"model.layers.0.{K}.weight": weight("row", "F32", 1, 4100),
        "model.layers.0.rotary_emb.inv_freq": full(0.5, "F32", 16),
        "model.ids": integers("I64", 1, 2, 3),
    }
    write(folder, tensors)


def write_gpt2(folder: Path) -> None:
    """Layers that are stored as [in, out]."""
    tensors = {
        "wte.weight": weight("wte", "F32", 96, 64),
        "wpe.weight": weight("wpe", "F32", 8, 64),
    }
    shapes = {"attn.c_attn": (64, 192), "attn.c_proj": (64, 64), "mlp.c_fc": (64, 256)}
    for module, shape in shapes.items():
        tensors[f"h.0.{module}.weight"] = weight(module, "F32", *shape)
        tensors[f"h.0.{module}.bias"] = weight(f"{module}.bias", "F32", shape[1])
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 96}
    write(folder, tensors, config=config)


def write_vision(folder: Path) -> None:
    """A model that sees, whose tower stays as it is."""
    layer = "model.language_model.layers.0"
    tensors = {
        "model.visual.blocks.0.attn.qkv.weight": weight("qkv", "BF16", 96, 32),
        "model.visual.merger.linear_fc1.weight": weight("fc1", "BF16", 64, 32),
        "model.language_model.embed_tokens.weight": weight("embed", "BF16", 96, 64),
        f"{layer}.{Q}.weight": weight("q", "BF16", 64, 64),
        f"{layer}.{UP}.weight": weight("up", "BF16", 128, 64),
        "lm_head.weight": weight("head", "BF16", 96, 64),
    }
    config = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {"dtype": "bfloat16", "model_type": "qwen3_vl_text"},
        "vision_config": {"model_type": "qwen3_vl"},
    }
    write(folder, tensors, config=config)


def write_bert(folder: Path) -> None:
    layer = "bert.encoder.layer.0"
    tensors = {"bert.embeddings.word_embeddings.weight": weight("words", "F32", 96, 64)}
    for module in ("attention.self.query", "attention.output.dense", "intermediate.dense"):
        tensors[f"{layer}.{module}.weight"] = weight(module, "F32", 64, 64)
        tensors[f"{layer}.{module}.bias"] = weight(f"{module}.bias", "F32", 64)
    tensors["classifier.weight"] = weight("classifier", "F32", 3, 64)
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    write(folder, tensors, config=config, dtype="float32")


# --- pickles --------------------------------------------------------------------------------------


class _Storage:
    def __init__(self, kind: Any, key: str, elements: int) -> None:
        self.reference = ("storage", kind, key, "cpu", elements)


class _Pickled:
    """A tensor in a pickle: contiguous, or a transposed view."""

    def __init__(self, storage: _Storage, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.arguments = (storage, 0, shape, stride, False, {})

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, self.arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, found: Any) -> Any:
        return found.reference if isinstance(found, _Storage) else None


def _save_pickle(path: Path, tensors: Tensors) -> None:
    """Writes the archive that torch.save writes since torch 1.6."""
    kinds = {"BF16": torch.BFloat16Storage, "F32": torch.FloatStorage}
    with zipfile.ZipFile(path, "w") as archive:
        state = {}
        for number, (name, tensor) in enumerate(tensors.items()):
            elements = math.prod(tensor.shape)
            storage = _Storage(kinds[tensor.dtype], str(number), elements)
            stride = tuple(math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape)))
            shape = tensor.shape
            if name.endswith(f"{Q}.weight"):
                shape, stride = shape[::-1], stride[::-1]
            state[name] = _Pickled(storage, shape, stride)
        content = io.BytesIO()
        _Pickler(content, protocol=2).dump(state)
        parts = {"data.pkl": content.getvalue(), "byteorder": b"little", "version": b"3\n"}
        parts |= {f"data/{number}": part.content for number, part in enumerate(tensors.values())}
        for name, part in parts.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), part)


def write_pickle(folder: Path) -> None:
    write(folder, {})
    (folder / "model.safetensors").unlink()
    _save_pickle(folder / "pytorch_model.bin", plain())


def write_pickles(folder: Path) -> None:
    write(folder, {})
    (folder / "model.safetensors").unlink()
    first, both = plain(), plain(layers=2)
    second = {name: tensor for name, tensor in both.items() if name not in first}
    files = {}
    for number, tensors in enumerate((first, second), start=1):
        name = f"pytorch_model-{number:05d}-of-00002.bin"
        _save_pickle(folder / name, tensors)
        files |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": files}
    save_json(folder / "pytorch_model.bin.index.json", index)


# --- bitsandbytes ---------------------------------------------------------------------------------

NF4 = (
    0xBF800000, 0xBF3239B1, 0xBF066B30, 0xBECA32A0, 0xBE91A24D, 0xBE3D353F, 0xBDBA7871, 0,
    0x3DA2FAFF, 0x3E24CAE3, 0x3E7C04DD, 0x3EAD033A, 0x3EE1A4B8, 0x3F1007AB, 0x3F3913B3, 0x3F800000,
)  # fmt: skip
FP4 = (
    0, 0x3BAAAAAB, 0x3F2AAAAB, 0x3F800000, 0x3EAAAAAB, 0x3F000000, 0x3E2AAAAB, 0x3E800000,
    0, 0xBBAAAAAB, 0xBF2AAAAB, 0xBF800000, 0xBEAAAAAB, 0xBF000000, 0xBE2AAAAB, 0xBE800000,
)  # fmt: skip
MAPS = {"nf4": NF4, "fp4": FP4}


def _nested_map() -> bytes:
    """bitsandbytes' dynamic map, with float64 in the place of fused multiply-adds."""
    single = np.float32
    positive = []
    for exponent in range(7):
        steps = 2**exponent
        step = single((single(1) - single(0.1)) / single(steps))
        ends = []
        for place in range(steps + 1):
            up = np.float64(single(0.1)) + np.float64(step) * place
            down = 1 - np.float64(step) * (steps - place)
            ends.append(single(up if place < (steps + 1) / 2 else down))
        factor = single(10.0 ** (exponent - 6))
        for low, high in pairwise(ends):
            positive.append(factor * single((low + high) / single(2)))
    values = sorted([-value for value in positive] + positive + [single(0), single(1)])
    return np.array(values, "<f4").tobytes()


def four_bit(
    name: str, rows: int, columns: int, quant_type: str = "nf4", blocksize: int = 64, *,
    double_quant: bool = True, storage: str = "U8", dtype: str = "bfloat16",
) -> Tensors:  # fmt: skip
    """Returns a weight with its components, all of them any codes and scales."""
    blocks = -(-rows * columns // blocksize)
    words = rows * columns // 2 // _SIZES.get(storage, 1)
    packed = bits(name, "U8", rows * columns // 2)
    table = np.array(MAPS[quant_type], "<u4").tobytes()
    parts = {"": Tensor(storage, (words, 1), packed.content)}
    state: dict[str, Any] = {"quant_type": quant_type, "blocksize": blocksize}
    state |= {"dtype": dtype, "shape": [rows, columns]}
    if double_quant:
        codes = _noise(f"{name} absmax", (blocks,), "u1") & 0x3F | 0x80
        parts[".absmax"] = Tensor("U8", (blocks,), codes.tobytes())
        parts[".nested_absmax"] = scale(f"{name} nested", "F32", -(-blocks // 256))
        parts[".nested_quant_map"] = Tensor("F32", (256,), _nested_map())
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.046875}
    else:
        parts[".absmax"] = scale(f"{name} absmax", "F32", blocks)
    parts[".quant_map"] = Tensor("F32", (16,), table)
    text = json.dumps(state).encode()
    parts[f".quant_state.bitsandbytes__{quant_type}"] = Tensor("U8", (len(text),), text)
    return {f"{name}{suffix}": part for suffix, part in parts.items()}


def write_four_bit(folder: Path, *layers: Mapping[str, Any], **options: Any) -> None:
    """Writes layers, each in a format of its own, or two in one format."""
    tensors = trunk()
    for number, more in enumerate(layers or ({}, {})):
        for module, shape in SHAPES.items():
            name = f"model.layers.{number}.{module}.weight"
            tensors |= four_bit(name, *shape, **{**options, **more})
    storages = {"U8": "uint8", "BF16": "bfloat16", "F32": "float32"}
    described = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": options.get("quant_type", "nf4"),
        "bnb_4bit_use_double_quant": options.get("double_quant", True),
        "bnb_4bit_quant_storage": storages[options.get("storage", "U8")],
        "bnb_4bit_compute_dtype": "float16",
        "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_threshold": 6.0,
    }
    write(folder, tensors, quantization_config=described)


def write_nf4(folder: Path) -> None:
    write_four_bit(folder)


def write_fp4(folder: Path) -> None:
    write_four_bit(folder, quant_type="fp4", blocksize=128, double_quant=False)


def write_fsdp(folder: Path) -> None:
    write_four_bit(folder, storage="BF16")


def write_two_block_sizes(folder: Path) -> None:
    write_four_bit(folder, {"blocksize": 128}, {}, {})


# --- formats of others ----------------------------------------------------------------------------


def encoded(
    parts_of: Callable[[str, int, int], Tensors],
    quantization: Mapping[str, Any] | None,
    **more: Any,
) -> Callable[[Path], None]:
    """Returns what writes a checkpoint whose layers are encoded.

    Args:
        parts_of: makes the parts of a weight, by their suffixes, of a name, rows and columns.
        quantization: quantization_config.
        more: further keys of the config.
    """

    def make(folder: Path) -> None:
        tensors = trunk()
        for module, shape in SHAPES.items():
            name = f"model.layers.0.{module}"
            parts = parts_of(name, *shape)
            tensors |= {f"{name}.{suffix}": part for suffix, part in parts.items()}
        config = dict(more)
        if quantization is not None:
            config["quantization_config"] = dict(quantization)
        write(folder, tensors, **config)

    return make


def _fp8(name: str, rows: int, columns: int) -> Tensor:
    return eight_bits(name, "F8_E4M3", rows, columns)


def _up(number: int, step: int) -> int:
    return -(-number // step)


def fp8_blocks(name: str, rows: int, columns: int) -> Tensors:
    scales = scale(f"{name} scale", "F32", _up(rows, 128), _up(columns, 128))
    return {"weight": _fp8(name, rows, columns), "weight_scale_inv": scales}


def fp8_powers(name: str, rows: int, columns: int) -> Tensors:
    scales = powers(f"{name} scale", "F8_E8M0", _up(rows, 64), _up(columns, 32))
    return {"weight": _fp8(name, rows, columns), "scale": scales}


def fp8_tensor(name: str, rows: int, columns: int) -> Tensors:
    return {"weight": _fp8(name, rows, columns), "weight_scale": full(0.3, "F32")}


def fp8_rows(name: str, rows: int, columns: int) -> Tensors:
    return {
        "weight": _fp8(name, rows, columns),
        "weight_scale": scale(f"{name} scale", "BF16", rows, 1),
        "input_scale": full(1, "F32", 1),
    }


def fp8_casts(name: str, rows: int, columns: int) -> Tensors:
    return {"weight": eight_bits(name, "F8_E5M2", rows, columns)}


def mxfp8(name: str, rows: int, columns: int) -> Tensors:
    scales = powers(f"{name} scale", "U8", rows, columns // 32)
    return {"weight": _fp8(name, rows, columns), "weight_scale": scales}


def int8_rows(name: str, rows: int, columns: int) -> Tensors:
    scales = scale(f"{name} scale", "F32", rows, 1)
    return {"weight": bits(name, "I8", rows, columns), "weight_scale": scales}


def llm_int8(name: str, rows: int, columns: int) -> Tensors:
    return {
        "weight": bits(name, "I8", rows, columns),
        "SCB": scale(f"{name} scale", "F32", rows),
        "weight_format": Tensor("U8", (), b"\0"),
    }


def nvfp4(name: str, rows: int, columns: int) -> Tensors:
    return {
        "weight_packed": bits(name, "U8", rows, columns // 2),
        "weight_scale": scale(f"{name} scale", "F8_E4M3", rows, columns // 16),
        "weight_global_scale": full(17, "F32", 1),
    }


def nvfp4_modelopt(name: str, rows: int, columns: int) -> Tensors:
    return {
        "weight": bits(name, "U8", rows, columns // 2),
        "weight_scale": scale(f"{name} scale", "F8_E4M3", rows, columns // 16),
        "weight_scale_2": full(0.07, "F32"),
        "input_scale": full(1, "F32"),
    }


def mxfp4_rows(name: str, rows: int, columns: int) -> Tensors:
    scales = powers(f"{name} scale", "F8_E8M0", rows, columns // 32)
    return {"weight": bits(name, "I8", rows, columns // 2), "scale": scales}


def mxfp4_packed(name: str, rows: int, columns: int) -> Tensors:
    scales = powers(f"{name} scale", "U8", rows, columns // 32)
    return {"weight_packed": bits(name, "U8", rows, columns // 2), "weight_scale": scales}


def gptq(width: int = 4, group: int = 32, *, is_shuffled: bool = False) -> Any:
    def parts_of(name: str, rows: int, columns: int) -> Tensors:
        groups = _up(columns, group)
        order = np.arange(columns) // group
        if is_shuffled:
            order = order[np.argsort(_noise(f"{name} order", (columns,), "<u4"), kind="stable")]
        return {
            "qweight": bits(name, "I32", columns * width // 32, rows),
            "qzeros": bits(f"{name} zeros", "I32", groups, rows * width // 32),
            "scales": scale(f"{name} scale", "F16", groups, rows),
            "g_idx": integers("I32", *order.tolist()),
        }

    return parts_of


def awq(name: str, rows: int, columns: int) -> Tensors:
    return {
        "qweight": bits(name, "I32", columns, rows // 8),
        "qzeros": bits(f"{name} zeros", "I32", columns // 32, rows // 8),
        "scales": scale(f"{name} scale", "F16", columns // 32, rows),
    }


def compressed(width: int = 4, group: int | None = 32, *, has_zeros: bool = False) -> Any:
    def parts_of(name: str, rows: int, columns: int) -> Tensors:
        groups = 1 if group is None else columns // group
        parts = {
            "weight_packed": bits(name, "I32", rows, columns * width // 32),
            "weight_scale": scale(f"{name} scale", "BF16", rows, groups),
            "weight_shape": integers("I64", rows, columns),
        }
        if has_zeros:
            zeros = bits(f"{name} zeros", "I32", rows * width // 32, groups)
            parts["weight_zero_point"] = zeros
        return parts

    return parts_of


def torchao(name: str, rows: int, columns: int) -> Tensors:
    return {
        "_weight_qdata": bits(name, "I8", rows, columns // 2),
        "_weight_scale": scale(f"{name} scale", "BF16", columns // 32, rows),
        "_weight_zero_point": scale(f"{name} zeros", "BF16", columns // 32, rows),
    }


def _tensors_of_config(width: int, kind: str = "int", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": width, "type": kind, **weights}}
    return {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def _compressed_tensors(format: str, width: int, kind: str = "int", **weights: Any) -> Any:
    described = _tensors_of_config(width, kind, **weights)
    return {"quant_method": "compressed-tensors", "format": format, **described}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
_TORCHAO = {
    "_type": "Int4WeightOnlyConfig",
    "_version": 2,
    "_data": {
        "group_size": 32,
        "int4_packing_format": {"_type": "Int4PackingFormat", "_data": "PLAIN"},
    },
}
ENCODED = {
    "fp8 blocks": encoded(fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8 powers of two": encoded(
        fp8_powers, {"quant_method": "fp8", "weight_block_size": [64, 32], "scale_fmt": "ue8m0"}
    ),
    "fp8 modelopt": encoded(fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "fp8 compressed-tensors": encoded(
        fp8_rows, _compressed_tensors("float-quantized", 8, "float", strategy="channel")
    ),
    "fp8 casts": encoded(fp8_casts, None),
    "mxfp8": encoded(mxfp8, {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    "int8 compressed-tensors": encoded(
        int8_rows, _compressed_tensors("int-quantized", 8, strategy="channel")
    ),
    "int8 bitsandbytes": encoded(llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nvfp4 compressed-tensors": encoded(
        nvfp4, _compressed_tensors("nvfp4-pack-quantized", 4, "float", group_size=16)
    ),
    "nvfp4 modelopt": encoded(nvfp4_modelopt, {"quant_method": "modelopt_fp4"}),
    "mxfp4 rows": encoded(
        mxfp4_rows, {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    ),
    "mxfp4 compressed-tensors": encoded(
        mxfp4_packed, _compressed_tensors("mxfp4-pack-quantized", 4, "float", group_size=32)
    ),
    "gptq": encoded(gptq(), _GPTQ),
    "gptq 2 bits": encoded(gptq(2, 64), _GPTQ | {"bits": 2, "group_size": 64}),
    "gptq 3 bits": encoded(gptq(3, 64), _GPTQ | {"bits": 3, "group_size": 64}),
    "gptq 8 bits": encoded(gptq(8), _GPTQ | {"bits": 8}),
    "gptq shuffled": encoded(gptq(is_shuffled=True), _GPTQ | {"desc_act": True}),
    "gptq v2": encoded(gptq(), _GPTQ | {"checkpoint_format": "gptq_v2"}),
    "autoround": encoded(
        gptq(),
        {**_GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
    ),
    "awq": encoded(
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    ),
    "int4 compressed-tensors": encoded(
        compressed(), _compressed_tensors("pack-quantized", 4, group_size=32)
    ),
    "int4 with zeros": encoded(
        compressed(has_zeros=True),
        _compressed_tensors("pack-quantized", 4, group_size=32, symmetric=False),
    ),
    "int4 channels": encoded(
        compressed(group=None), _compressed_tensors("pack-quantized", 4, strategy="channel")
    ),
    "int8 packed": encoded(
        compressed(8), _compressed_tensors("pack-quantized", 8, group_size=32)
    ),
    "torchao": encoded(torchao, {"quant_method": "torchao", "quant_type": {"default": _TORCHAO}}),
}  # fmt: skip


# --- the giants -----------------------------------------------------------------------------------


def write_deepseek_v4(folder: Path) -> None:
    """DeepSeek-V4's names: MXFP4 experts in a trunk of FP8 blocks."""
    tensors = {"embed.weight": weight("embed", "BF16", 96, 128)}
    tensors["head.weight"] = weight("head", "BF16", 96, 128)
    for place in ("layers.0", "mtp.0"):
        for module in ("attn.wq_a", "attn.wo_b", "ffn.shared_experts.w1"):
            name = f"{place}.{module}"
            tensors[f"{name}.weight"] = _fp8(name, 128, 256)
            tensors[f"{name}.scale"] = powers(f"{name} scale", "F8_E8M0", 1, 2)
        for expert in range(2):
            for part, shape in {"w1": (64, 128), "w2": (128, 64), "w3": (64, 128)}.items():
                name = f"{place}.ffn.experts.{expert}.{part}"
                made = mxfp4_rows(name, *shape)
                tensors |= {f"{name}.{suffix}": part for suffix, part in made.items()}
        tensors[f"{place}.ffn.gate.weight"] = weight(f"{place} gate", "BF16", 2, 128)
        tensors[f"{place}.attn_norm.weight"] = full(1, "BF16", 128)
        tensors[f"{place}.hc_attn_fn"] = weight(f"{place} hc", "F32", 4, 64)
        tensors[f"{place}.attn.attn_sink"] = weight(f"{place} sink", "F32", 4)
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "n_routed_experts": 2,
        "dtype": "bfloat16",
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "scale_fmt": "ue8m0",
        },
    }
    write(folder, tensors, config=config)


def write_kimi(folder: Path) -> None:
    """Kimi K2.6's names: INT4 experts, and a quantization_config inside text_config."""
    layer = "language_model.model.layers.1"
    tensors = {
        "language_model.model.embed_tokens.weight": weight("embed", "BF16", 96, 128),
        "language_model.lm_head.weight": weight("head", "BF16", 96, 128),
        "vision_tower.encoder.blocks.0.wqkv.weight": weight("vision", "BF16", 96, 32),
        f"{layer}.self_attn.q_a_proj.weight": weight("q", "BF16", 64, 128),
        f"{layer}.mlp.gate.weight": weight("gate", "BF16", 2, 128),
        f"{layer}.mlp.gate.e_score_correction_bias": weight("correction", "F32", 2),
    }
    for expert in range(2):
        for part, shape in {
            "gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64),
        }.items():  # fmt: skip
            name = f"{layer}.mlp.experts.{expert}.{part}"
            made = compressed()(name, *shape) | {"weight_shape": integers("I32", *shape)}
            tensors |= {f"{name}.{suffix}": part for suffix, part in made.items()}
    text = {
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_routed_experts": 2,
        "dtype": "bfloat16",
        "quantization_config": _compressed_tensors("pack-quantized", 4, group_size=32),
    }
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "text_config": text,
    }
    write(folder, tensors, config=config)


# --- mixtures -------------------------------------------------------------------------------------


def _mixture(
    folder: Path, model_type: str, architecture: str, tensors: Tensors, **more: Any
) -> None:
    trunk = {"model.embed_tokens.weight": weight("embed", "BF16", 96, 64)}
    trunk[f"model.layers.0.{Q}.weight"] = weight("q", "BF16", 64, 64)
    tensors = trunk | tensors
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 96,
        "dtype": "bfloat16",
    }
    write(folder, tensors, config=config | more)


def _single_experts(place: str, shapes: Mapping[str, tuple[int, int]]) -> Tensors:
    tensors = {}
    for expert in range(2):
        for part, shape in shapes.items():
            name = f"{place}.{expert}.{part}.weight"
            tensors[name] = weight(name, "BF16", *shape)
    return tensors


def write_qwen3_moe(folder: Path) -> None:
    shapes = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}
    tensors = _single_experts("model.layers.0.mlp.experts", shapes)
    tensors["model.layers.0.mlp.gate.weight"] = weight("gate", "BF16", 2, 64)
    more = {"num_experts": 2, "moe_intermediate_size": 96}
    _mixture(folder, "qwen3_moe", "Qwen3MoeForCausalLM", tensors, **more)


def write_mixtral(folder: Path) -> None:
    place = "model.layers.0.block_sparse_moe"
    shapes = {"w1": (96, 64), "w2": (64, 96), "w3": (96, 64)}
    tensors = _single_experts(f"{place}.experts", shapes)
    tensors[f"{place}.gate.weight"] = weight("gate", "BF16", 2, 64)
    _mixture(folder, "mixtral", "MixtralForCausalLM", tensors, num_local_experts=2)


def write_granite(folder: Path) -> None:
    """Experts in stacks of [out, in]."""
    place = "model.layers.0.block_sparse_moe"
    tensors = {
        f"{place}.input_linear.weight": weight("input", "BF16", 2, 192, 64),
        f"{place}.output_linear.weight": weight("output", "BF16", 2, 64, 96),
        f"{place}.router.layer.weight": weight("router", "BF16", 2, 64),
    }
    _mixture(folder, "granitemoe", "GraniteMoeForCausalLM", tensors, num_local_experts=2)


def write_llama4(folder: Path) -> None:
    """Experts in stacks of [in, out]."""
    layer = "language_model.model.layers.0"
    place = f"{layer}.feed_forward"
    tensors = {
        f"{layer}.{Q}.weight": weight("text q", "BF16", 64, 64),
        f"{place}.experts.gate_up_proj": weight("gate_up", "BF16", 2, 64, 192),
        f"{place}.experts.down_proj": weight("down", "BF16", 2, 96, 64),
        f"{place}.router.weight": weight("router", "BF16", 2, 64),
    }
    text = {"model_type": "llama4_text", "num_local_experts": 2, "dtype": "bfloat16"}
    _mixture(
        folder, "llama4", "Llama4ForConditionalGeneration", tensors,
        text_config=text, vision_config={"model_type": "llama4_vision_model"},
    )  # fmt: skip


def write_gpt_oss(folder: Path) -> None:
    """gpt-oss as released: stacks of experts in MXFP4, with biases."""
    place = "model.layers.0.mlp.experts"
    tensors: Tensors = {}
    for part, (rows, columns) in {"gate_up_proj": (192, 64), "down_proj": (64, 96)}.items():
        tensors[f"{place}.{part}_blocks"] = bits(part, "U8", 2, rows, columns // 32, 16)
        tensors[f"{place}.{part}_scales"] = powers(f"{part} scales", "U8", 2, rows, columns // 32)
        tensors[f"{place}.{part}_bias"] = weight(f"{part} bias", "BF16", 2, rows)
    described = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    _mixture(
        folder, "gpt_oss", "GptOssForCausalLM", tensors,
        num_local_experts=2, quantization_config=described,
    )  # fmt: skip


# --- adapters -------------------------------------------------------------------------------------


def write_coarse(folder: Path) -> None:
    """A model whose sums with adapters are exact."""
    write(folder, plain(make=coarse, layers=2))


def write_adapter(folder: Path) -> None:
    tensors = {}
    for layer in range(2):
        for module, rank in ((Q, 4), (UP, 8)):
            place = f"base_model.model.model.layers.{layer}.{module}"
            rows, columns = SHAPES[module]
            tensors[f"{place}.lora_A.weight"] = coarse(f"{place} A", "F32", rank, columns)
            tensors[f"{place}.lora_B.weight"] = coarse(f"{place} B", "F32", rows, rank)
    name = "base_model.model.model.layers.0.input_layernorm.weight"
    tensors[name] = full(0.5, "F32", 128)
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "up_proj"],
        "modules_to_save": ["input_layernorm"],
        "rank_pattern": {"up_proj": 8},
        "alpha_pattern": {"layers.1.mlp.up_proj": 16, r".*\.0\.mlp\.up_proj": 32},
    }
    _write_adapter(folder, tensors, config)


def write_dora(folder: Path) -> None:
    tensors = {}
    for layer in range(2):
        place = f"base_model.model.model.layers.{layer}.{DOWN}"
        rows, columns = SHAPES[DOWN]
        tensors[f"{place}.lora_A.weight"] = coarse(f"{place} A", "F32", 4, columns)
        tensors[f"{place}.lora_B.weight"] = coarse(f"{place} B", "F32", rows, 4)
        tensors[f"{place}.lora_magnitude_vector"] = scale(f"{place} m", "F32", rows)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "use_dora": True}
    _write_adapter(folder, tensors, config)


def write_coarse_mixture(folder: Path) -> None:
    place = "model.layers.0.mlp"
    tensors = {f"{place}.gate.weight": weight("gate", "BF16", 2, 64)}
    for expert in range(2):
        for part, shape in {
            "gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32),
        }.items():  # fmt: skip
            name = f"{place}.experts.{expert}.{part}.weight"
            tensors[name] = coarse(name, "BF16", *shape)
    more = {"num_experts": 2, "moe_intermediate_size": 32}
    _mixture(folder, "qwen3_moe", "Qwen3MoeForCausalLM", tensors, **more)


def write_adapter_of_experts(folder: Path) -> None:
    place = "base_model.model.model.layers.0.mlp.experts"
    tensors = {
        f"{place}.lora_A.weight": coarse("A", "F32", 4, 64),
        f"{place}.lora_B.weight": coarse("B", "F32", 64, 4),
    }
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    config["target_parameters"] = ["mlp.experts.gate_up_proj"]
    _write_adapter(folder, tensors, config)


def _write_adapter(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    folder.mkdir()
    save(folder / "adapter_model.safetensors", tensors)
    save_json(folder / "adapter_config.json", config)


# --- diffusers ------------------------------------------------------------------------------------


def write_pipeline(folder: Path) -> None:
    """A pipeline: a denoiser, a text encoder, and a tokenizer."""
    write(folder / "text_encoder", plain())
    names = [
        f"transformer_blocks.{block}.attn.{part}" for block in (0, 1) for part in ("to_q", "to_k")
    ]
    shards = []
    for block in (0, 1):
        mine = [name for name in names if f".{block}." in name]
        shards.append({f"{name}.weight": weight(name, "BF16", 64, 64) for name in mine})
    shards[0]["x_embedder.weight"] = weight("x", "BF16", 64, 16)
    shards[1]["proj_out.weight"] = weight("out", "BF16", 16, 64)
    config = {"_class_name": "FluxTransformer2DModel", "num_layers": 2}
    write(folder / "transformer", *shards, config=config, stem="diffusion_pytorch_model")
    (folder / "tokenizer").mkdir()
    save_json(folder / "tokenizer/vocab.json", {})
    (folder / "scheduler").mkdir()
    save_json(folder / "scheduler/scheduler_config.json", {"_class_name": "Euler"})
    index = {
        "_class_name": "FluxPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "LlamaModel"],
        "tokenizer": ["transformers", "LlamaTokenizer"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
    }
    save_json(folder / "model_index.json", index)
    (folder / "README.md").write_text(CARD)


# --- GGUF -----------------------------------------------------------------------------------------

BLOCKS = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2),
    "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "IQ2_XXS": (16, 256, 66),
    "IQ2_XS": (17, 256, 74), "IQ3_XXS": (18, 256, 98), "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18), "IQ3_S": (21, 256, 110), "IQ2_S": (22, 256, 82),
    "IQ4_XS": (23, 256, 136), "IQ1_M": (29, 256, 56), "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66), "MXFP4": (39, 32, 17), "NVFP4": (40, 64, 36),
}  # fmt: skip
"""Of each type its number, the values and the bytes of a block."""

_HALVES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (), "MXFP4": (),
    "NVFP4": (),
}  # fmt: skip
"""Where a block has numbers in half precision; those of other types have one at its beginning."""

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "Tiny",
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 512,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.dimension_count": 64,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 3,
}
GGUF_SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (4, 256),
    "blk.0.attn_norm.weight": (256,),
    "blk.0.attn_q.weight": (256, 256),
    "blk.0.attn_k.weight": (128, 256),
    "blk.0.attn_v.weight": (128, 256),
    "blk.0.attn_output.weight": (256, 256),
    "blk.0.ffn_norm.weight": (256,),
    "blk.0.ffn_gate.weight": (64, 256),
    "blk.0.ffn_up.weight": (64, 256),
    "blk.0.ffn_down.weight": (256, 512),
    "output_norm.weight": (256,),
    "output.weight": (4, 256),
}
_EXPERTS: dict[str, tuple[int, ...]] = {
    name: shape for name, shape in GGUF_SHAPES.items() if ".ffn_" not in name
} | {
    "blk.0.ffn_norm.weight": (256,),
    "blk.0.ffn_gate_inp.weight": (3, 256),
    "blk.0.ffn_gate_exps.weight": (3, 64, 256),
    "blk.0.ffn_up_exps.weight": (3, 64, 256),
    "blk.0.ffn_down_exps.weight": (3, 256, 64),
}


def _of(architecture: str, **more: Any) -> dict[str, Any]:
    """The metadata of Llama for another architecture; double underscores stand for dots."""
    renamed = {key.replace("llama.", f"{architecture}."): LLAMA[key] for key in LLAMA}
    renamed["general.architecture"] = architecture
    for key, value in more.items():
        renamed[f"{architecture}.{key.replace('__', '.')}"] = value
    return renamed


def _without(shapes: Mapping[str, tuple[int, ...]], *words: str) -> dict[str, tuple[int, ...]]:
    return {
        name: shape for name, shape in shapes.items() if not any(word in name for word in words)
    }


FAMILIES: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "mixtral": ({**LLAMA, "llama.expert_count": 3, "llama.expert_used_count": 2}, _EXPERTS),
    "gemma3": (
        _of("gemma3", attention__key_length=64, attention__sliding_window=64),
        {
            **_without(GGUF_SHAPES, "output.weight"),
            "blk.0.attn_q_norm.weight": (64,),
            "blk.0.attn_k_norm.weight": (64,),
            "blk.0.post_attention_norm.weight": (256,),
            "blk.0.post_ffw_norm.weight": (256,),
        },
    ),
    "qwen2": (
        _of("qwen2"),
        {
            **GGUF_SHAPES,
            "blk.0.attn_q.bias": (256,),
            "blk.0.attn_k.bias": (128,),
            "blk.0.attn_v.bias": (128,),
        },
    ),
    "deepseek2": (
        _of("deepseek2", attention__key_length_mla=48, attention__value_length_mla=32),
        {
            **_without(_EXPERTS, "attn_"),
            "blk.0.attn_norm.weight": (256,),
            "blk.0.attn_q.weight": (192, 256),
            "blk.0.attn_kv_a_mqa.weight": (80, 256),
            "blk.0.attn_kv_a_norm.weight": (64,),
            "blk.0.attn_k_b.weight": (4, 64, 32),
            "blk.0.attn_v_b.weight": (4, 32, 64),
            "blk.0.attn_output.weight": (256, 128),
            "blk.0.exp_probs_b.bias": (3,),
        },
    ),
    "gpt-oss": (
        _of("gpt-oss", expert_count=3, attention__key_length=64),
        {
            **_without(_EXPERTS, "ffn_norm"),
            "blk.0.post_attention_norm.weight": (256,),
            "blk.0.attn_sinks.weight": (4,),
            "blk.0.ffn_gate_exps.bias": (3, 64),
            "blk.0.ffn_up_exps.bias": (3, 64),
            "blk.0.ffn_down_exps.bias": (3, 256),
        },
    ),
    "qwen35": (
        _of(
            "qwen35",
            ssm__group_count=2, ssm__time_step_rank=4, ssm__state_size=32, ssm__inner_size=128,
            ssm__conv_kernel=4, attention__recurrent_layers=[True],
        ),
        {
            **_without(GGUF_SHAPES, "attn_", "ffn_norm"),
            "blk.0.attn_norm.weight": (256,),
            "blk.0.post_attention_norm.weight": (256,),
            "blk.0.attn_qkv.weight": (256, 256),
            "blk.0.attn_gate.weight": (128, 256),
            "blk.0.ssm_alpha.weight": (4, 256),
            "blk.0.ssm_beta.weight": (4, 256),
            "blk.0.ssm_a": (4,),
            "blk.0.ssm_dt.bias": (4,),
            "blk.0.ssm_conv1d.weight": (256, 32),
            "blk.0.ssm_norm.weight": (32,),
            "blk.0.ssm_out.weight": (256, 128),
        },
    ),
}  # fmt: skip


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _value(found: Any) -> bytes:
    """A value of the metadata with its type."""
    if isinstance(found, bool):
        return struct.pack("<IB", 7, found)
    if isinstance(found, int):
        return struct.pack("<Ii", 5, found)
    if isinstance(found, float):
        return struct.pack("<If", 6, found)
    if isinstance(found, str):
        return struct.pack("<I", 8) + _text(found)
    items = [_value(one) for one in found]
    count = struct.pack("<Q", len(found))
    return struct.pack("<I", 9) + items[0][:4] + count + b"".join(item[4:] for item in items)


def _blocks(name: str, shape: tuple[int, ...], block_type: str) -> bytes:
    if name.endswith("ssm_a"):  # the logarithm of others depends on the CPU
        return full(-1, block_type, *shape).content
    if block_type in ("F32", "F16", "BF16"):
        return weight(name, block_type, *shape).content
    _, values, size = BLOCKS[block_type]
    blocks = _noise(name, (math.prod(shape) // values, size), "u1").copy()
    for place in _HALVES.get(block_type, (0,)):
        blocks[:, place] = 0x1F
        blocks[:, place + 1] = 0x21  # 0.01 in half precision
    if block_type == "MXFP4":
        blocks[:, 0] = 120
    if block_type == "NVFP4":
        blocks[:, :4] &= 0x3F
    if block_type == "IQ1_M":  # the highest 4 bits of its words are a scale
        blocks[:, 49::2] &= 0x1F
    return bytes(blocks.tobytes())


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    types: Callable[[int], str],
) -> None:
    """Writes a file; vectors are F32, a matrix is of the type for its number."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(metadata))
    for key, found in metadata.items():
        head += _text(key) + _value(found)
    data = b""
    for number, (name, shape) in enumerate(shapes.items()):
        block_type = types(number) if len(shape) > 1 else "F32"
        if shape[-1] % BLOCKS[block_type][1]:
            block_type = "F16"
        head += _text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", BLOCKS[block_type][0], len(data))
        content = _blocks(name, shape, block_type)
        data += content + b"\0" * (-len(content) % 32)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)


def gguf_of_type(block_type: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        write_gguf(folder / "model.gguf", LLAMA, GGUF_SHAPES, lambda _: block_type)

    return make


def gguf_of_family(family: str) -> Callable[[Path], None]:
    types = ("F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_1")
    metadata, shapes = FAMILIES[family]

    def make(folder: Path) -> None:
        write_gguf(folder / "model.gguf", metadata, shapes, lambda number: types[number % 6])

    return make


# --- all of them ----------------------------------------------------------------------------------

SOURCES: dict[str, Callable[[Path], None]] = {
    "plain": write_plain,
    "float16": write_float16,
    "float32": write_float32,
    "odd": write_odd,
    "gpt2": write_gpt2,
    "vision": write_vision,
    "bert": write_bert,
    "pickle": write_pickle,
    "pickles": write_pickles,
    "nf4": write_nf4,
    "fp4": write_fp4,
    "fsdp": write_fsdp,
    "two block sizes": write_two_block_sizes,
    "deepseek-v4": write_deepseek_v4,
    "kimi": write_kimi,
    "qwen3_moe": write_qwen3_moe,
    "mixtral": write_mixtral,
    "granite": write_granite,
    "llama4": write_llama4,
    "gpt-oss": write_gpt_oss,
    "coarse": write_coarse,
    "adapter": write_adapter,
    "dora": write_dora,
    "coarse mixture": write_coarse_mixture,
    "adapter of experts": write_adapter_of_experts,
    "pipeline": write_pipeline,
    **ENCODED,
    **{f"gguf {name}": gguf_of_type(name) for name in BLOCKS},
    **{f"gguf {name}": gguf_of_family(name) for name in FAMILIES},
}
"""Writes each source into a folder that is not there yet."""
