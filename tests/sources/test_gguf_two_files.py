"""A text model and its tower, in two GGUF files: every command takes them, and what does not fit is
said in a line.

tests/sources/test_gguf_towers.py compares with llama.cpp's converter.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from command_line import done, run
from gguf_files import write_gguf
from gguf_pair import (
    CONFIG,
    TEXT,
    TEXT_SHAPES,
    TOWER,
    TOWER_SHAPES,
    write_all,
    write_original,
    write_text,
    write_tower,
)
from hub_server import Hub, Repo
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from nf4conv.errors import SourceError
from nf4conv.options import SourceOptions
from nf4conv.report.text.terminal import printable
from nf4conv.sources.gguf.families.registry import FAMILIES
from nf4conv.sources.gguf.header import read_gguf_header
from nf4conv.sources.gguf.towers.registry import TOWERS
from nf4conv.sources.opening import open_source

CPU = ("--device", "cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def stored(path: Path, name: str) -> torch.Tensor:
    """A tensor of a file, as it is stored: F16, or F32 of vectors."""
    [tensor] = [one for one in read_gguf_header(path).tensors if one.name == name]
    content = path.read_bytes()[tensor.start : tensor.start + tensor.nbytes]
    dtype = {"F16": torch.float16, "F32": torch.float32}[tensor.block_type.name]
    return torch.frombuffer(bytearray(content), dtype=dtype).view(tensor.shape)


def test_dequantize_writes_what_transformers_loads(tmp_path: Path):
    text, words = write_all(tmp_path)
    done("dequantize", text, tmp_path / "out", *words, *CPU, "--dtype", "fp32")
    found = load_file(tmp_path / "out" / "model.safetensors")
    tower = tmp_path / "mmproj.gguf"
    for ending in ("weight", "bias"):
        parts = [stored(tower, f"v.blk.1.attn_{part}.{ending}") for part in "qkv"]
        assert torch.equal(found[f"visual.blocks.1.attn.qkv.{ending}"], torch.cat(parts).float())
    frames = [stored(tower, f"v.patch_embd.weight{number}") for number in ("", ".1")]
    convolution = found["visual.patch_embed.proj.weight"]
    assert torch.equal(convolution, torch.stack(frames, dim=2).float())
    assert len(found) == len(TEXT_SHAPES) + len(TOWER_SHAPES) - 1 - 2 * 2 * 2
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    model, report = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(model.model.visual.patch_embed.proj.weight, convolution)


def test_every_command_takes_both_files(tmp_path: Path):
    text, words = write_all(tmp_path)
    out = tmp_path / "out"
    inspected = json.loads(done("inspect", text, "--json", *words).stdout)
    assert inspected["files"] == ["model.gguf", "mmproj.gguf"]
    assert "visual.patch_embed.proj.weight" in {row["name"] for row in inspected["tensors"]}
    assert "the tower that sees: " in done("quantize", text, out, "--dry-run", *words).output
    done("quantize", text, out, "--verify", *words, *CPU)
    record = json.loads((out / "nf4conv.json").read_text())
    assert record["source"]["files"] == ["model.gguf", "mmproj.gguf"]
    card = (out / "README.md").read_text()
    assert "read from the GGUF files `model.gguf` and `mmproj.gguf`" in card
    assert "--gguf-file model.gguf --mmproj mmproj.gguf --config-from ORIGINAL" in card
    done("verify", out, "--source", text, "--exact", *words, *CPU)
    assert "already complete" in done("quantize", text, out, *words, *CPU).output
    done("dequantize", text, tmp_path / "back", *words, *CPU)
    done("compare", text, tmp_path / "back", "--tolerance", "0", *words, *CPU)
    for part in ("1/2", "2/2"):
        small = ("--max-shard-size", "60KB", "--part", part)
        done("quantize", text, tmp_path / "parts", *words, *CPU, *small)
    done("finish", tmp_path / "parts")
    done("compare", out, tmp_path / "parts", *CPU)
    # another tower is another source
    write_tower(tmp_path, default="BF16")
    assert "already complete" not in run("quantize", text, out, *words, *CPU).output
    assert run("verify", out, "--source", text, "--exact", *words, *CPU).exit_code == 1


def test_names_in_a_folder(tmp_path: Path):
    text, words = write_all(tmp_path)
    done("dequantize", text, tmp_path / "one", *words, *CPU)
    named = ("--gguf-file", "model.gguf", "--mmproj", "mmproj.gguf", *words[2:])
    done("dequantize", tmp_path, tmp_path / "two", *named, *CPU)
    first, second = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("one", "two"))
    assert first == second
    wrong = ("--gguf-file", "model.gguf", "--mmproj", "none.gguf", *words[2:])
    result = run("inspect", tmp_path, *wrong)
    assert result.exit_code == 2
    assert f"{tmp_path}/none.gguf: no such file" in result.stderr
    result = run("inspect", text, "--mmproj", tmp_path / "none.gguf")
    assert f"{tmp_path}/none.gguf: no such file" in result.stderr


def test_names_on_the_hub(hub: Hub, tmp_path: Path):
    text, words = write_all(tmp_path)
    done("dequantize", text, tmp_path / "local", *words, *CPU)
    hub.repos["me/models"] = Repo()
    files = {"model.gguf": text.read_bytes(), "README.md": b"# Mine"}
    hub.repos["me/models"].commit({**files, "mmproj.gguf": (tmp_path / "mmproj.gguf").read_bytes()})
    named = ("--gguf-file", "model.gguf", "--mmproj", "mmproj.gguf", *words[2:])
    cached = ("--cache-dir", tmp_path / "hub", *CPU)
    result = done("dequantize", "me/models", tmp_path / "alone", *named[:2], "--stream", *cached)
    assert "the text model alone: --mmproj mmproj.gguf" in result.output
    done("dequantize", "me/models", tmp_path / "streamed", "--stream", *named, *cached)
    assert not list((tmp_path / "hub").rglob("*.gguf"))
    done("dequantize", "me/models", tmp_path / "fetched", *named, *cached)
    for out in ("streamed", "fetched"):
        expected = (tmp_path / "local" / "model.safetensors").read_bytes()
        assert (tmp_path / out / "model.safetensors").read_bytes() == expected
    offline = (*cached[:2], "--local-files-only")
    done("inspect", "me/models", *named, *offline)
    [card] = (tmp_path / "hub").rglob("README.md")
    card.resolve().unlink()
    result = run("inspect", "me/models", *named, *offline)
    assert "README.md: its content is not in the cache any more; run once" in result.stderr
    wrong = (*named[:3], "none.gguf", *named[4:])
    result = run("inspect", "me/models", *wrong, *cached[:2])
    assert "me/models: has no none.gguf; its GGUF files: mmproj.gguf, model.gguf" in result.stderr


def test_names_that_the_converter_gave_until_2025(tmp_path: Path):
    """ffn_down was the first matrix of a layer's network, and ffn_up the second."""
    text, words = write_all(tmp_path)
    done("dequantize", text, tmp_path / "new", *words, *CPU)
    swapped = {"ffn_up": "ffn_dxwn", "ffn_down": "ffn_up"}
    shapes = {}
    for name, shape in TOWER_SHAPES.items():
        for old, new in swapped.items():
            name = name.replace(old, new)
        shapes[name.replace("dxwn", "down")] = shape
    assert shapes["v.blk.0.ffn_down.weight"] == (64, 32)
    write_tower(tmp_path, shapes=shapes)
    done("dequantize", text, tmp_path / "old", *words, *CPU)
    done("compare", tmp_path / "new", tmp_path / "old", "--tolerance", "0", *CPU)


def test_without_its_tower(tmp_path: Path):
    """The text model comes alone, and a note says what else there is."""
    text = write_text(tmp_path)
    result = done("quantize", text, tmp_path / "out", "--dry-run")
    assert "its tower is in a file of its own, such as mmproj-model.gguf" in result.output
    write_tower(tmp_path)
    result = done("dequantize", text, tmp_path / "out", *CPU)
    assert "the text model alone: --mmproj mmproj.gguf --config-from REPO" in result.output
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == len(TEXT_SHAPES)


def test_fewer_tokens_than_the_original(tmp_path: Path):
    """llama.cpp's converter leaves out embeddings behind the tokenizer's last token."""
    text, words = write_all(tmp_path)
    of_text = {**CONFIG["text_config"], "vocab_size": 130}
    write_original(tmp_path / "original", text_config=of_text)
    result = done("dequantize", text, tmp_path / "out", *words, *CPU)
    assert "config.json says 128 tokens as the file has, and not 130" in result.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == 128


def test_fewer_tokens_than_that_of_an_image(tmp_path: Path):
    write_all(tmp_path)
    write_original(tmp_path / "original", image_token_id=128)
    assert "model.gguf: has 128 tokens, and that of an image is 128" in refused(tmp_path)


# --- what does not fit ----------------------------------------------------------------------------


def refused(folder: Path) -> str:
    where = SourceOptions(config_from=str(folder / "original"), mmproj=str(folder / "mmproj.gguf"))
    with pytest.raises(SourceError) as raised:
        open_source(folder / "model.gguf", where)
    message = str(raised.value)
    assert message.startswith(f"{folder}/m")
    assert "\n" not in message
    return message


def without(*names: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in TOWER_SHAPES.items() if name not in names}


@pytest.mark.parametrize(
    ("metadata", "shapes", "said"),
    [
        ({"clip.projector_type": "ldp"}, {}, "a tower whose projector is 'ldp', which nf4conv"),
        ({"clip.projector_type": 7}, {}, "a tower whose projector is 7, which nf4conv does not"),
        ({"general.architecture": "llama"}, {}, "--mmproj names no tower's file: its architecture"),
        ({}, {"mm.2.weight": (96, 128)}, "makes vectors of 96 values, but model.gguf takes those"),
        ({}, {"mm.2.weight": (64, 8, 16)}, "visual.merger.mlp.2.weight is no matrix"),
        ({}, {"mm.3.weight": (64, 64)}, "mm.3.weight: has no name in Qwen2VLForConditional"),
        ({}, {"a.blk.0.ln1.weight": (64,)}, "a.blk.0.ln1.weight: has no name in Qwen2VLForCond"),
        ({}, {"v.blk.2.ln1.weight": (32,)}, "v.blk.2.attn_k.bias: is missing; other layers have"),
        ({}, {"v.blk.9.ln1.bias": (32,)}, "v.blk.2.attn_k.bias: is missing; other layers have"),
        (
            {},
            {"v.blk.0.attn_q.weight": (64, 32)},
            "goes with v.blk.0.attn_k.weight, which has another",
        ),
        ({}, {"v.patch_embd.weight.1": (32, 3, 4)}, "goes with v.patch_embd.weight.1, which has"),
    ],
)
def test_a_tower_that_does_not_fit(
    tmp_path: Path, metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]], said: str
):
    write_all(tmp_path)
    write_tower(tmp_path, {**TOWER, **metadata}, {**TOWER_SHAPES, **shapes})
    assert said in refused(tmp_path)


def test_tensors_that_a_tower_lacks(tmp_path: Path):
    write_all(tmp_path)
    for names, said in (
        (("mm.2.weight",), "has no visual.merger.mlp.2.weight"),
        (("v.patch_embd.weight.1",), "goes with v.patch_embd.weight.1, which is missing"),
        (("v.blk.0.attn_k.bias",), "v.blk.0.attn_k.bias: is missing; other layers have one"),
        (("v.blk.0.attn_k.bias", "v.blk.1.attn_k.bias"), "attn_k.bias, which is missing"),
    ):
        write_tower(tmp_path, shapes=without(*names))
        assert said in refused(tmp_path)
    one_layer = {name: shape for name, shape in TOWER_SHAPES.items() if "v.blk.1" not in name}
    write_tower(tmp_path, shapes=one_layer)
    assert "has 1 layers, and the tower of --config-from has 2" in refused(tmp_path)


def test_a_config_of_another_model(tmp_path: Path):
    write_all(tmp_path)
    write_original(tmp_path / "original", model_type="gemma3")
    assert "is a tower of qwen2_vl, but --config-from names a gemma3" in refused(tmp_path)
    write_original(tmp_path / "original", text_config={"model_type": "llama"})
    assert "model.gguf: is a qwen2, but the text model of --config-from is a" in refused(tmp_path)


def test_a_tower_needs_the_config_of_the_original(tmp_path: Path):
    text, words = write_all(tmp_path)
    result = run("dequantize", text, tmp_path / "out", *words[:2], *CPU)
    assert result.exit_code == 2
    assert "mmproj.gguf: --mmproj needs --config-from REPO" in result.stderr


def test_a_tower_is_no_text_model(tmp_path: Path):
    _, words = write_all(tmp_path)
    for more in ((), words):
        result = run("dequantize", tmp_path / "mmproj.gguf", tmp_path / "out", *more, *CPU)
        assert result.exit_code == 2
        assert "mmproj.gguf: is the tower of a model that sees or hears; name" in result.stderr


@pytest.mark.parametrize("seed", range(40))
def test_mutations_of_a_tower_are_read_or_refused(tmp_path: Path, seed: int):
    """Whatever is changed in the header of the second file, or cut off, ends in one line."""
    random = Random(seed)
    write_all(tmp_path)
    path = tmp_path / "mmproj.gguf"
    whole = bytearray(path.read_bytes())
    end = whole.index(b"v.blk.1.ffn_down.bias") + 60  # the last record
    for _ in range(random.choice((1, 1, 2, 8))):
        place = random.randrange(end)
        size = random.choice((1, 4, 8))
        whole[place : place + size] = random.choice((random.randbytes(size), b"\xff" * size))
    path.write_bytes(whole[: random.choice((len(whole), len(whole), random.randrange(end)))])
    where = SourceOptions(config_from=str(tmp_path / "original"), mmproj=str(path))
    try:
        said = str(open_source(tmp_path / "model.gguf", where))
    except SourceError as error:
        said = str(error)
    assert "\n" not in printable(said)
    assert re.search(r"model\.gguf|mmproj\.gguf", said)


def test_planning_imports_no_torch(tmp_path: Path):
    text, words = write_all(tmp_path)
    arguments = ["dequantize", str(text), "out", "--dry-run", *map(str, words)]
    program = (
        "import sys\nfrom nf4conv.cli import main\n"
        f"main({arguments!r}, standalone_mode=False)\n"
        f"main({['inspect', *arguments[1:2], *arguments[4:]]!r}, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


WHISPER = {
    "general.architecture": "clip",
    "clip.projector_type": "voxtral",
    "clip.audio.block_count": 1,
}
_OF_WHISPER = {
    "attn_q": "self_attn.q_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "self_attn_layer_norm",
    "ffn_up": "fc1",
}


def test_a_tower_that_hears(tmp_path: Path):
    """Voxtral: biases of its convolutions are a column in the file."""
    metadata = {key.replace("qwen2vl", "llama"): value for key, value in TEXT.items()}
    metadata["general.architecture"] = "llama"
    write_gguf(tmp_path / "model.gguf", metadata, shapes={"token_embd.weight": (128, 64)})
    shapes: dict[str, tuple[int, ...]] = {
        "a.conv1d.1.weight": (32, 8, 3),
        "a.conv1d.1.bias": (32, 1),
        "a.position_embd.weight": (16, 32),
        "mm.a.mlp.2.weight": (64, 64),
    }
    for module in _OF_WHISPER:
        shapes[f"a.blk.0.{module}.weight"] = (32, 32)
    tower = write_tower(tmp_path, WHISPER, shapes)
    config = {"model_type": "voxtral", "audio_token_id": 9, "vision_config": None}
    config["text_config"] = {**CONFIG["text_config"], "model_type": "llama"}
    config["audio_config"] = {"num_hidden_layers": 1}
    original = write_original(tmp_path / "original", **config)
    where = SourceOptions(config_from=str(original), mmproj=str(tower))
    source = open_source(tmp_path / "model.gguf", where)
    assert {tensor.name: tensor.shape for tensor in source.tensors} == {
        "language_model.model.embed_tokens.weight": (128, 64),
        "audio_tower.conv1.weight": (32, 8, 3),
        "audio_tower.conv1.bias": (32,),
        "audio_tower.embed_positions.weight": (16, 32),
        "multi_modal_projector.linear_2.weight": (64, 64),
        **{f"audio_tower.layers.0.{name}.weight": (32, 32) for name in _OF_WHISPER.values()},
    }
    assert any(note.startswith("the tower that hears: ") for note in source.notes)
    write_original(tmp_path / "original", **{**config, "audio_token_id": 128})
    with pytest.raises(SourceError, match="has 128 tokens, and that of a sound is 128 by"):
        open_source(tmp_path / "model.gguf", where)


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_experts_of_a_whole_model_are_stacked(model_type: str):
    """As models on the Hub have them; those of a text model alone come one by one."""
    tower = TOWERS["qwen3vl_merger"]
    [text] = FAMILIES["qwen3vlmoe"]
    whole = tower.text_family(text, model_type)
    assert not whole.experts
    assert tower.text_family(text, "qwen3_vl") is text
    names = {join.name.replace("*", "0") for join in whole.joined}
    experts = "model.layers.0.mlp.experts"
    assert names == {f"{experts}.gate_up_proj", f"{experts}.down_proj"}


def test_a_tower_that_sees_and_hears_is_refused(tmp_path: Path):
    text, _ = write_all(tmp_path)
    tower = write_tower(tmp_path, {**TOWER, "clip.has_audio_encoder": True})
    where = SourceOptions(config_from=str(tmp_path / "original"), mmproj=str(tower))
    with pytest.raises(SourceError, match="a tower that both sees and hears"):
        open_source(text, where)
