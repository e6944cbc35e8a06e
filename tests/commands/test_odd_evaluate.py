"""What strangers may put before `evaluate` and --calibrate: refused in one line, with the file,
before the work.
"""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import command_line
import numpy as np
import pytest
import torch
import transformers
from click.testing import Result
from hostile import command, refused, strict_and_in_no_time

import nf4conv
from nf4conv.models.parsing import excess_of

assert strict_and_in_no_time
pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, what was made of it, and token ids."""
    folder = tmp_path_factory.mktemp("evaluate")
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "source")
    run = {"device": "cpu"}
    nf4conv.quantize(folder / "source", folder / "out", **run)
    np.save(folder / "ids.npy", np.arange(128) * 37 % 300)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "here"))


def evaluate(here: Path, *more: object) -> Result:
    words = ("--source", here / "source", "--text", here / "ids.npy", *more)
    return command("evaluate", here / "out", *words)


def change(folder: Path, changes: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


ODD: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": "x"}, "cannot build what its config.json describes: Validation error"),
    ({"num_hidden_layers": 10**6}, "1,000,000, and the tensors show 2 layers or experts at most"),
    ({"num_hidden_layers": -1}, "cannot run it"),
    ({"hidden_size": "a"}, "expected int, got str"),
    ({"hidden_size": -64}, "negative dimension"),
    ({"hidden_size": 2**40}, "describes a model of 2,072,579,418,357,792 values, and its files"),
    ({"head_dim": 10**9}, "and its files hold"),
    ({"model_type": ["a"]}, "cannot"),
    ({"model_type": "no such", "architectures": []}, "evaluate cannot run"),
    ({"architectures": [5], "model_type": None}, "evaluate cannot run"),
    ({"text_config": 5}, "config.json: text_config is 5, and no object"),
    ({"vocab_size": 0}, "config.json: vocab_size is 0, which is no size"),
    ({"vocab_size": None}, "no vocab_size"),
    ({"max_position_embeddings": "x"}, "max_position_embeddings is 'x', which is no size"),
    ({"max_position_embeddings": 1}, "takes 1 tokens at a time"),
    ({"num_attention_heads": 0}, "cannot build"),
    ({"num_attention_heads": 7}, "is not a multiple of the number of attention heads"),
    ({"pad_token_id": 10**9}, "Padding_idx must be within num_embeddings"),
    ({"rope_parameters": 5}, "Validation error for field 'rope_parameters'"),
    ({"quantization_config": 5}, "cannot load it"),
    ({"tie_word_embeddings": "x"}, "Validation error for field 'tie_word_embeddings'"),
]


@pytest.mark.parametrize(("changes", "reason"), ODD, ids=str)
def test_odd_configs(here: Path, changes: dict[str, Any], reason: str):
    change(here / "out", changes)
    started = time.process_time()
    error = refused(evaluate(here))
    assert str(here / "out") in error or "evaluate cannot run" in error
    assert reason in error
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 10**6}, {"head_dim": 10**9}, {"rms_norm_eps": "x"}], ids=str
)
def test_odd_configs_of_the_original(here: Path, changes: dict[str, Any]):
    change(here / "source", changes)
    assert refused(evaluate(here)).startswith(f"{here / 'source'}: ")


def test_a_gpu_that_is_not_there(here: Path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, which the command would use")
    words = ("--source", here / "source", "--text", here / "ids.npy")
    for device, reason in (("cuda", "torch finds 0 CUDA devices"), ("cuda:x", "expected auto")):
        listed = ["evaluate", here / "out", *words, "--device", device]
        done = command_line.run(*[str(word) for word in listed])
        assert reason in refused(done)


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04" + b"0" * 99, b"\x80\x04.", b"\x93NUMPY\x01\0\xff\xff{", b"abc"]
)
@pytest.mark.parametrize("what", ["evaluate", "calibrate"])
def test_files_that_are_no_arrays(here: Path, content: bytes, what: str):
    ids = here / "ids.npy"
    ids.write_bytes(content)
    if what == "evaluate":
        done = evaluate(here)
    else:
        done = command("quantize", here / "source", here / "new", "--calibrate", ids)
    assert refused(done).startswith(f"{ids}: is no array of numpy that can be read")


def test_a_pipe_is_not_waited_for(here: Path):
    (here / "ids.npy").unlink()
    os.mkfifo(here / "ids.npy")
    assert refused(evaluate(here)) == f"{here / 'ids.npy'}: is no file"


@pytest.mark.parametrize("dtype", ["float32", "bool", "complex64", "U3", "M8[s]"])
def test_arrays_that_are_no_tokens(here: Path, dtype: str):
    np.save(here / "ids.npy", np.zeros(64, dtype))
    assert "expected token ids: an array of integers" in refused(evaluate(here))


def test_a_million_layers_are_not_built(here: Path):
    change(here / "source", {"num_hidden_layers": 10**6})
    started = time.process_time()
    error = refused(
        command("quantize", here / "source", here / "new", "--calibrate", here / "ids.npy")
    )
    assert "num_hidden_layers is 1,000,000, and the tensors show 2 layers" in error
    assert time.process_time() - started < 10


def test_what_configs_of_real_models_count():
    assert excess_of({"shared_expert_intermediate_size": 20480, "num_experts": 64}, []) is None
    assert excess_of({"text_config": {"num_hidden_layers": 5000}}, []) is not None
    assert excess_of({"depths": [2, 2, 10**6]}, []) is not None
    names = [f"layers.{number}.weight" for number in range(2000)]
    assert excess_of({"num_hidden_layers": 2000, "vision_feature_layer": -2}, names) is None
    assert excess_of({"num_hidden_layers": 10**6}, ["layers.999999999.weight"]) is not None
