"""`quantize` at the edges of what a checkpoint can hold."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import contents
from safetensors.torch import load_file, save_file
from test_quantize import assert_is

import nf4conv
from nf4conv.errors import SourceError

CPU = {"device": "cpu"}
FIRST, SECOND = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


EMBEDDING = "model.embed_tokens.weight"


def refusal(source: Path, name: str, dtype: str) -> str:
    return (
        f"{source / 'model.safetensors'}: {name}: has values too large for {dtype}, to which it "
        f"would be cast; give another --dtype"
    )


def test_values_that_a_cast_would_make_infinite_are_refused(tmp_path):
    weight = torch.ones(64, 64)
    weight[3, 4] = 70_000
    source = write(tmp_path / "source", {FIRST: weight})
    with pytest.raises(SourceError) as caught:
        nf4conv.quantize(source, tmp_path / "out", dtype="float16", **CPU)
    assert f"{FIRST}: has values that are NaN or infinite, or too large for float16" in str(
        caught.value
    )
    nf4conv.quantize(source, tmp_path / "other", dtype="bfloat16", **CPU)
    assert_is(tmp_path / "other", FIRST, weight.bfloat16(), {})


@pytest.mark.parametrize(
    ("value", "stored", "dtype"),
    [
        (1e38, torch.float32, "float16"),
        (3.4e38, torch.float32, "bfloat16"),
        (-65_536.0, torch.bfloat16, "float16"),
        (1e300, torch.float64, "float32"),
    ],
    ids=["f32-f16", "f32-bf16", "bf16-f16", "f64-f32"],
)
@pytest.mark.parametrize(
    "run", [CPU, {"device": "cpu", "buffer_size": 1}], ids=["large-buffer", "tiny-buffer"]
)
def test_kept_values_that_a_cast_would_make_infinite_are_refused(
    tmp_path, value, stored, dtype, run
):
    embedding = torch.ones(640, 64, dtype=stored)
    # of the source itself: it must not hide the other, which lies in the same piece
    embedding[0, 0] = torch.inf
    embedding[3, 4] = value
    source = write(tmp_path / "source", {FIRST: torch.ones(64, 64), EMBEDDING: embedding})
    with pytest.raises(SourceError) as caught:
        nf4conv.quantize(source, tmp_path / "out", dtype=dtype, **run)
    assert str(caught.value) == refusal(source, EMBEDDING, dtype)
    assert not (tmp_path / "out/model.safetensors").exists()


def test_infinities_of_the_source_are_kept(tmp_path):
    # whose sum is too large for float16, and none of them is
    embedding = torch.full((64, 64), 60_000.0)
    embedding[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    source = write(tmp_path / "source", {FIRST: torch.ones(64, 64), EMBEDDING: embedding})
    nf4conv.quantize(source, tmp_path / "out", dtype="float16", **CPU)
    found = load_file(tmp_path / "out/model.safetensors")[EMBEDDING]
    torch.testing.assert_close(found, embedding.half(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("transposed", [False, True])
def test_decoded_values_that_a_cast_would_make_infinite_are_refused(tmp_path, transposed):
    name = "h.0.attn.c_attn.weight" if transposed else FIRST
    weight = torch.randn(64, 192).bfloat16()
    weight[3, 4] = 1e30
    source = write(tmp_path / "source", {name: weight})
    (source / "config.json").write_text(
        json.dumps({"model_type": "gpt2" if transposed else "llama"})
    )
    nf4conv.quantize(source, tmp_path / "packed", **CPU)
    nf4conv.dequantize(tmp_path / "packed", tmp_path / "plain", **CPU)
    assert float(
        load_file(tmp_path / "plain/model.safetensors")[name].float().max()
    ) == pytest.approx(1e30, rel=0.01)
    with pytest.raises(SourceError) as caught:
        nf4conv.dequantize(tmp_path / "packed", tmp_path / "half", dtype="float16", **CPU)
    message = rf"{name}: has values too large for float16, to which it would be cast"
    assert re.search(message, str(caught.value))


def test_decoding_to_a_weight_s_own_dtype_is_no_cast(tmp_path):
    """Quantized scales may decode to more than float16 holds; bitsandbytes then gives infinity, and
    so do we.
    """
    weight = torch.linspace(64_000, 65_504, 64).view(64, 1).repeat(1, 256).half()
    weight[0] = 0.0
    source = write(tmp_path / "source", {FIRST: weight})
    nf4conv.quantize(source, tmp_path / "packed", **CPU)
    nf4conv.dequantize(tmp_path / "packed", tmp_path / "plain", **CPU)
    assert bool(load_file(tmp_path / "plain/model.safetensors")[FIRST].isinf().any())


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (1, 1), (1, 64), (64, 1)], ids=str)
def test_tiny_and_empty_matrices_are_not_lost(tmp_path, shape):
    weights = {FIRST: torch.randn(64, 64).bfloat16(), SECOND: torch.randn(shape).bfloat16()}
    nf4conv.quantize(write(tmp_path / "source", weights), tmp_path / "out", **CPU)
    assert_is(tmp_path / "out", FIRST, weights[FIRST], {})
    found = load_file(tmp_path / "out/model.safetensors")
    if f"{SECOND}.absmax" in found:
        assert_is(tmp_path / "out", SECOND, weights[SECOND], {})
    else:
        assert torch.equal(found[SECOND], weights[SECOND])


def test_bytes_do_not_depend_on_the_order_of_sets(source, tmp_path):
    """Python orders sets of names anew in every process."""
    options = ["--device", "cpu", "--exclude", "*.3.*", "--exclude", "*.1.mlp.*", "--quiet"]
    for seed in "12":
        command = [sys.executable, "-m", "nf4conv", "quantize", source, tmp_path / seed, *options]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
