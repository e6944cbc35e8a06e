"""Models that see come back from their two GGUF files (`make test-gguf`).

Hugging Face → llama.cpp's converter, once for the text model and once for the tower → Hugging Face.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_families import NEEDS_CONVERTER, assert_equal_in_bfloat16, class_of, decoded_by_gguf
from gguf_towers import FAMILIES, convert_all, convert_llava, write_llava, write_model
from safetensors.torch import load_file

from nf4conv.commands.dequantize import dequantize_checkpoint
from nf4conv.commands.quantize import quantize_checkpoint
from nf4conv.options import DequantizeOptions, RunOptions, SourceOptions

pytestmark = NEEDS_CONVERTER
CPU = RunOptions(device="cpu")

GEMMA = "Gemma3ForConditionalGeneration"


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def token_count(source: Path) -> int:
    """The embeddings that the converter keeps of Gemma 3, which has more of them than tokens."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    return len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])


def expected_of(family: str, source: Path) -> dict[str, torch.Tensor]:
    """The tensors of the original; of Gemma 3, those embeddings that the converter keeps."""
    state = state_of(source)
    if family == GEMMA:
        name = "language_model.model.embed_tokens.weight"
        state[name] = state[name][: token_count(source)]
    return state


@pytest.fixture(scope="session")
def converted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path, Path]]:
    """The folder of each model that a test asks for, and its two GGUF files."""
    folder = tmp_path_factory.mktemp("towers")
    here = [item for item in request.session.items if item.path == Path(__file__)]
    asked = [getattr(item, "callspec", None) for item in here]
    families = [spec.params["sees"] for spec in asked if spec and "sees" in spec.params]
    families = list(dict.fromkeys(families))
    sources = [write_model(folder / family, family, torch.bfloat16) for family in families]
    found = {}
    for family, source, pair in zip(families, sources, convert_all(sources, "bf16"), strict=True):
        found[family] = (source, *pair)
    return found


def place_of(source: Path, tower: Path) -> SourceOptions:
    return SourceOptions(config_from=str(source), mmproj=str(tower))


@pytest.mark.parametrize("sees", FAMILIES)
def test_a_model_that_sees_comes_back(
    tmp_path: Path, sees: str, converted: dict[str, tuple[Path, Path, Path]]
):
    """bf16 bit for bit, and logits of a text with an image in float32."""
    source, text, tower = converted[sees]
    dequantize_checkpoint(text, tmp_path / "back", run=CPU, where=place_of(source, tower))
    expected, found = expected_of(sees, source), state_of(tmp_path / "back")
    assert found.keys() == expected.keys()
    assert_equal_in_bfloat16(found, expected)
    original, back = logits_of(source), logits_of(tmp_path / "back")
    if sees == GEMMA:
        original = original[..., : token_count(source)]
    assert torch.equal(original, back), (original - back).abs().max()


def logits_of(folder: Path) -> torch.Tensor:
    """The logits of some tokens with an image between them, or a sound."""
    config = json.loads((folder / "config.json").read_text())
    model = class_of(config["architectures"][0]).from_pretrained(folder, dtype=torch.float32)
    model.eval()
    inputs = sound_for(model.config) if config.get("audio_config") else inputs_of(model.config)
    taken = "input_features" if config.get("audio_config") else "pixel_values"
    with torch.no_grad():
        logits = model(**inputs).logits
        changed = {**inputs, taken: -inputs[taken]}
        assert not torch.equal(model(**changed).logits, logits)  # the image is seen
    return logits


def sound_for(config: Any) -> dict[str, torch.Tensor]:
    """Tokens, and a sound of 32 frames."""
    count = {"qwen2_audio": 8, "voxtral": 4}[config.model_type]
    inputs = {"input_ids": torch.tensor([[3, 4, 5, *[90] * count, 6, 7, 8]])}
    generator = torch.Generator().manual_seed(0)
    inputs["input_features"] = torch.randn(1, 8, 32, generator=generator)
    if config.model_type == "qwen2_audio":
        inputs["feature_attention_mask"] = torch.ones(1, 32, dtype=torch.long)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return inputs


def inputs_of(config: Any) -> dict[str, torch.Tensor]:
    """Tokens, and an image of 4 × 4 patches."""
    kind = config.model_type
    generator = torch.Generator().manual_seed(0)
    image_tokens = {"llava": 16, "llava_next": 36}.get(kind, 4)
    tokens = torch.tensor([[3, 4, 5, *[config.image_token_id] * image_tokens, 6, 7, 8]])
    inputs = {"input_ids": tokens}
    if kind.startswith(("qwen", "glm4v")):
        inputs["pixel_values"] = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]])
        inputs["mm_token_type_ids"] = (tokens == config.image_token_id).int()
        return inputs
    if kind == "gemma4":  # 6 × 6 patches, of which 3 × 3 make a token
        inputs["pixel_values"] = torch.rand(1, 36, 3 * 4 * 4, generator=generator)
        places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).flip(-1)
        inputs["image_position_ids"] = places.view(1, 36, 2)
        inputs["mm_token_type_ids"] = (tokens == config.image_token_id).int()
        return inputs
    shape = (1, 1, 3, 28, 28) if kind in ("idefics3", "smolvlm") else (1, 3, 28, 28)
    inputs["pixel_values"] = torch.randn(shape, generator=generator)
    if config.vision_config.model_type == "pixtral":
        inputs["image_sizes"] = torch.tensor([[28, 28]])
    if kind == "llava_next":  # the image as a whole, its only tile, and a line's end for each row
        inputs["pixel_values"] = torch.randn(1, 2, 3, 28, 28, generator=generator)
        inputs["image_sizes"] = torch.tensor([[28, 28]])
    return inputs


@pytest.mark.parametrize(
    "llava", ["LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"]
)
def test_llava_comes_back_but_for_what_it_does_not_use(tmp_path: Path, llava: str):
    """Its last layer and last norm are not in the file; logits are equal without them."""
    source = write_llava(tmp_path / "llava", llava)
    [(text, _)] = convert_all([source], "bf16")
    where = place_of(source, convert_llava(source))
    dequantize_checkpoint(text, tmp_path / "back", run=CPU, where=where)
    expected, found = state_of(source), state_of(tmp_path / "back")
    lacking = expected.keys() - found.keys()
    assert not found.keys() - expected.keys()
    assert all("layers.3." in name or "post_layernorm" in name for name in lacking)
    for name, values in found.items():
        assert torch.equal(values, expected[name]), name
    assert torch.equal(logits_of(source), logits_of(tmp_path / "back"))


@pytest.mark.parametrize("out_type", ["f32", "f16", "q8_0"])
def test_values_are_those_that_the_files_hold(tmp_path: Path, out_type: str):
    """f32 bit for bit, f16 equal to the cast, Q8_0 equal to gguf's own decoding."""
    source = write_model(tmp_path / "m", "Qwen2_5_VLForConditionalGeneration", torch.float32)
    [(text, tower)] = convert_all([source], out_type)
    options = DequantizeOptions(dtype="float16" if out_type == "f16" else "float32")
    dequantize_checkpoint(text, tmp_path / "back", options, CPU, where=place_of(source, tower))
    expected, found = state_of(source), state_of(tmp_path / "back")
    assert found.keys() == expected.keys()
    if out_type == "f16":
        expected = {name: values.half() for name, values in expected.items()}
    if out_type == "q8_0":
        decoded = decoded_by_gguf(tower)
        parts = [decoded[f"v.blk.1.attn_{part}.weight"] for part in "qkv"]
        name = "visual.blocks.1.attn.qkv.weight"
        assert not torch.equal(expected[name], torch.cat(parts))
        expected = {name: torch.cat(parts)}
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize(
    "sees", ["Qwen2_5_VLForConditionalGeneration", "Mistral3ForConditionalGeneration"]
)
def test_4_bits_of_two_files_are_those_of_the_original(
    tmp_path: Path, sees: str, converted: dict[str, tuple[Path, Path, Path]]
):
    source, text, tower = converted[sees]
    quantize_checkpoint(source, tmp_path / "direct", run=CPU)
    quantize_checkpoint(text, tmp_path / "nf4", run=CPU, where=place_of(source, tower))
    expected, found = state_of(tmp_path / "direct"), state_of(tmp_path / "nf4")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
    configs = [
        json.loads((tmp_path / out / "config.json").read_text()) for out in ("nf4", "direct")
    ]
    assert configs[0] == configs[1]
