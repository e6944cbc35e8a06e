"""Files that llama.cpp quantized: what nf4conv decodes is what others decode.

`make test-gguf-quantized` builds llama.cpp's library, whose function llama_model_quantize makes the
files. The oracles are the package gguf, and transformers' own loading of GGUF files.
"""

import ctypes
import os
from pathlib import Path

import gguf_families
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from nf4conv.commands.dequantize import dequantize_checkpoint
from nf4conv.options import DequantizeOptions, RunOptions

gguf = pytest.importorskip("gguf", reason="make test-gguf-quantized installs gguf")
LIBRARY = Path(os.environ.get("LIBLLAMA", ""))
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(not LIBRARY.is_file(), reason="make test-gguf-quantized builds libllama"),
]

# numbers of enum llama_ftype in llama.h
KINDS = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K_M": 12,
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "IQ2_XXS": 19,
    "IQ2_XS": 20,
    "IQ3_XXS": 23,
    "IQ1_S": 24,
    "IQ4_NL": 25,
    "IQ3_S": 26,
    "IQ2_S": 29,  # which llama.cpp calls IQ2_M
    "IQ4_XS": 30,
    "IQ1_M": 31,
    "TQ1_0": 36,
    "TQ2_0": 37,
}
OF_MIXTURES = {"MXFP4_MOE": 38}
ROTARY = ("attn_q.weight", "attn_k.weight")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 128}


class Importance(ctypes.Structure):
    """struct llama_model_imatrix_data."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.POINTER(ctypes.c_float)),
        ("size", ctypes.c_size_t),
    )


class Parameters(ctypes.Structure):
    """struct llama_model_quantize_params."""

    _fields_ = (
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int),
        ("output_tensor_type", ctypes.c_int),
        ("token_embedding_type", ctypes.c_int),
        ("allow_requantize", ctypes.c_bool),
        ("quantize_output_tensor", ctypes.c_bool),
        ("only_copy", ctypes.c_bool),
        ("pure", ctypes.c_bool),
        ("keep_split", ctypes.c_bool),
        ("dry_run", ctypes.c_bool),
        ("imatrix", ctypes.POINTER(Importance)),
        ("kv_overrides", ctypes.c_void_p),
        ("tt_overrides", ctypes.c_void_p),
        ("prune_layers", ctypes.c_void_p),
        ("max_buf_size", ctypes.c_size_t),
    )


def quantize(source: Path, out: Path, kind: int) -> None:
    """Quantizes a GGUF file with llama.cpp, and an importance of every input channel."""
    library = ctypes.CDLL(str(LIBRARY))
    library.llama_model_quantize_default_params.restype = Parameters
    parameters = library.llama_model_quantize_default_params()
    parameters.nthread = 1
    parameters.ftype = kind
    random = np.random.default_rng(0)
    kept = []
    entries = []
    for tensor in gguf.GGUFReader(source).tensors:
        if len(tensor.shape) < 2:
            continue
        columns = int(tensor.shape[0])
        stacked = int(tensor.shape[2]) if len(tensor.shape) > 2 else 1
        weights = random.uniform(0.5, 2, columns * stacked).astype(np.float32)
        kept.append(weights)
        data = weights.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entries.append(Importance(tensor.name.encode(), data, weights.size))
    entries.append(Importance(None, None, 0))
    array = (Importance * len(entries))(*entries)
    parameters.imatrix = array
    failed = library.llama_model_quantize(
        str(source).encode(), str(out).encode(), ctypes.byref(parameters)
    )
    assert failed == 0


def decoded_by_gguf(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor as the package gguf decodes it, queries and keys in the order of Llama."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        if tensor.name.endswith(ROTARY):
            heads = 4 if "attn_q" in tensor.name else 2
            halves = values.view(heads, -1, 2, values.shape[-1])
            values = halves.transpose(1, 2).reshape(values.shape)
        found[tensor.name] = values
    return found


def name_in_llama(name: str) -> str:
    """The name of a tensor in transformers."""
    modules = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    *layer, module, ending = name.split(".")
    if layer:
        return f"model.layers.{layer[1]}.{modules[module]}.{ending}"
    return f"{modules[module]}.{ending}"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in 32 bits whose rows are whole blocks of 256, as a GGUF file."""
    folder = tmp_path_factory.mktemp("quantized")
    families = {**gguf_families.FAMILIES, "LlamaForCausalLM": SIZES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_families, "FAMILIES", families)
        gguf_families.write_model(folder / "llama", "LlamaForCausalLM", torch.float32)
    return gguf_families.convert(folder / "llama", "f32")


@pytest.mark.parametrize("kind", KINDS)
def test_what_llama_cpp_quantized_decodes_as_elsewhere(tmp_path: Path, original: Path, kind: str):
    """Each tensor as gguf decodes it; the logits are those that transformers computes from it."""
    path = tmp_path / "model.gguf"
    quantize(original, path, KINDS[kind])
    types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert types & {kind, kind.rsplit("_", 1)[0]}
    options = DequantizeOptions(dtype="float32")
    dequantize_checkpoint(path, tmp_path / "back", options, RunOptions(device="cpu"))
    expected, found = decoded_by_gguf(path), load_file(tmp_path / "back" / "model.safetensors")
    assert len(found) == len(expected)
    for name, values in expected.items():
        assert torch.equal(found[name_in_llama(name)], values), name
    tokens = torch.arange(3, 40).view(1, -1)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = LlamaForCausalLM.from_pretrained(tmp_path / "back")
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def test_experts_in_mxfp4_decode_as_elsewhere(tmp_path: Path):
    """gpt-oss with experts in MXFP4, two of whose tensors alternate in transformers."""
    families = {**gguf_families.FAMILIES}
    families["GptOssForCausalLM"] = families["GptOssForCausalLM"] | SIZES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_families, "FAMILIES", families)
        source = gguf_families.write_model(tmp_path / "source", "GptOssForCausalLM", torch.float32)
    path = tmp_path / "model.gguf"
    quantize(gguf_families.convert(source, "f32"), path, OF_MIXTURES["MXFP4_MOE"])
    options = DequantizeOptions(dtype="float32")
    dequantize_checkpoint(path, tmp_path / "back", options, RunOptions(device="cpu"))
    found = load_file(tmp_path / "back" / "model.safetensors")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    decoded = {}
    for role in ("gate", "up", "down"):
        tensor = stored[f"blk.1.ffn_{role}_exps.weight"]
        assert tensor.tensor_type.name == "MXFP4"
        decoded[role] = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
    experts = "model.layers.1.mlp.experts"
    gate_up = found[f"{experts}.gate_up_proj"]
    assert torch.equal(gate_up[..., ::2], decoded["gate"].transpose(1, 2))
    assert torch.equal(gate_up[..., 1::2], decoded["up"].transpose(1, 2))
    assert torch.equal(found[f"{experts}.down_proj"], decoded["down"].transpose(1, 2))
