"""Mixtures that see, as AutoModelForImageTextToText: their experts stay in 4 bits too."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("transformers", minversion="5.8")
pytestmark = pytest.mark.oracle

from packed_experts import SIZES, load, pack_one_by_one, skip_linear_layers, stacks_of  # noqa: E402
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
        text_config={**SIZES, "rope_parameters": ROPE, **text},
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
    skip_linear_layers(folder, decoded)
    loaded = load(folder, AutoModelForImageTextToText)
    for name in stacks_of(decoded):
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
    model.save_pretrained(tmp_path)
    state = model.state_dict()
    model.load_state_dict(pack_one_by_one("mistral4", tmp_path, tmp_path / "packed", state))
    compare(tmp_path / "packed", model)


def test_ernie_vl_whose_experts_of_text_and_vision_share_a_list(tmp_path):
    """Those of vision are smaller, and come after those of text."""
    text = {
        "moe_intermediate_size": [48, 32], "moe_num_experts": 4, "moe_k": 2,
        "mlp_layer_types": ["sparse", "sparse"],
    }  # fmt: skip
    model = build("ernie4_5_vl_moe", text, {"embed_dim": 64, "in_channels": 3})
    model.save_pretrained(tmp_path)  # by the names that repositories have
    decoded = pack_one_by_one("ernie4_5_vl_moe", tmp_path, tmp_path / "packed")
    save_file(decoded, tmp_path / "model.safetensors", metadata={"format": "pt"})
    inputs = {"moe_mm_token_type_ids": torch.zeros_like(IDS)}
    compare(tmp_path / "packed", load(tmp_path, AutoModelForImageTextToText), **inputs)
