"""What cannot be calibrated is refused in one line, before anything looks like a result."""

import json
import shutil
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from calibrations import VOCABULARY, options_for
from click.testing import CliRunner
from hub_server import Hub, Repo
from safetensors.torch import save_file

import nf4conv
from nf4conv.calibrate import request
from nf4conv.cli import main
from nf4conv.errors import PlanError

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
def worded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, with a tokenizer of letters, which names a chat template that never ends."""
    folder = tmp_path_factory.mktemp("worded") / "llama"
    shutil.copytree(model, folder)
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel(WORDS, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    fast.chat_template = "{% for a in range(10**9) %}{% for b in range(10**9) %}{% endfor %}"
    fast.save_pretrained(folder)
    return folder


def content_of(value: Any) -> Callable[[Path], None]:
    """Returns what writes bytes or an array."""

    def write(path: Path) -> None:
        if isinstance(value, bytes):
            path.write_bytes(value)
        else:
            np.save(path, value)

    return write


EARLY: dict[str, tuple[str, Any, str]] = {
    "missing": ("nope.txt", None, "expected a file that ends in"),
    "of the Hub": ("wikitext/wikitext-2", None, "ends in .txt, .jsonl, .npy, or default"),
    "a PDF": ("text.pdf", b"%PDF", "ends in .txt, .jsonl, .npy"),
    "binary": ("text.txt", b"\xff\xfe\x00\x01", "no UTF-8 text; convert it, or give token ids"),
    "no JSON": ("text.jsonl", b"{'text'}", "line 1 is no JSON object with"),
    "other fields": ("text.jsonl", b'{"prompt": "a"}', 'line 1 is no JSON object with "text"'),
    "a list": ("text.jsonl", b"[1]", 'line 1 is no JSON object with "text"'),
    "an odd chat": ("text.jsonl", b'{"messages": [1]}', "line 1 is no JSON object"),
    "floats": ("ids.npy", np.ones(4000), "integers"),
    "no array": ("ids.npy", b"no array", "no array"),
}

_PROGRAM = """
import json, sys, time
from click.testing import CliRunner
from nf4conv.cli import main
found = []
for words in json.loads(sys.argv[1]):
    started = time.process_time()
    done = CliRunner().invoke(main, words)
    found.append((done.exit_code, done.stderr, time.process_time() - started))
assert not {"torch", "transformers"} & set(sys.modules)
print(json.dumps(found))
"""


def test_what_can_be_known_early_is_refused_before_torch_is_imported(model: Path, tmp_path: Path):
    asked = []
    for kind, (name, content, _) in EARLY.items():
        text = tmp_path / kind / name
        if content is not None:
            text.parent.mkdir()
            content_of(content)(text)
        place = name if "/" in name else str(text)
        asked.append(["quantize", str(model), str(tmp_path / "out"), "--calibrate", place])
    asked.append([*asked[0][:-1], ""])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(asked)],
        check=True,
        capture_output=True,
        text=True,
    )
    *found, of_nothing = json.loads(done.stdout)
    assert "expected a file" in of_nothing[1]
    for (kind, (_, _, error)), (code, said, seconds) in zip(EARLY.items(), found, strict=True):
        assert (code, error in said) == (2, True), (kind, said)
        assert said.count("\n") == 1, said
        assert seconds < 1, kind
    assert not (tmp_path / "out").exists()


LATE: dict[str, tuple[str, Any, str]] = {
    "unknown ids": ("ids.npy", np.full((40, 100), VOCABULARY), "that are none of the 96 of"),
    "negative ids": ("ids.npy", np.full(4000, -1), "that are none of the 96 of"),
    "short": ("text.txt", b"abc" * 20, "60 tokens are too few to calibrate with: at least 160"),
    "short ids": ("ids.npy", np.arange(20), "20 tokens are too few"),
    "empty lines": ("text.jsonl", b"\n\n", "0 tokens are too few"),
}


@pytest.mark.parametrize("kind", LATE)
def test_texts(worded: Path, tmp_path: Path, kind: str):
    name, content, error = LATE[kind]
    text = tmp_path / name
    content_of(content)(text)
    assert error in refused("quantize", worded, tmp_path / "out", "--calibrate", text)
    assert not (tmp_path / "out").exists()


def windows_of(source: Path, text: Path | str) -> np.ndarray[Any, Any]:
    options = {"calibrate": str(text), "calibration_tokens": 1024}
    calibration = nf4conv.plan_quantize(source, **options).made.calibration
    return np.concatenate((calibration.calibrating, calibration.judging))


def test_windows_of_token_ids_are_taken(model: Path, text: Path, tmp_path: Path):
    """[windows, length] is how most tools keep them."""
    ids = np.load(text)
    np.save(tmp_path / "windows.npy", ids.reshape(30, 100))
    assert (windows_of(model, tmp_path / "windows.npy") == windows_of(model, text)).all()


def test_windows_are_of_the_whole_text_in_no_order(model: Path, tmp_path: Path):
    np.save(tmp_path / "numbered.npy", np.arange(90 * 32, dtype=np.int32) // 32)
    numbers = windows_of(model, tmp_path / "numbered.npy")[:, 0].tolist()
    assert len({*numbers}) == 36
    assert min(numbers) < 20 < 70 < max(numbers)
    assert numbers != sorted(numbers)


def test_lines_of_json_end_at_line_feeds_alone(worded: Path, tmp_path: Path):
    """Strings may hold U+2028 and U+0085 as they are."""
    entry = {"text": "abc\u2028d\u0085e" * 400}
    lines = tmp_path / "text.jsonl"
    lines.write_text(json.dumps(entry, ensure_ascii=False) + "\r\n" + json.dumps(entry))
    assert windows_of(worded, lines).shape == (36, 32)


def test_chats_are_written_out_without_the_template_of_the_checkpoint(worded: Path, tmp_path: Path):
    chats = tmp_path / "chats.jsonl"
    line = {"messages": [{"role": "user", "content": "xyz" * 400}]}
    chats.write_text("\n".join([json.dumps(line)] * 5))
    ids = windows_of(worded, chats)
    assert {WORDS["x"], WORDS["u"]} <= {*ids.flatten().tolist()}
    assert windows_of(worded, "default").shape == (36, 32)


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def without_config(source: Path) -> None:
    (source / "config.json").unlink()


def with_odd_tokenizer(source: Path) -> None:
    (source / "tokenizer.json").write_text("{}")


def without_tokenizer(source: Path) -> None:
    for file in source.glob("tokenizer*"):
        file.unlink()


SOURCES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (without_tokenizer, "no tokenizer that it can load"),
    "odd tokenizer": (with_odd_tokenizer, "no tokenizer that it can load"),
    "no config": (without_config, "needs the config.json"),
    "of nobody": (with_config(architectures=["NobodysModel"]), "has no NobodysModel"),
    "cannot be built": (with_config(num_attention_heads=0), "cannot build LlamaForCausalLM"),
    "layers that are missing": (with_config(num_hidden_layers=3), "which is not in it"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_models(worded: Path, tmp_path: Path, kind: str):
    spoil, error = SOURCES[kind]
    source = tmp_path / "source"
    shutil.copytree(worded, source)
    spoil(source)
    text = tmp_path / "text.txt"
    text.write_text("abcdef" * 2000)
    assert error in refused("quantize", source, tmp_path / "out", "--calibrate", text)
    assert not (tmp_path / "out").exists()


def test_old_or_no_transformers(model: Path, text: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request, "version", lambda _: "4.57.1")
    with pytest.raises(PlanError, match=r"needs transformers 5, and 4\.57\.1 is"):
        nf4conv.plan_quantize(model, **options_for(text))


def test_streamed_sources(hub: Hub, model: Path, text: Path, tmp_path: Path):
    """A block is needed twice, and its shards would have been dropped by then."""
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    hub.repos["some-org/model"] = Repo()
    hub.repos["some-org/model"].commit(files)
    out = tmp_path / "out"
    line = refused("quantize", "some-org/model", out, "--calibrate", text, "--stream")
    assert "reads each weight twice, so it does not go with --stream" in line
    assert not out.exists()


def test_diffusers(text: Path, tmp_path: Path):
    source = tmp_path / "transformer"
    source.mkdir()
    tensors = {"double_blocks.0.img_attn.qkv.weight": torch.ones(64, 64)}
    save_file(tensors, source / "diffusion_pytorch_model.safetensors")
    (source / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    line = refused("quantize", source, tmp_path / "out", "--calibrate", text)
    assert "--calibrate is for models of transformers" in line


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--part", "1/2"), "one process on one device calibrates them all"),
        (("--ray",), "does not go with --calibrate"),
        (("--scales", "absmax"), "--scales absmax does not go with --calibrate"),
        (("--calibration-tokens", "100"), "from 512 on"),
    ],
)
def test_options(model: Path, text: Path, tmp_path: Path, words: tuple[str, ...], error: str):
    assert error in refused("quantize", model, tmp_path / "out", "--calibrate", text, *words)
    assert not (tmp_path / "out").exists()


def test_a_config_that_does_not_go_with_the_weights(model: Path, tmp_path: Path):
    """The code of the model fails, in a block, with any error."""
    source = shutil.copytree(model, tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    config["num_key_value_heads"] = config["num_attention_heads"]
    (source / "config.json").write_text(json.dumps(config))
    np.save(tmp_path / "ids.npy", np.arange(4000) % 90)
    words = ("quantize", source, tmp_path / "out", "--device", "cpu", "-q")
    line = refused(*words, "--calibrate", tmp_path / "ids.npy", "--calibration-tokens", 1024)
    assert "LlamaDecoderLayer cannot be run, as if config.json did not belong" in line
