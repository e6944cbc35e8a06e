"""`verify` of calibrated weights: their bytes are those that calibration recorded, whatever their
distance from the source.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import nf4conv
from nf4conv.check.record_check import _digest
from nf4conv.check.structure import read_structure
from nf4conv.report.text.lines import inspection_lines
from nf4conv.sources.record import recorded_blocks

NAN = float("nan")
FIRST, SECOND = (f"gpt_neox.layers.{layer}.mlp.dense_4h_to_h.weight" for layer in (0, 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_outliers(tmp_path_factory.mktemp("model") / "neox", 5)


def with_outliers(folder: Path, spread: float) -> Path:
    """Saves a GPT-NeoX model whose down projections read a few huge columns, which depend on each
    other: calibration moves their weights far.
    """
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=96,
        max_position_embeddings=32,
    )
    made = transformers.AutoModelForCausalLM.from_config(config)
    for layer in made.gpt_neox.layers:
        bias = layer.mlp.dense_h_to_4h.bias
        bias.data.copy_(torch.exp(spread * torch.randn(bias.shape)))
    made.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def out(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated(model, tmp_path_factory.mktemp("made"))


def calibrated(model: Path, folder: Path) -> Path:
    ids = (np.random.default_rng(0).random(3000) ** 2 * 96).astype(np.int32)
    np.save(folder / "ids.npy", ids)
    options = {"calibrate": str(folder / "ids.npy"), "calibration_tokens": 1024}
    run = {"device": "cpu", "verify": True}
    nf4conv.quantize(model, folder / "out", **options, **run)
    return folder / "out"


def test_no_weight_moves_so_far_that_it_looks_like_a_foreign_one(tmp_path: Path) -> None:
    """With columns as huge as these, the least error of outputs is at relative errors above 1."""
    model = with_outliers(tmp_path / "model", 6)
    report = nf4conv.verify(calibrated(model, tmp_path), source=model)
    assert report.passed
    gains = json.loads((tmp_path / "out" / "nf4conv.json").read_text())["calibrated"]["blocks"]
    assert {gain for block in gains for gain in block["gains"].values()} >= {1.0}


@pytest.mark.parametrize("exact", [False, True])
def test_weights_far_from_their_source_are_right(model: Path, out: Path, exact: bool) -> None:
    report = nf4conv.verify(out, source=model, exact=exact)
    assert report.passed
    assert report.identical
    assert report.checks["calibrated"]
    assert 0.332 < max(row.error for row in report.weights) < 0.8
    assert "byte for byte what calibration recorded" in report.verdict
    assert "quantizing" not in report.verdict
    lines = list(inspection_lines(nf4conv.inspect(out), None))
    assert any(line.startswith("errors of layer outputs are 0.") for line in lines)


def test_what_a_user_allows_is_the_limit(model: Path, out: Path) -> None:
    assert not nf4conv.verify(out, source=model, tolerance=0.3).passed


def test_weights_in_each_others_place_are_wrong_though_their_digests_are_right(
    model: Path, out: Path, tmp_path: Path
) -> None:
    swapped = shutil.copytree(out, tmp_path / "swapped")
    tensors = load_file(swapped / "model.safetensors")
    for name in [name for name in tensors if name.startswith(FIRST)]:
        other = name.replace(FIRST, SECOND)
        tensors[name], tensors[other] = tensors[other], tensors[name]
    save_file(tensors, swapped / "model.safetensors", {"format": "pt"})
    faults = faults_of(swapped, model)
    assert {"calibrated", "tolerance"} <= {check for check, _ in faults}

    structure = read_structure(swapped)
    record = json.loads((swapped / "nf4conv.json").read_text())
    blocks = recorded_blocks(record)
    for (_, names), entry in zip(blocks, record["calibrated"]["blocks"], strict=True):
        entry["sha256"] = _digest([structure.weights[name] for name in names])
    (swapped / "nf4conv.json").write_text(json.dumps(record))
    assert faults_of(swapped, model) == {("tolerance", FIRST), ("tolerance", SECOND)}


def faults_of(folder: Path, source: Path) -> set[tuple[str, str]]:
    report = nf4conv.verify(folder, source=source)
    assert not report.passed
    return {(finding.check, finding.tensor) for finding in report.findings if finding.is_fault}


@pytest.mark.parametrize("damage", ["a bit", "no digests", "a list"])
def test_bytes_that_were_not_recorded_are_a_fault(
    model: Path, out: Path, tmp_path: Path, damage: str
) -> None:
    damaged = shutil.copytree(out, tmp_path / "damaged")
    record = json.loads((damaged / "nf4conv.json").read_text())
    if damage == "a bit":
        tensors = load_file(damaged / "model.safetensors")
        tensors[FIRST][100] ^= 1
        save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    elif damage == "no digests":
        del record["calibrated"]
    else:
        record["calibrated"]["blocks"] = [{"sha256": 1, "gains": [[1]]}, [1], None]
    (damaged / "nf4conv.json").write_text(json.dumps(record))
    faults = faults_of(damaged, model)
    assert {check for check, _ in faults} == {"calibrated"}
    assert all(tensor.startswith("gpt_neox.layers.") for _, tensor in faults)
    assert list(inspection_lines(nf4conv.inspect(damaged), None))
