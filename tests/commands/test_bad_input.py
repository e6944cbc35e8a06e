"""Whatever is wrong with the input or the output folder: one clear line, exit code 2, nothing that
looks finished.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import contents, write_source
from click.testing import Result
from command_line import run
from hostile import refused
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], object]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def quantize(*arguments: object) -> Result:
    return run("quantize", *arguments, "--device", "cpu")


def resized(name: str, change: Callable[[bytes], bytes]) -> Damage:
    """Changes the content of a file."""
    return lambda source: (source / name).write_bytes(change((source / name).read_bytes()))


def in_index(place: Callable[[Path], str]) -> Damage:
    """Changes the file in which the index says that a weight is."""

    def damage(source: Path) -> None:
        shutil.copy(source / SECOND, source.parent / "elsewhere.safetensors")
        index = json.loads((source / INDEX).read_text())
        index["weight_map"]["model.layers.5.mlp.up_proj.weight"] = place(source)
        (source / INDEX).write_text(json.dumps(index))

    return damage


def in_config(**fields: object) -> Damage:
    def damage(source: Path) -> None:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | fields))

    return damage


def duplicate_tensor(source: Path) -> None:
    tensors = load_file(source / SECOND)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(4, 4, dtype=torch.bfloat16)
    save_file(tensors, source / SECOND)


def not_finite(source: Path) -> None:
    tensors = load_file(source / SECOND)
    tensors["model.layers.4.mlp.up_proj.weight"][3, 5:8] = torch.tensor(
        [float("nan"), float("inf"), float("-inf")]
    )
    save_file(tensors, source / SECOND)


UP_1, UP_4, UP_5 = (f"model.layers.{number}.mlp.up_proj.weight" for number in (1, 4, 5))
INCOMPLETE = "the download is incomplete"
CASTS = "--dtype bfloat16, float16, float32"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "truncated": (
        resized(SECOND, lambda content: content[:-1000]),
        rf"{SECOND}: model\S+: the file ends 1,000 bytes early; {INCOMPLETE}",
    ),
    "missing shard": (
        lambda source: (source / SECOND).unlink(),
        rf"{INDEX}: the shard {SECOND} is missing; {INCOMPLETE}",
    ),
    "index leads outside": (
        in_index(lambda _: "../elsewhere.safetensors"),
        rf"{INDEX}: {UP_5}: '../elsewhere.safetensors' is outside the folder",
    ),
    "duplicate tensor": (
        duplicate_tensor,
        f"{SECOND}: model.layers.0.mlp.up_proj.weight: also in {FIRST}",
    ),
    "config is no JSON": (
        resized("config.json", lambda _: b"{'model_type': 'llama'}"),
        "config.json: not JSON: .*",
    ),
    "not finite": (
        not_finite,
        f"{SECOND}: {UP_4}: has values that are NaN or infinite, or too large for bfloat16 or "
        f"double quantization; repair the checkpoint, .*",
    ),
    "float64 in the config": (
        in_config(dtype="float64"),
        f"config.json: float64 is not a dtype that can be packed; give {CASTS}",
    ),
    "already quantized": (
        in_config(quantization_config={"quant_method": "aqlm"}),
        ".*already quantized: quant_method aqlm, which nf4conv does not decode; give the "
        "checkpoint that it was made from",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_source_is_refused(source, tmp_path, damage, message):
    out = tmp_path / "out"
    damage(source)
    line = refused(quantize(source, out, "--max-shard-size", "60kB"))
    assert re.search(f"(^|[/.]){message}$", line), line
    assert not (out / "config.json").exists()
    assert not (out / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "no such file or folder"),
        ("empty", "neither safetensors weights nor a pytorch_model.bin in it"),
        (
            "llama.cpp",
            "neither safetensors weights nor a pytorch_model.bin in it; it has GGUF files: name "
            "one, --gguf-file NAME",
        ),
        (
            "loose",
            "2 safetensors files, but neither model.safetensors nor an index that names them",
        ),
        ("note.txt", "neither a .safetensors file nor a torch pickle"),
    ],
)
def test_a_source_that_is_no_checkpoint_is_refused(tmp_path, name, message):
    for folder in ("empty", "llama.cpp", "loose"):
        (tmp_path / folder).mkdir()
    (tmp_path / "llama.cpp/model-Q4_0.gguf").write_bytes(b"GGUF")
    for number in "12":
        save_file({f"w{number}": torch.zeros(2)}, tmp_path / f"loose/{number}.safetensors")
    (tmp_path / "note.txt").write_text("")
    assert refused(quantize(tmp_path / name, tmp_path / "out")) == f"{tmp_path / name}: {message}"
    assert not (tmp_path / "out").exists()


def test_one_shard_of_several_is_refused(source, tmp_path):
    line = refused(quantize(source / FIRST, tmp_path / "out"))
    assert line.endswith(
        "one shard of those that model.safetensors.index.json lists; give the folder"
    )


def test_an_output_folder_with_something_in_it_is_refused_and_left_alone(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("irreplaceable")
    assert (
        refused(quantize(source, out))
        == f"{out}: exists and is not empty; choose another folder, or --overwrite"
    )
    line = refused(quantize(source, out, "--overwrite"))
    assert line == f"{out}: does not look like a checkpoint, so --overwrite will not delete it"
    assert contents(out) == {"thesis.txt": b"irreplaceable"}


def test_an_output_that_is_a_file_is_refused(source, tmp_path):
    out = tmp_path / "out"
    out.write_text("")
    assert refused(quantize(source, out)) == f"{out}: exists and is not a folder"


@pytest.mark.parametrize("place", [".", "inside/deeper", ".."], ids=["equal", "inside", "around"])
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=["", "overwrite"])
def test_an_output_folder_that_meets_the_source_is_refused(source, place, overwrite):
    before = contents(source)
    line = refused(quantize(source, source / place, *overwrite))
    assert line.endswith(
        (
            "is the source folder; choose another output folder",
            "is inside the source folder; choose another output folder",
            "holds the source folder; choose another output folder",
        )
    )
    assert contents(source) == before


@pytest.mark.parametrize(("source", "out"), [("", "out"), ("source", "")], ids=["source", "out"])
def test_an_empty_path_is_not_taken_for_the_current_folder(tmp_path, monkeypatch, source, out):
    """`--overwrite "$UNSET"` would otherwise clear the folder that the user stands in."""
    write_source(tmp_path / "source")
    here = tmp_path / "here"
    here.mkdir()
    (here / "model.safetensors").write_text("another checkpoint")
    monkeypatch.chdir(here)
    result = quantize(source and tmp_path / source, out and tmp_path / out, "--overwrite")
    assert result.exit_code == 2
    empty = "SRC" if out else "OUT"
    assert result.stderr.splitlines()[-1] == (
        f"Error: Invalid value for '{empty}': the path is empty; perhaps a shell variable is not "
        "set"
    )
    assert contents(here) == {"model.safetensors": b"another checkpoint"}


def test_a_dry_run_shows_why_nothing_would_be_packed(source, tmp_path):
    out = tmp_path / "out"
    line = refused(quantize(source, out, "--include", "*norm*"))
    assert (
        line
        == f"{source}: no tensor of this checkpoint would be packed; --dry-run shows why each is "
        f"kept"
    )
    result = quantize(source, out, "--include", "*norm*", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "not included by the user" in result.stdout
    assert "0 weights packed, 19 tensors kept" in result.stdout
    assert not out.exists()
