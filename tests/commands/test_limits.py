"""Limits: the memory and open files that a hostile source can take, and where results may go."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from four_bit import CONFIG
from hostile import STATE, UP, command, packed, refused, strict_and_in_no_time  # noqa: F401
from safetensors.torch import save_file

# --- memory ---------------------------------------------------------------------------------------


def measured(*arguments: object) -> tuple[int, str, float]:
    """Exit code, stderr, and the peak of resident memory in megabytes, of a command in a process of
    its own.
    """
    program = (
        "import sys\nfrom nf4conv.cli import main\n"
        "from nf4conv.system.machine import peak_resident\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n    print(peak_resident(), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    *lines, peak = done.stderr.splitlines()
    return done.returncode, "\n".join(lines), int(peak) / 1e6


def write_sparse(folder: Path, sizes: dict[str, int]) -> Path:
    """A checkpoint of U8 tensors that are holes."""
    table, position = {}, 0
    for name, size in sizes.items():
        table[name] = {"dtype": "U8", "shape": [size], "data_offsets": [position, position + size]}
        position += size
    header = json.dumps(table).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + position)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize("name", ["quantize", "dequantize", "verify", "inspect"])
def test_a_quant_state_of_gigabytes_is_not_read(tmp_path: Path, name: str):
    source = write_sparse(
        tmp_path / "source",
        {
            UP: 8,
            f"{UP}.absmax": 4,
            f"{UP}.quant_map": 64,
            f"{UP}.nested_absmax": 4,
            f"{UP}.nested_quant_map": 1024,
            STATE: 3 * 2**30,
        },
    )
    arguments = {"verify": [source], "inspect": [source]}
    code, errors, peak = measured(name, *arguments.get(name, [source, tmp_path / "out"]))
    assert code == {"verify": 1, "inspect": 0}.get(name, 2)
    if code == 2:
        assert errors.endswith("3,221,225,472 bytes of U8 are no quant state")
    assert peak < 600  # of which torch takes most


@pytest.mark.parametrize(
    "names",
    [["config.json"], ["model.safetensors.index.json"], ["README.md"]],
    ids=" and ".join,
)
def test_descriptions_of_gigabytes_are_not_read(source: Path, tmp_path: Path, names: list[str]):
    for name in names:
        with (source / name).open("ab") as file:
            file.truncate(3 * 2**30)
    code, errors, peak = measured("quantize", source, tmp_path / "out", "--dry-run")
    assert peak < 1000  # with transformers, which a dry run asks
    if names != ["README.md"]:
        assert code == 2
        assert "3,221,225,472 bytes; expected at most" in errors


# --- file descriptors -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quantize", "verify", "alike"])
def test_more_shards_than_files_may_be_open(tmp_path: Path, name: str):
    """400 shards where macOS allows 256 files."""
    weight_map, source = {}, tmp_path / "source"
    source.mkdir()
    for number in range(400):
        names = {f"model.layers.{number}.mlp.up_proj.weight": torch.ones(32, 32).bfloat16()}
        save_file(names, source / f"model-{number:05d}.safetensors")
        weight_map |= dict.fromkeys(names, f"model-{number:05d}.safetensors")
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (source / "config.json").write_text(json.dumps(CONFIG))
    out = tmp_path / "out"
    arguments = {
        "quantize": [source, out],
        "verify": [out, "--source", source],
        "alike": [source, "--source", source, "--exact"],
    }
    if name == "verify":
        assert command("quantize", source, out).exit_code == 0
    words = [
        sys.executable,
        "-m",
        "nf4conv",
        "quantize" if name == "quantize" else "verify",
        *map(str, arguments[name]),
        "--device",
        "cpu",
        "-q",
    ]
    limits = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))  # noqa: E731
    done = subprocess.run(words, preexec_fn=limits, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
