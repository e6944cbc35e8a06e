"""Damaged checkpoints with 4-bit experts are refused in a line that names a tensor."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import tensors_of
from safetensors.torch import save_file

pytest.importorskip("transformers", minversion="5.8")
pytestmark = pytest.mark.oracle

from packed_experts import (  # noqa: E402
    encode,
    load,
    make_mixture,
    pack_one_by_one,
    pack_stacked,
    skip_linear_layers,
)
from transformers import AutoModelForCausalLM  # noqa: E402

import nf4conv.inference.moe  # noqa: E402, F401 - what is tested
from nf4conv.errors import CodecError  # noqa: E402
from nf4conv.inference.moe.loading.checkpoints import look_at_packed  # noqa: E402

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("whole")
    source = make_mixture("qwen3_moe", folder / "source")
    model = load(source)
    pack_one_by_one("qwen3_moe", source, folder / "packed")
    pack_stacked(source, folder / "stacked", model.state_dict())
    for layout in ("packed", "stacked"):
        skip_linear_layers(folder / layout, model)
    return {layout: folder / layout for layout in ("packed", "stacked")}


def refused(folder: Path, damaged: Path, damage: Callable[[Tensors], None]) -> str:
    """Returns what is said of a checkpoint after some damage."""
    tensors = tensors_of(folder)
    damage(tensors)
    damaged.mkdir(exist_ok=True)
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    (damaged / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CodecError) as error:
        AutoModelForCausalLM.from_pretrained(damaged)
    message = str(error.value)
    assert "\n" not in message
    assert "again" in message, "it says what to do"
    return message


def without(pattern: str) -> Callable[[Tensors], None]:
    def damage(tensors: Tensors) -> None:
        for name in [name for name in tensors if re.search(pattern, name)]:
            del tensors[name]

    return damage


def repacked(name: str, weight: torch.Tensor) -> Callable[[Tensors], None]:
    """Replaces a weight and its components."""

    def damage(tensors: Tensors) -> None:
        encode(tensors, name, weight)

    return damage


WANTED = "is missing: the model's config wants experts 0 to 3"
DOWN = "model.layers.0.mlp.experts.down_proj is missing"
MISSING = [  # a pattern of names, and what is said
    (re.escape(EXPERT), f"{EXPERT} {WANTED}"),
    (r"layers\.1\.mlp\.experts\.3\.up_proj\.", "layers.1.mlp.experts.3.up_proj.weight is missing"),
    (r"layers\.1\.mlp\.experts\.3\.", WANTED),
    (
        r"layers\.1\..*experts.*up_proj",
        "layers.1.mlp.experts.gate_up_proj: mlp.experts.*.up_proj.weight is missing",
    ),
    (r"layers\.0\.mlp\.experts.*down_proj", DOWN),
    (re.escape(f"{EXPERT}.nested_absmax"), f"{EXPERT}.nested_absmax "),
    (re.escape(EXPERT) + "$", f"{EXPERT}: the packed codes are missing"),
]


@pytest.mark.parametrize(("pattern", "said"), MISSING)
def test_what_is_missing_is_named(folders, tmp_path, pattern, said):
    assert said in refused(folders["packed"], tmp_path, without(pattern))


def test_a_stack_is_missing(folders, tmp_path):
    message = refused(folders["stacked"], tmp_path, without(MISSING[4][0]))
    assert message.startswith(DOWN)


def test_shapes_differ(folders, tmp_path):
    damage = repacked(EXPERT, torch.randn(64, 64))
    message = refused(folders["packed"], tmp_path, damage)
    assert "model.layers.1.mlp.experts.gate_up_proj (mlp.experts.*.up_proj.weight)" in message
    assert "expert 2 is 64 × 64" in message


def test_a_stack_of_another_shape(folders, tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    damage = repacked(name, torch.randn(4, 64, 48))
    message = refused(folders["stacked"], tmp_path, damage)
    assert f"{name}: 4 experts of 64 × 48 in the files" in message


def test_a_stack_whose_blocks_belong_to_two_experts(folders, tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    damage = repacked(name, torch.randn(4, 8, 4))
    message = refused(folders["stacked"], tmp_path, damage)
    assert f"{name} (experts.down_proj): experts of 8 × 4 do not fill blocks of 64" in message


def test_damaged_codes(folders, tmp_path):
    def damage(tensors: Tensors) -> None:
        tensors[EXPERT] = tensors[EXPERT][:-64].clone()

    message = refused(folders["packed"], tmp_path, damage)
    assert "(mlp.experts.*.up_proj.weight)" in message


def test_experts_on_the_disk(folders, tmp_path):
    """accelerate's offloading, which transformers allows if the config asks for it."""
    folder = shutil.copytree(folders["packed"], tmp_path / "mixture")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["llm_int8_enable_fp32_cpu_offload"] = True
    (folder / "config.json").write_text(json.dumps(config))
    others = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0")
    device_map = {**dict.fromkeys(others, "cpu"), "model.layers.1": "disk"}
    with pytest.raises(CodecError, match="packed experts cannot stay"):
        AutoModelForCausalLM.from_pretrained(
            folder, device_map=device_map, offload_folder=tmp_path / "disk"
        )


def test_a_module_that_takes_no_packed_experts(folders):
    """As Granite's are before transformers 5.13."""
    linear = torch.nn.Linear(1, 1)
    linear.weight = torch.nn.Parameter(torch.zeros(4, 8, 8))
    model = torch.nn.ModuleDict({"moe": torch.nn.ModuleDict({"input_linear": linear})})
    with pytest.raises(CodecError, match=r"^moe\.input_linear\.weight: no packed experts load"):
        look_at_packed(model, sorted(folders["packed"].glob("*.safetensors")), None)
