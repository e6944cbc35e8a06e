"""Mixtures that see, as AutoModelForImageTextToText: their experts stay in 4 bits too."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", minversion="5.8")
pytestmark = pytest.mark.oracle

from mixtures import SMALL, Packing, pack, save, stacks_of, write_config  # noqa: E402
from transformers import AutoConfig, AutoModelForImageTextToText  # noqa: E402

import nf4conv.inference.moe  # noqa: E402, F401 - what is tested
from nf4conv.inference.moe.tensor import Experts4bit  # noqa: E402

IDS = torch.tensor([[5, 9, 77, 3, 21, 64]])
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]}
VISION = {
    "depth": 1, "hidden_size": 64, "num_heads": 4, "intermediate_size": 64, "patch_size": 4,
}  # fmt: skip


def build(kind: str, text: dict, vision: dict):
    config = AutoConfig.for_model(
        kind,
        text_config={**SMALL, "intermediate_size": 96, "rope_parameters": ROPE, **text},
        vision_config={**VISION, **vision},
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.eval()


def compare(folder: Path, decoded, **inputs: torch.Tensor) -> None:
    """Compares a packed checkpoint, all of whose experts must stay packed, with a decoded model."""
    loaded = AutoModelForImageTextToText.from_pretrained(folder)
    names = stacks_of(decoded)
    for name in names:
        weight = loaded.get_parameter(name)
        assert isinstance(weight, Experts4bit)
        assert torch.equal(weight.decoded(), decoded.get_parameter(name)), name
    with torch.no_grad():
        own, other = loaded(IDS, **inputs).logits, decoded(IDS, **inputs).logits
    assert torch.equal(own, other)


def test_qwen3_vl(tmp_path):
    """Stacked in its repositories, in either orientation; one by one when it is packed."""
    text = {"moe_intermediate_size": 48, "num_experts": 4, "decoder_sparse_step": 1}
    vision = {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    model = build("qwen3_vl_moe", text, vision)
    model.load_state_dict(save(model, "qwen3_moe", tmp_path, Packing()))
    compare(tmp_path, model)


def test_ernie_vl_whose_experts_of_text_and_vision_share_a_list(tmp_path):
    """Those of vision are smaller, and come after those of text."""
    text = {
        "moe_intermediate_size": [48, 32], "moe_num_experts": 4, "moe_k": 2,
        "mlp_layer_types": ["sparse", "sparse"],
    }  # fmt: skip
    model = build("ernie4_5_vl_moe", text, {"embed_dim": 64, "in_channels": 3})
    model.save_pretrained(tmp_path)  # by the names that repositories have
    packed, decoded = {}, {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        packed[name] = decoded[name] = tensor
        if re.search(r"\.experts\.\d+\.\w+\.weight$", name):
            tensors, decoded[name] = pack(tensor, is_nested=True)
            packed |= {
                f"{name}.{suffix}" if suffix else name: each for suffix, each in tensors.items()
            }
    assert len(packed) > len(decoded)
    save_file(decoded, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    save_file(packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_config(model, tmp_path, is_nested=True)
    compare(tmp_path, model, moe_mm_token_type_ids=torch.zeros_like(IDS))
