"""What cannot be calibrated is refused in one line, before anything looks like a result."""

import json
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from hub_server import Hub, Repo
from safetensors.torch import save_file
from test_calibrate import make_model, make_text

from nf4conv.cli import main

WORDS = {letter: number for number, letter in enumerate(("?", *string.ascii_lowercase))}


def refused(*words: object) -> str:
    """Runs nf4conv, which must fail in one clear line; returns it."""
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 2, done.output
    beside = ("Note:", "Fetching")  # a bar of huggingface_hub
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith(beside)]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("Error: ")
    return lines[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of letters."""
    folder = make_model(tmp_path_factory.mktemp("model") / "llama")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel(WORDS, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text") / "ids.npy")


TEXTS: dict[str, tuple[str, bytes, str]] = {
    "empty": ("text.txt", b"", "holds no tokens"),
    "short": ("text.txt", b"abc" * 20, "60 tokens are too few to calibrate with: at least 160"),
    "binary": ("text.txt", b"\xff\xfe\x00\x01", "no UTF-8 text; convert it, or give token ids"),
    "zero bytes": ("text.txt", b"abc\0" * 2000, "holds zero bytes"),
    "foreign": ("text.txt", "日本語の文章".encode() * 500, "knows only 0 of 3,000 tokens of it"),
    "empty lines": ("text.jsonl", b"\n\n", "holds no tokens"),
    "no JSON": ("text.jsonl", b"{'text'}", "line 1 is not JSON"),
    "other fields": ("text.jsonl", b'{"prompt": "a"}', 'line 1 has neither "text" nor "messages"'),
    "a chat": (
        "text.jsonl",
        b'{"messages": [{"role": "user", "content": "a"}]}',
        "the model's tokenizer has no chat template",
    ),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_texts(model: Path, tmp_path: Path, kind: str):
    name, content, error = TEXTS[kind]
    text = tmp_path / name
    text.write_bytes(content)
    assert error in refused("quantize", model, tmp_path / "out", "--calibrate", text)
    assert not (tmp_path / "out").exists()


def without_tokenizer(source: Path) -> None:
    for file in source.glob("tokenizer*"):
        file.unlink()


def without_config(source: Path) -> None:
    (source / "config.json").unlink()


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, **changes}))

    return change


SOURCES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (without_tokenizer, "no tokenizer that it can load"),
    "no config": (without_config, "needs the config.json"),
    "of nobody": (with_config(architectures=["NobodysModel"]), "has no NobodysModel"),
    "cannot be built": (with_config(num_attention_heads=0), "cannot build LlamaForCausalLM"),
    "too many layers": (with_config(num_hidden_layers=10**9), "num_hidden_layers is 1,000,000,000"),
    "layers that are missing": (with_config(num_hidden_layers=3), "which the checkpoint does not"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_models(model: Path, tmp_path: Path, kind: str):
    spoil, error = SOURCES[kind]
    source = tmp_path / "source"
    shutil.copytree(model, source)
    spoil(source)
    text = tmp_path / "text.txt"
    text.write_text("abcdef" * 2000)
    assert error in refused("quantize", source, tmp_path / "out", "--calibrate", text)
    assert not (tmp_path / "out").exists()


def test_the_advice_for_a_missing_tokenizer_works(model: Path, ids: Path, tmp_path: Path):
    source = tmp_path / "source"
    shutil.copytree(model, source)
    without_tokenizer(source)
    assert "ids.npy" in refused(
        "quantize", source, tmp_path / "out", "--calibrate", "default", "--dry-run"
    )
    done = CliRunner().invoke(
        main, ["quantize", str(source), "out", "--calibrate", str(ids), "--dry-run"]
    )
    assert done.exit_code == 0


def test_nan_in_activations_names_block_and_module(model: Path, ids: Path, tmp_path: Path):
    from safetensors.torch import load_file

    source = tmp_path / "source"
    shutil.copytree(model, source)
    name = "model.layers.1.post_attention_layernorm.weight"
    file = next(file for file in source.glob("*.safetensors") if name in load_file(file))
    tensors = load_file(file)
    tensors[name][5] = float("inf")
    save_file(tensors, file, metadata={"format": "pt"})
    out = tmp_path / "out"
    line = refused("quantize", source, out, "--calibrate", ids, "--device", "cpu")
    assert "model.layers.1.mlp.gate_proj: what goes into it holds NaN or infinity" in line
    assert not (out / "config.json").exists()
    assert not list(out.glob("*.safetensors"))


def test_too_little_disk(model: Path, ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    out = tmp_path / "out"
    line = refused("quantize", model, out, "--calibrate", ids, "--device", "cpu")
    assert "the result takes" in line
    assert "has only 1,000 free" in line
    assert not list(out.glob("*.safetensors"))


def test_streamed_sources(hub: Hub, model: Path, ids: Path, tmp_path: Path):
    """A block is needed twice, and its shards would have been dropped by then."""
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    hub.repos["some-org/model"] = Repo()
    hub.repos["some-org/model"].commit(files)
    out = tmp_path / "out"
    line = refused("quantize", "some-org/model", out, "--calibrate", ids, "--stream")
    assert "reads each weight twice, so it does not go with --stream" in line
    assert not out.exists()


def test_single_files_and_pipelines(ids: Path, tmp_path: Path):
    tensors = {"double_blocks.0.img_attn.qkv.weight": torch.ones(64, 64)}
    save_file(tensors, tmp_path / "flux.safetensors")
    line = refused(
        "quantize",
        tmp_path / "flux.safetensors",
        tmp_path / "out.safetensors",
        "--single-file",
        "--calibrate",
        ids,
    )
    assert "--calibrate is for models of transformers" in line
    pipeline = tmp_path / "pipeline"
    (pipeline / "transformer").mkdir(parents=True)
    save_file(tensors, pipeline / "transformer" / "diffusion_pytorch_model.safetensors")
    config = {"_class_name": "FluxTransformer2DModel"}
    (pipeline / "transformer" / "config.json").write_text(json.dumps(config))
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    (pipeline / "model_index.json").write_text(json.dumps(index))
    for source in (pipeline, pipeline / "transformer"):
        line = refused("quantize", source, tmp_path / "out", "--calibrate", ids)
        assert "--calibrate is for models of transformers" in line
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--part", "1/2"), "one process on one device calibrates them all"),
        (("--scales", "absmax"), "--scales absmax does not go with --calibrate"),
        (("--calibration-tokens", "100"), "expected at least 512"),
    ],
)
def test_options(model: Path, ids: Path, tmp_path: Path, words: tuple[str, ...], error: str):
    assert error in refused("quantize", model, tmp_path / "out", "--calibrate", ids, *words)
    assert not (tmp_path / "out").exists()
