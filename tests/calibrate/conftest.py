"""What the tests of calibration share: one model, one text, and what comes of them."""

from pathlib import Path

import pytest
from calibrations import CPU, make_model, make_text, options_for

import nf4conv


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text") / "ids.npy")


@pytest.fixture(scope="session")
def made(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, calibrated."""
    out = tmp_path_factory.mktemp("made") / "out"
    nf4conv.quantize(model, out, **options_for(text), device="cpu", verify=True)
    return out


@pytest.fixture(scope="session")
def with_outputs(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, calibrated with a view to the outputs of queries, keys and values."""
    out = tmp_path_factory.mktemp("with_outputs") / "out"
    nf4conv.quantize(model, out, **options_for(text, calibrate_output="qkv"), **CPU)
    return out


@pytest.fixture(scope="session")
def searched(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with searched scales."""
    out = tmp_path_factory.mktemp("searched") / "out"
    nf4conv.quantize(model, out, scales="search", **CPU)
    return out
