"""Whatever is wrong with the input or the output folder: one clear line, exit code 2, nothing that
looks finished.
"""

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import contents, write_source
from click.testing import Result
from command_line import run
from safetensors.torch import load_file, save_file

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def quantize(*arguments: object) -> Result:
    return run("quantize", *arguments, "--device", "cpu")


def refused(result: Result) -> str:
    """The one line that a refusal consists of."""
    assert result.exit_code == 2, (result.exit_code, result.output)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line.removeprefix("Error: ")


def rewrite_header(
    file: Path, change: Callable[[dict[str, dict[str, object]]], None], pad: int = 0
) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode() + b" " * pad
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + raw[8 + length :])


def truncate(source: Path) -> None:
    file = source / SECOND
    file.write_bytes(file.read_bytes()[:-1000])


def cut_into_header(source: Path) -> None:
    file = source / SECOND
    file.write_bytes(file.read_bytes()[:100])


def empty_file(source: Path) -> None:
    (source / SECOND).write_bytes(b"")


def huge_header(source: Path) -> None:
    file = source / FIRST
    file.write_bytes(struct.pack("<Q", 2**40) + file.read_bytes()[8:])


def overlap(source: Path) -> None:
    def change(header: dict[str, dict[str, object]]) -> None:
        names = sorted(
            (name for name in header if name != "__metadata__"),
            key=lambda n: header[n]["data_offsets"][0],
        )
        for name in names[1:2]:
            begin, end = header[name]["data_offsets"]
            header[name]["data_offsets"] = [begin - 2, end - 2]

    rewrite_header(source / FIRST, change)


def hole(source: Path) -> None:
    def change(header: dict[str, dict[str, object]]) -> None:
        del header["model.layers.1.input_layernorm.weight"]

    rewrite_header(source / FIRST, change)


def unknown_dtype(source: Path) -> None:
    rewrite_header(
        source / FIRST,
        lambda header: header["model.layers.1.mlp.up_proj.weight"].update(dtype="BF17"),
    )


def wrong_shape(source: Path) -> None:
    rewrite_header(
        source / FIRST,
        lambda header: header["model.layers.1.mlp.up_proj.weight"].update(shape=[512, 127]),
    )


def boolean_shape(source: Path) -> None:
    rewrite_header(
        source / FIRST,
        lambda header: header["model.layers.1.mlp.up_proj.weight"].update(shape=[True, 65536]),
    )


def header_not_json(source: Path) -> None:
    file = source / FIRST
    raw = bytearray(file.read_bytes())
    raw[8] = ord("[")
    file.write_bytes(raw)


def missing_shard(source: Path) -> None:
    (source / SECOND).unlink()


def index_outside(source: Path) -> None:
    shutil.copy(source / SECOND, source.parent / "elsewhere.safetensors")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.5.mlp.up_proj.weight"] = "../elsewhere.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def index_absolute(source: Path) -> None:
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.5.mlp.up_proj.weight"] = str(source / SECOND)
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def index_wrong(source: Path) -> None:
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.5.mlp.up_proj.weight"] = FIRST
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def index_not_json(source: Path) -> None:
    (source / "model.safetensors.index.json").write_text("{")


def index_without_map(source: Path) -> None:
    (source / "model.safetensors.index.json").write_text("{}")


def duplicate_tensor(source: Path) -> None:
    tensors = load_file(source / SECOND)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(4, 4, dtype=torch.bfloat16)
    save_file(tensors, source / SECOND)


def config_not_json(source: Path) -> None:
    (source / "config.json").write_text("{'model_type': 'llama'}")


def not_finite(source: Path) -> None:
    tensors = load_file(source / SECOND)
    tensors["model.layers.4.mlp.up_proj.weight"][3, 5:8] = torch.tensor(
        [float("nan"), float("inf"), float("-inf")]
    )
    save_file(tensors, source / SECOND)


def float64_weight(source: Path) -> None:
    tensors = load_file(source / SECOND)
    tensors["model.layers.4.mlp.up_proj.weight"] = tensors[
        "model.layers.4.mlp.up_proj.weight"
    ].double()
    save_file(tensors, source / SECOND)


def float64_config(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": "float64"}))


def already_quantized(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "aqlm"}})
    )


DAMAGES = [
    (truncate, rf"{SECOND}: model\S+: the file ends 1,000 bytes early; the download is incomplete"),
    (
        cut_into_header,
        f"{SECOND}: claims a header of [0-9,]+ bytes but the file has only 100; the download is "
        f"incomplete",
    ),
    (
        empty_file,
        f"{SECOND}: 0 bytes, too short for a safetensors file; the download is incomplete",
    ),
    (
        huge_header,
        f"{FIRST}: claims a header of 1,099,511,627,776 bytes; this is not a safetensors file",
    ),
    (overlap, rf"{FIRST}: model\S+: its bytes overlap those of model\S+"),
    (hole, rf"{FIRST}: model\S+: 128 unused bytes before it"),
    (
        unknown_dtype,
        f"{FIRST}: model.layers.1.mlp.up_proj.weight: unknown dtype 'BF17'; a newer nf4conv may "
        f"know it",
    ),
    (
        wrong_shape,
        rf"{FIRST}: model.layers.1.mlp.up_proj.weight: 131,072 bytes, expected 130,048 for \[512, "
        rf"127\] BF16",
    ),
    (boolean_shape, rf"{FIRST}: model.layers.1.mlp.up_proj.weight: \[True, 65536\] is not a shape"),
    (header_not_json, f"{FIRST}: the safetensors header is malformed: .*"),
    (
        missing_shard,
        rf"model.safetensors.index.json: model\S+: the shard {SECOND} is missing; the download is "
        rf"incomplete",
    ),
    (
        index_outside,
        r"index.json: model.layers.5.mlp.up_proj.weight: '../elsewhere.safetensors' is outside "
        r"the folder",
    ),
    (
        index_absolute,
        r"model.safetensors.index.json: model.layers.5.mlp.up_proj.weight: '/\S+' is outside the "
        r"folder",
    ),
    (
        index_wrong,
        f"{FIRST}: model.layers.5.mlp.up_proj.weight: the index places this tensor here, but the "
        f"file lacks it",
    ),
    (index_not_json, "model.safetensors.index.json: not JSON: .*"),
    (index_without_map, "model.safetensors.index.json: has no weight_map"),
    (duplicate_tensor, f"{SECOND}: model.layers.0.mlp.up_proj.weight: also in {FIRST}"),
    (config_not_json, "config.json: not JSON: .*"),
    (
        not_finite,
        f"{SECOND}: model.layers.4.mlp.up_proj.weight: 3 of 65,536 values are NaN or infinite; "
        f"repair the checkpoint, or leave it unquantized with --exclude",
    ),
    (
        float64_config,
        "config.json: float64 is not a dtype that can be packed; give --dtype bfloat16, float16, "
        "float32",
    ),
    (
        float64_weight,
        f"{SECOND}: model.layers.4.mlp.up_proj.weight: float64 cannot be packed; say what to cast "
        f"it to: "
        "--dtype bfloat16, float16, float32",
    ),
    (
        already_quantized,
        ".*already quantized: quant_method aqlm; give the checkpoint that it was made from: a "
        "codebook of its own",
    ),
]


@pytest.mark.parametrize(
    ("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES]
)
def test_a_damaged_source_is_refused(tmp_path, damage, message):
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
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


def test_one_shard_of_several_is_refused(tmp_path):
    source = write_source(tmp_path / "source")
    line = refused(quantize(source / FIRST, tmp_path / "out"))
    assert line.endswith(
        "one shard of those that model.safetensors.index.json lists; give the folder"
    )


def test_an_output_folder_with_something_in_it_is_refused_and_left_alone(tmp_path):
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("irreplaceable")
    assert (
        refused(quantize(source, out))
        == f"{out}: exists and is not empty; choose another folder, or --overwrite"
    )
    line = refused(quantize(source, out, "--overwrite"))
    assert line == f"{out}: does not look like a checkpoint, so --overwrite will not delete it"
    assert contents(out) == {"thesis.txt": b"irreplaceable"}


def test_an_output_that_is_a_file_is_refused(tmp_path):
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    out.write_text("")
    assert refused(quantize(source, out)) == f"{out}: exists and is not a folder"


@pytest.mark.parametrize("place", [".", "inside/deeper", ".."], ids=["equal", "inside", "around"])
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=["", "overwrite"])
def test_an_output_folder_that_meets_the_source_is_refused(tmp_path, place, overwrite):
    source = write_source(tmp_path / "source")
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


def test_a_symbolic_link_to_the_source_is_seen_through(tmp_path):
    source = write_source(tmp_path / "source")
    (tmp_path / "link").symlink_to(source)
    assert "is inside the source folder" in refused(quantize(source, tmp_path / "link" / "out"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            ["--blocksize", "100"],
            "--blocksize 100: expected one of 32, 64, 128, 256, 512, 1024, 2048, 4096",
        ),
        (
            ["--device", "gpu"],
            "--device gpu: expected auto, cpu, cuda or cuda:N (cuda is an NVIDIA GPU; "
            "anywhere else, cpu is the one)",
        ),
        (
            ["--include", "*norm*"],
            "no tensor of this checkpoint would be packed; --dry-run shows why each is kept",
        ),
    ],
    ids=["blocksize", "device", "nothing left"],
)
def test_options_that_cannot_be_met_are_refused(tmp_path, option, message):
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    result = run("quantize", source, out, "--device", "cpu", *option)
    assert refused(result).endswith(message)
    assert not (out / "config.json").exists()


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


def test_more_threads_than_any_machine_runs_are_refused(tmp_path):
    result = quantize(tmp_path, tmp_path / "out", "--workers", 10**8)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(
        "Error: --workers 100000000: expected a whole number from 0 to 1024"
    )


def test_a_dry_run_shows_why_nothing_would_be_packed(tmp_path):
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
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


def test_a_checkpoint_of_empty_tensors(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    save_file({"a.weight": torch.zeros(0, 64)}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llama"}')
    assert quantize(source, tmp_path / "out", "--dry-run").exit_code == 0
    assert "no tensor of this checkpoint would be packed" in refused(
        quantize(source, tmp_path / "out")
    )
