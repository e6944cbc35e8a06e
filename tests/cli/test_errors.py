"""Errors say as attributes which file and which tensor they are about."""

import copy
import errno
import json
from collections.abc import Callable
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
NORM = "model.layers.1.input_layernorm.weight"


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


def with_value(source: Path, name: str, value: float) -> Path:
    """Changes a value of a tensor."""
    file = shard_of(source)
    tensors = load_file(file)
    tensors[name].view(-1)[3] = value
    save_file(tensors, file)
    return file


def cut_off(source: Path) -> Path:
    file = shard_of(source)
    file.write_bytes(file.read_bytes()[:-1])
    return file


def without_json(source: Path) -> Path:
    (source / "config.json").write_text("{")
    return source / "config.json"


FAULTS: dict[str, tuple[Callable[[Path], Path], str | None]] = {
    "a header that describes no tensor": (lambda source: with_header(source, UP, dtype="F128"), UP),
    "a file that is cut off": (cut_off, None),
    "a weight that holds NaN": (lambda source: with_value(source, UP, torch.nan), UP),
    "a value that does not fit the dtype": (lambda source: with_value(source, NORM, 1e30), NORM),
    "a config that is no JSON": (without_json, None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_has_a_place(source: Path, tmp_path: Path, fault: str):
    damage, tensor = FAULTS[fault]
    file = damage(source)
    with pytest.raises(Nf4convError) as raised:
        nf4conv.quantize(source, tmp_path / "out", dtype="float16", **CPU)
    assert (raised.value.path, raised.value.tensor) == (file, tensor)
    assert str(raised.value).startswith(f"{file}: {tensor}: " if tensor else f"{file}: ")


def test_what_the_operating_system_refuses():
    with pytest.raises(SourceError) as raised, named("a/b", SourceError):
        raise OSError(errno.EIO, "Input/output error")
    assert (str(raised.value), raised.value.path) == ("a/b: Input/output error", Path("a/b"))


def test_a_folder_that_holds_something(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(OutputError) as raised:
        nf4conv.quantize(write_source(tmp_path / "source"), tmp_path / "out", **CPU)
    assert raised.value.path == tmp_path / "out"


def test_another_process_gets_the_place_too():
    """By what pickle takes."""
    again = copy.copy(SourceError("line", path="a/b", tensor="t"))
    assert (str(again), again.path, again.tensor) == ("line", Path("a/b"), "t")


def test_json_has_the_place(source: Path):
    file = with_header(source, UP, dtype="F128")
    done = run("inspect", source, "--json")
    found = json.loads(done.stdout)
    assert (found["path"], found["tensor"]) == (str(file), UP)
