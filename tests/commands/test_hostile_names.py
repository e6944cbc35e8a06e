"""Names made to break who reads them: refused or taken as they are, in no time, and never mistaken
for one another.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_model
from click.testing import Result
from command_line import run
from pace import time_limit
from safetensors.torch import load_file

GOOD = "model.layers.0.mlp.up_proj.weight"
EVIL = "model.layers.0.mlp.(a+)+$"
VICTIM = f"model.layers.0.mlp.{'a' * 60}!"
"""What the pattern above never finishes to compare itself with."""


@pytest.fixture(autouse=True)
def _in_no_time() -> Iterator[None]:
    """A test that hangs fails."""
    with time_limit(10):
        yield


def write(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return save_model(folder, tensors, {"model_type": "llama"})


def command(*arguments: object) -> Result:
    return run(*arguments, "--device", "cpu")


def packed(out: Path) -> set[str]:
    return {
        name.removesuffix(".absmax")
        for name in load_file(out / "model.safetensors")
        if name.endswith(".absmax")
    }


def skip_list(out: Path) -> list[str]:
    config = json.loads((out / "config.json").read_text())
    listed: list[str] = config["quantization_config"]["llm_int8_skip_modules"]
    return listed


def with_skip_list(out: Path, entries: Any) -> None:
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["llm_int8_skip_modules"] = entries
    (out / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "name", [EVIL, "model.layers.0.mlp.a[0]{1}", "model.layers.0.mlp.*", "model.layers.0.²\\d|^"]
)
def test_such_weights_are_packed_like_others(tmp_path, name):
    source = write(
        tmp_path / "source",
        {GOOD: (64, 64), f"{name}.weight": (64, 64), f"{VICTIM}.weight": (64, 64)},
    )
    assert command("quantize", source, tmp_path / "out").exit_code == 0
    assert packed(tmp_path / "out") == {GOOD, f"{name}.weight", f"{VICTIM}.weight"}
    assert command("verify", tmp_path / "out", "--source", source).exit_code == 0
    assert command("dequantize", tmp_path / "out", tmp_path / "plain").exit_code == 0
    assert command("verify", tmp_path / "plain", "--source", tmp_path / "out").exit_code == 0


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("a." * 65 + "weight", "136 characters and 65 dots"),
        ("1" * 5000 + ".weight", "5,007 characters and 1 dots"),
    ],
    ids=["deep", "long"],
)
@pytest.mark.parametrize("kind", ["safetensors", "pickle"])
def test_names_that_no_model_can_have_are_refused(tmp_path, name, size, kind):
    source = write(tmp_path / "source", {GOOD: (64, 64), name: (64, 64)})
    file = source / "model.safetensors"
    if kind == "pickle":
        torch.save(load_file(file), source / "pytorch_model.bin")
        file.unlink()
        file = source / "pytorch_model.bin"
    expected = f"Error: {file}: {name[:50]}…: a name of {size}; expected at most 1,000 and 64\n"
    done = command("quantize", source, tmp_path / "out")
    assert (done.exit_code, done.stderr) == (2, expected)


def test_a_pattern_in_a_skip_list_is_not_run(tmp_path):
    source = write(tmp_path / "source", {GOOD: (64, 64), f"{VICTIM}.weight": (64, 64)})
    assert command("quantize", source, tmp_path / "out").exit_code == 0
    with_skip_list(
        tmp_path / "out", [*skip_list(tmp_path / "out"), r"model\.layers\.0\.mlp\.(a+)+$"]
    )
    done = command("verify", tmp_path / "out")
    assert done.exit_code == 0
    assert (
        r"'model\\.layers\\.0\\.mlp\\.(a+)+$' is a pattern to transformers 5, which is not checked"
        in done.stdout
    )


@pytest.mark.parametrize("pattern", ["model.(", "*", "a{9999999999999}", "["], ids=repr)
def test_a_skip_list_that_is_no_regular_expression_fails_verification(tmp_path, pattern):
    source = write(tmp_path / "source", {GOOD: (64, 64)})
    assert command("quantize", source, tmp_path / "out").exit_code == 0
    with_skip_list(tmp_path / "out", [*skip_list(tmp_path / "out"), pattern])
    done = command("verify", tmp_path / "out")
    assert done.exit_code == 1
    assert (
        f"{pattern!r} is not a regular expression, for which transformers 5 takes it" in done.stdout
    )


def test_skip_lists_are_still_held_against_the_loaders_that_take_them_literally(tmp_path):
    source = write(tmp_path / "source", {GOOD: (64, 64)})
    assert command("quantize", source, tmp_path / "out").exit_code == 0
    with_skip_list(tmp_path / "out", ["lm_head", "(a+)+$", "up_proj"])
    done = command("verify", tmp_path / "out")
    assert done.exit_code == 1
    assert f"{GOOD}: is packed, but transformers 4 would skip it" in done.stdout
