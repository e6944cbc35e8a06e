"""Errors say as attributes which file and which tensor they are about."""

import copy
import errno
import json
from pathlib import Path

import pytest
import torch
from checkpoints import write_source
from command_line import run
from safetensors.torch import load_file, save_file

import nf4conv
from nf4conv import Nf4convError, OutputError, SourceError
from nf4conv.errors import named

CPU = {"device": "cpu"}
UP = "model.layers.1.mlp.up_proj.weight"


def shard_of(source: Path) -> Path:
    return min(source.glob("*.safetensors"))


def with_header(source: Path, name: str, **changes: object) -> Path:
    """Changes what the header of a checkpoint says about a tensor."""
    file = shard_of(source)
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + length])
    table[name] |= changes
    header = json.dumps(table).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    return file


def error_of(source: Path, out: Path, **options: object) -> Nf4convError:
    with pytest.raises(Nf4convError) as raised:
        nf4conv.quantize(source, out, **options, **CPU)
    return raised.value


def test_a_header_that_describes_no_tensor(tmp_path: Path):
    source = write_source(tmp_path / "source")
    file = with_header(source, UP, dtype="F128")
    error = error_of(source, tmp_path / "out")
    assert (error.path, error.tensor) == (file, UP)
    assert str(error).startswith(f"{file}: {UP}: ")


def test_a_file_that_is_cut_off(tmp_path: Path):
    source = write_source(tmp_path / "source")
    file = shard_of(source)
    file.write_bytes(file.read_bytes()[:-1])
    assert error_of(source, tmp_path / "out").path == file


def test_a_weight_that_holds_nan(tmp_path: Path):
    source = write_source(tmp_path / "source")
    file = shard_of(source)
    tensors = load_file(file)
    tensors[UP][3, 3] = torch.nan
    save_file(tensors, file)
    error = error_of(source, tmp_path / "out")
    assert (error.path, error.tensor) == (file, UP)


def test_values_that_do_not_fit_a_dtype(tmp_path: Path):
    source = write_source(tmp_path / "source")
    file = shard_of(source)
    tensors = load_file(file)
    tensors["model.layers.1.input_layernorm.weight"][0] = 1e30
    save_file(tensors, file)
    error = error_of(source, tmp_path / "out", dtype="float16")
    assert (error.path, error.tensor) == (file, "model.layers.1.input_layernorm.weight")


def test_what_the_operating_system_refuses():
    with pytest.raises(SourceError) as raised, named("a/b", SourceError):
        raise OSError(errno.EIO, "Input/output error")
    assert (str(raised.value), raised.value.path) == ("a/b: Input/output error", Path("a/b"))


def test_a_config_that_is_no_json(tmp_path: Path):
    source = write_source(tmp_path / "source")
    (source / "config.json").write_text("{")
    error = error_of(source, tmp_path / "out")
    assert (error.path, error.tensor) == (source / "config.json", None)


def test_a_folder_that_holds_something(tmp_path: Path):
    source = write_source(tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    error = error_of(source, tmp_path / "out")
    assert isinstance(error, OutputError)
    assert error.path == tmp_path / "out"


def test_no_source(tmp_path: Path):
    with pytest.raises(SourceError) as raised:
        nf4conv.plan_quantize(tmp_path / "nowhere")
    assert raised.value.path == tmp_path / "nowhere"


def test_an_error_without_a_place():
    error = Nf4convError("out of memory")
    assert (error.path, error.tensor) == (None, None)


def test_another_process_gets_the_place_too():
    """By what pickle takes."""
    again = copy.copy(SourceError("line", path="a/b", tensor="t"))
    assert (str(again), again.path, again.tensor) == ("line", Path("a/b"), "t")


def test_json_has_the_place(tmp_path: Path):
    source = write_source(tmp_path / "source")
    file = with_header(source, UP, dtype="F128")
    done = run("inspect", source, "--json")
    found = json.loads(done.stdout)
    assert (found["path"], found["tensor"]) == (str(file), UP)
