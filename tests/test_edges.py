"""`quantize` at the edges of what a checkpoint can hold."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import contents, write_source
from safetensors.torch import load_file, save_file

from nf4conv.codec.ops import quantize_4bit
from nf4conv.errors import SourceError
from nf4conv.options import QuantizeOptions, RunOptions
from nf4conv.quantize import quantize_checkpoint

CPU = RunOptions(device="cpu")
FIRST, SECOND = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_packed(out: Path, name: str, weight: torch.Tensor) -> None:
    found = load_file(out / "model.safetensors")
    packed, state = quantize_4bit(weight)
    expected = {name: packed} | {f"{name}.{suffix}": part for suffix, part in state.components().items()}
    assert {key for key in found if key == name or key.startswith(f"{name}.")} == expected.keys()
    assert all(torch.equal(found[key], part) for key, part in expected.items())


@pytest.mark.parametrize("non_finite", ["refuse", "keep"])
def test_values_that_a_cast_would_make_infinite_are_refused(tmp_path, non_finite):
    """Keeping such a tensor would not help: it would be cast too."""
    weight = torch.ones(64, 64)
    weight[3, 4] = 70_000
    source = write(tmp_path / "source", {FIRST: weight})
    options = QuantizeOptions(dtype="float16", non_finite=non_finite)
    with pytest.raises(SourceError) as caught:
        quantize_checkpoint(source, tmp_path / "out", options, CPU)
    assert str(caught.value) == (
        f"{source / 'model.safetensors'}: {FIRST}: has values too large for float16, to which it would be cast; "
        "give another --dtype"
    )
    quantize_checkpoint(source, tmp_path / "other", dataclasses.replace(options, dtype="bfloat16"), CPU)
    assert_packed(tmp_path / "other", FIRST, weight.bfloat16())


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (1, 1), (1, 64), (64, 1)], ids=str)
def test_tiny_and_empty_matrices_are_not_lost(tmp_path, shape):
    weights = {FIRST: torch.randn(64, 64).bfloat16(), SECOND: torch.randn(shape).bfloat16()}
    quantize_checkpoint(write(tmp_path / "source", weights), tmp_path / "out", None, CPU)
    assert_packed(tmp_path / "out", FIRST, weights[FIRST])
    found = load_file(tmp_path / "out/model.safetensors")
    if f"{SECOND}.absmax" in found:
        assert_packed(tmp_path / "out", SECOND, weights[SECOND])
    else:
        assert torch.equal(found[SECOND], weights[SECOND])


def test_bytes_do_not_depend_on_the_order_of_sets(tmp_path):
    """Python orders sets of names anew in every process."""
    source = write_source(tmp_path / "source")
    options = ["--device", "cpu", "--checksum", "--exclude", "*.3.*", "--exclude", "*.1.mlp.*", "--quiet"]
    for seed in "12":
        command = [sys.executable, "-m", "nf4conv", "quantize", str(source), str(tmp_path / seed), *options]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
