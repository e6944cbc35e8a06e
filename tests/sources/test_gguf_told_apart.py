"""Models that llama.cpp's converter writes as one architecture are told apart, or refused by name.

tests/sources/test_gguf_aliases.py walks through the classes of the converter.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import done
from gguf_files import LLAMA, SHAPES, text, write_gguf
from safetensors.torch import load_file

from nf4conv.errors import SourceError, UndecodableError
from nf4conv.sources.gguf.families import (
    GgufFamily,
    architectures,
    completing,
    families_of,
    family_of,
    joining,
)
from nf4conv.sources.gguf.header import Texts, read_gguf_header
from nf4conv.sources.opening import open_source


def texts(*words: str) -> Texts:
    return Texts(b"".join(map(text, words)), len(words))


FROZEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf_families.json").read_text())
"""A digest of each family, in the order in which they are tried, as commit cd7b292 has it."""

ADDED: dict[str, dict[str, object]] = {"umt5": {"scale_decoder_outputs": False}}
"""Constants that families of a model_type have since; CHANGELOG.md says why."""


def digest_of(family: GgufFamily) -> str:
    """Names, joins and changes in any order; what makes config.json in its order."""
    constants = dict(family.constants)
    for key, value in ADDED.get(family.model_type, {}).items():
        assert constants.pop(key) == value
    described = {
        "model_type": family.model_type,
        "architecture": family.architecture,
        "names": dict(family.names),
        "joined": sorted(
            [one.name, one.put_together.__name__, *one.parts] for one in family.joined
        ),
        "changed": dict(family.changed),
        "shapes": dict(family.shapes),
        "config": list(family.config.items()),
        "constants": list(constants.items()),
        "shown": list(family.shown.items()),
        "rows": list(family.rows.items()),
        "complete": [function.__name__ for function in family.complete],
        "told_by": family.told_by,
        "also": list(family.also),
        "is_encoder": family.is_encoder,
        "refusal": family.refusal,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def test_families_are_those_that_were_converted_with_before():
    found = {name: [digest_of(family) for family in families_of(name)] for name in architectures()}
    assert found == FROZEN
    assert sum(map(len, found.values())) > 100


def test_every_function_of_a_step_is_used_by_a_family():
    families = [family for name in architectures() for family in families_of(name)]
    used = {function for family in families for function in family.complete}
    used |= {join.put_together for family in families for join in family.joined}
    for module, start in ((completing, "add_"), (joining, "join_")):
        assert {one for name, one in vars(module).items() if name.startswith(start)} <= used


CAMEMBERT = {"tokenizer.ggml.tokens": texts("<s>", "▁▁le", "▁▁la", "▁s")}
BERT = {"tokenizer.ggml.tokens": texts("[CLS]", "▁the", "ing", "▁▁")}
TYPES = {"token_types.weight"}


@pytest.mark.parametrize(
    ("architecture", "sizes", "names", "model_type"),
    [
        ("bert", CAMEMBERT, TYPES, "camembert"),
        ("bert", BERT, TYPES, "bert"),
        ("bert", BERT, set(), "distilbert"),
        ("glm4moe", {"tokenizer.ggml.pre": "solar-open"}, set(), "solar_open"),
        ("glm4moe", {"leading_dense_block_count": 0}, set(), "glm4_moe"),
        ("granitehybrid", {"rope.scaling.finetuned": True}, {"blk.*.ssm_a"}, "bamba"),
        ("granitehybrid", {"rope.scaling.finetuned": True}, set(), "granitemoehybrid"),
        ("granitehybrid", {}, {"blk.*.ssm_a"}, "granitemoehybrid"),
        ("mistral3", {"attention.temperature_scale": 0.1}, set(), "ministral3"),
        ("mistral3", {}, set(), "mistral"),
        ("qwen2", {}, {"blk.*.attn_q.weight"}, "llama"),
        ("qwen2", {}, {"blk.*.attn_q.weight", "blk.*.attn_q.bias"}, "qwen2"),
        ("deepseek2", {"attention.temperature_scale": 0.1}, set(), "mistral_large_3"),
        ("nemotron_h_moe", {"expert_used_count": [2, 0]}, set(), "nemotron_h_puzzle"),
        ("nemotron_h_moe", {"expert_used_count": 2}, set(), "nemotron_h"),
        ("chatglm", {}, {"blk.*.attn_qkv.weight"}, "chatglm"),
        ("granite_swa", {}, {"blk.*.ffn_gate_up_exps.weight"}, "granitemoe_swa"),
    ],
)
def test_which_family_is_meant(
    architecture: str, sizes: dict[str, Any], names: set[str], model_type: str
):
    family = family_of(architecture, sizes, names)
    assert family is not None
    assert family.model_type == model_type


@pytest.mark.parametrize(
    ("architecture", "changes", "shapes", "said"),
    [
        ("chatglm", {}, {"blk.0.attn_qkv.weight": (8, 8)}, "GGUF of a chatglm model is of code"),
        (
            "deepseek2",
            {"deepseek2.attention.temperature_scale": 0.1},
            {"blk.0.attn_norm.weight": (8,)},
            "GGUF of a mistral_large_3 model was made of Mistral's own files",
        ),
        (
            "llama",
            {"llama.attention.causal": False},
            SHAPES,
            "a llama in which tokens see those behind them; --config-from REPO takes",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path,
    architecture: str,
    changes: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    said: str,
):
    metadata = {**LLAMA, "general.architecture": architecture, **changes}
    path = write_gguf(tmp_path / "model.gguf", metadata, shapes=shapes)
    with pytest.raises(UndecodableError) as error:
        open_source(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def stored(path: Path, name: str) -> torch.Tensor:
    """A matrix of a file, as it is stored in float32."""
    [tensor] = [one for one in read_gguf_header(path)[1] if one.name == name]
    content = path.read_bytes()[tensor.start : tensor.start + tensor.nbytes]
    return torch.frombuffer(bytearray(content), dtype=torch.float32).view(tensor.shape)


def test_rows_of_the_text_model_of_glm_4v(tmp_path: Path):
    """Pairs of the rotated half of each head lie side by side; the file has them as halves."""
    sizes = {
        "glm4.block_count": 1,
        "glm4.embedding_length": 64,
        "glm4.attention.head_count": 4,
        "glm4.attention.head_count_kv": 4,
        "glm4.rope.dimension_count": 8,
        "glm4.rope.dimension_sections": [1, 1, 2, 0],
    }
    name = "blk.0.attn_q.weight"
    path = write_gguf(
        tmp_path / "model.gguf",
        {"general.architecture": "glm4", **sizes},
        shapes={name: (64, 64)},
        default="F32",
    )
    done("dequantize", path, tmp_path / "out", "--device", "cpu", "--dtype", "fp32")
    found = load_file(tmp_path / "out" / "model.safetensors")
    heads = found["model.layers.0.self_attn.q_proj.weight"].view(4, 16, 64)
    again = torch.cat((heads[:, :8:2], heads[:, 1:8:2], heads[:, 8:]), dim=1)
    assert torch.equal(again.reshape(64, 64), stored(path, name))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "glm4"
    assert config["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize(("rotated", "rows"), [(4, 64), (7, 64), (8, 60), (32, 64)])
def test_heads_of_glm_4v_that_do_not_fit(tmp_path: Path, rotated: int, rows: int):
    metadata = {
        "general.architecture": "glm4",
        "glm4.attention.key_length": 16,
        "glm4.rope.dimension_count": rotated,
        "glm4.rope.dimension_sections": [1, 1, 2, 0],
    }
    path = write_gguf(tmp_path / "model.gguf", metadata, shapes={"blk.0.attn_q.weight": (rows, 64)})
    with pytest.raises(SourceError, match=r"blk\.0\.attn_q\.weight: has "):
        open_source(path)


def test_norms_of_each_head_come_one_by_one(tmp_path: Path):
    """StableLM 2 12B, whose norms of queries and keys the converter stacked."""
    metadata = {"general.architecture": "stablelm", "stablelm.block_count": 1}
    path = write_gguf(
        tmp_path / "model.gguf", metadata, shapes={"blk.0.attn_q_norm.weight": (4, 16)}
    )
    source = open_source(path)
    names = [f"model.layers.0.self_attn.q_layernorm.norms.{head}.weight" for head in range(4)]
    assert [(tensor.name, tensor.shape) for tensor in source.tensors] == [
        (name, (16,)) for name in names
    ]
    assert source.config["qk_layernorm"] is True
