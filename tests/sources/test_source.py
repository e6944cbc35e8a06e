"""The contents of a folder before any weight is read: what is found, and what is refused."""

import json
import os
from pathlib import Path

import pytest
import torch
from checkpoints import write_source
from safetensors.torch import save_file

from nf4conv.errors import SourceError
from nf4conv.sources import header
from nf4conv.sources.opening import open_source
from nf4conv.sources.reader import read_json
from nf4conv.sources.tensors import TensorInfo

INDEX = "model.safetensors.index.json"


def save(folder: Path, file: str, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: torch.zeros(2, 3) for name in names}, folder / file)
    return folder


def test_a_sharded_folder(tmp_path):
    source = open_source(write_source(tmp_path / "source"))
    assert [file.name for file in source.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert len(source.tensors) == 19
    assert source.config is not None
    assert source.config["model_type"] == "llama"
    assert source.stem == "model"
    places = [(source.files.index(tensor.file), tensor.start) for tensor in source.tensors]
    assert places == sorted(places)  # reading them in turn goes through each file once


def test_a_header_longer_than_what_is_read_first(tmp_path):
    names = [f"model.layers.{number}.self_attn.q_proj.weight" for number in range(1500)]
    assert len(names) * 100 > header._HEAD
    source = open_source(save(tmp_path / "source", "model.safetensors", *names))
    assert {tensor.name for tensor in source.tensors} == set(names)


def test_every_byte_is_where_the_header_says(tmp_path):
    torch.manual_seed(0)
    values = {"a": torch.randn(3, 5), "b": torch.randn(7).half(), "c": torch.tensor(3.0)}
    (tmp_path / "source").mkdir()
    save_file(values, tmp_path / "source/model.safetensors")
    for tensor in open_source(tmp_path / "source").tensors:
        raw = tensor.file.read_bytes()[tensor.start : tensor.stop]
        assert raw == values[tensor.name].numpy().tobytes()
        assert (tensor.nbytes, tensor.elements) == (len(raw), values[tensor.name].numel())


def test_model_safetensors_wins_over_an_index_as_in_transformers(source):
    save(source, "model.safetensors", "only")
    assert [tensor.name for tensor in open_source(source).tensors] == ["only"]


def test_weights_of_another_name(tmp_path):
    one = open_source(save(tmp_path / "one", "consolidated.safetensors", "w"))
    assert (one.files[0].name, one.stem, one.config) == ("consolidated.safetensors", "model", None)
    diffusers = open_source(
        save(tmp_path / "diffusers", "diffusion_pytorch_model.safetensors", "w")
    )
    assert diffusers.stem == "diffusion_pytorch_model"


def test_a_single_file_takes_the_config_beside_it(tmp_path):
    folder = save(tmp_path / "folder", "any name.safetensors", "w")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    save(folder, "another.safetensors", "v")
    source = open_source(folder / "any name.safetensors")
    assert [tensor.name for tensor in source.tensors] == ["w"]
    assert (source.folder, source.config) == (folder, {"model_type": "gpt2"})


def test_links_are_followed_because_the_hub_s_cache_consists_of_them(tmp_path):
    blobs = save(tmp_path / "blobs", "0f3a.safetensors", "w")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/model.safetensors").symlink_to(blobs / "0f3a.safetensors")
    [tensor] = open_source(tmp_path / "snapshot").tensors
    assert tensor == TensorInfo(
        "w", "F32", (2, 3), tmp_path / "snapshot/model.safetensors", tensor.start, tensor.stop
    )


def test_shards_in_a_sub_folder(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    save(folder / "weights", "a.safetensors", "w")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "weights/a.safetensors"}}))
    assert open_source(folder).files == (folder / "weights/a.safetensors",)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "has no weight_map"),
        ([], "has no weight_map"),
        ({}, "has no weight_map"),
        ({"w": 7}, "w: 7 is outside the folder"),
        ({"w": None}, "w: None is outside the folder"),
        ({"w": "a/../../w"}, "w: 'a/../../w' is outside the folder"),
        ({"w": "/etc/passwd"}, "w: '/etc/passwd' is outside the folder"),
        ({"w": "..\\w"}, r"w: '..\\w' is outside the folder"),
        ({"w": ""}, "the shard  is missing; the download is incomplete"),
        ({"w": "."}, "the shard . is missing; the download is incomplete"),
        (
            {"w": "missing.safetensors"},
            "the shard missing.safetensors is missing; the download is incomplete",
        ),
    ],
    ids=[
        "null",
        "list",
        "empty",
        "number",
        "none",
        "up",
        "absolute",
        "backslash",
        "no-name",
        "folder",
        "missing",
    ],
)
def test_indexes_that_are_refused(tmp_path, weight_map, message):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(SourceError) as caught:
        open_source(tmp_path)
    assert str(caught.value) == f"{tmp_path / INDEX}: {message}"


@pytest.mark.parametrize("name", ["m" * 300, "m" * 5000], ids=["name", "path"])
def test_names_longer_than_the_system_allows(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(SourceError, match=r"File name too long"):
            open_source(path)


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"a":' * 100_000 + "1" + "}" * 100_000, "\ud800"]
)
def test_json_that_is_none(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_text(content, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(SourceError, match=r"config\.json: not (JSON: .+|a JSON object)$"):
        read_json(file)


def test_a_file_without_tensors_is_refused(tmp_path):
    folder = save(tmp_path / "empty", "model.safetensors")
    with pytest.raises(SourceError, match=r"model\.safetensors: no tensors"):
        open_source(folder)


def test_a_folder_that_may_not_be_entered(tmp_path):
    """A child process tries it as another user, because root may enter every folder."""
    folder = save(tmp_path / "closed", "model.safetensors", "w")
    folder.chmod(0o000)
    child = os.fork()
    if child == 0:
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            open_source(folder)
        except SourceError as error:
            os._exit(0 if "Permission denied" in str(error) else 2)
        except OSError:
            os._exit(3)
        os._exit(4)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    folder.chmod(0o700)
    assert status == 0
