"""Models that llama.cpp's converter writes as one architecture are told apart, or refused by name.

tests/sources/test_gguf_aliases.py walks through the classes of the converter.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf_files import LLAMA, SHAPES, write_gguf

from nf4conv.errors import UndecodableError
from nf4conv.sources.gguf.families import (
    GgufFamily,
    architectures,
    completing,
    families_of,
    joining,
)
from nf4conv.sources.opening import open_source

FROZEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf_families.json").read_text())
"""A digest of each family, in the order in which they are tried, as commit cd7b292 has it."""


def digest_of(family: GgufFamily) -> str:
    """Names, joins and changes in any order; what makes config.json in its order."""
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
        "constants": list(family.constants.items()),
        "shown": list(family.shown.items()),
        "complete": [function.__name__ for function in family.complete],
        "rows": [],
        "told_by": family.told_by,
        "also": list(family.also),
        "is_encoder": False,
        "refusal": "",
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


UNLIKE = ("gemma4_text", "qwen3_5_text", "qwen3_5_moe_text")
"""Families that are described otherwise since."""

OLD_SIGNS = {
    ("qwen2", "llama"): "lacks_biases",
    ("qwen2", "qwen2"): "",
    ("qwen2vl", "qwen2"): "",
    ("glm4moe", "glm4_moe"): "",
}
"""The signs of cd7b292, where another of two families has one today."""


def test_families_are_those_that_were_converted_with_before():
    """But for those of which config.json is not made any more."""
    compared = 0
    for name in architectures():
        for family in families_of(name):
            if not family.needs_config and family.model_type not in UNLIKE:
                told_by = OLD_SIGNS.get((name, family.model_type), family.told_by)
                assert digest_of(replace(family, told_by=told_by)) in FROZEN[name], family
                compared += 1
    assert compared > 50


def test_every_function_of_a_step_is_used_by_a_family():
    families = [family for name in architectures() for family in families_of(name)]
    used = {function for family in families for function in family.complete}
    used |= {join.put_together for family in families for join in family.joined}
    for module, start in ((completing, "add_"), (joining, "join_")):
        assert {one for name, one in vars(module).items() if name.startswith(start)} <= used


@pytest.mark.parametrize(
    ("architecture", "sizes", "names", "model_type"),
    [
        ("glm4moe", {"tokenizer.ggml.pre": "solar-open"}, set(), "solar_open"),
        ("glm4moe", {"leading_dense_block_count": 1}, set(), "glm4_moe"),
        ("mistral3", {"attention.temperature_scale": 0.1}, set(), "ministral3"),
        ("mistral3", {}, set(), "mistral"),
        ("qwen2", {}, {"blk.*.attn_q.weight"}, "llama"),
        ("qwen2", {}, {"blk.*.attn_q.weight", "blk.*.attn_q.bias"}, "qwen2"),
    ],
)
def test_which_family_is_meant(
    architecture: str, sizes: dict[str, Any], names: set[str], model_type: str
):
    meant = [each for each in families_of(architecture) if each.is_meant(sizes, names)]
    assert meant[0].model_type == model_type


@pytest.mark.parametrize(
    ("architecture", "changes", "shapes", "said"),
    [
        (
            "glm4",
            {"glm4.rope.dimension_sections": [1, 1, 2, 0]},
            {"blk.0.attn_norm.weight": (8,)},
            "GGUF of a model that sees, whose rows the converter moved",
        ),
        (
            "deepseek2",
            {"deepseek2.attention.temperature_scale": 0.1},
            {"blk.0.attn_norm.weight": (8,)},
            "GGUF of a Mistral Large 3, which no transformers has; take the original",
        ),
        (
            "llama",
            {"llama.attention.causal": False},
            SHAPES,
            "a llama, of which the metadata does not say all that config.json does; --config-from",
        ),
        ("lfm2", {}, {"blk.0.attn_norm.weight": (8,)}, "a lfm2, of which the metadata does not"),
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
