"""Memory follows --buffer-size, not the checkpoint: the real commands on checkpoints larger than
what they may hold.
"""

import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SMALL, LARGE = 3, 17
"""Weights of 16.8 MB, each several pieces long."""

FACTORS = (("A", 4, 8192), ("B", 1024, 4))

LIVE = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}
"""Makes glibc give back every large block at once, so that peaks are what is alive: they repeat to
within 2 MB, where by default the allocator keeps some 50 MB, now more, now less.
"""

# prints the peak after whatever the command prints
PROGRAM = """
import sys
from pathlib import Path
from nf4conv.cli import main
from nf4conv.run.loop import _peak_resident
try:
    main(sys.argv[1:])
finally:
    print(_peak_resident(), file=sys.stderr)
"""


def write_source(folder: Path, weights: int) -> Path:
    """A checkpoint of zeros, which take no room on the disk."""
    folder.mkdir()
    names = [f"model.layers.{number}.mlp.up_proj" for number in range(weights)]
    write_zeros(folder / "model.safetensors", {f"{name}.weight": (1024, 8192) for name in names})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def write_adapter(folder: Path, weights: int) -> Path:
    """LoRA of rank 4 for each of those weights, 74 kB."""
    folder.mkdir()
    names = [f"base_model.model.model.layers.{number}.mlp.up_proj" for number in range(weights)]
    shapes = {
        f"{name}.lora_{part}.weight": (rows, columns)
        for name in names
        for part, rows, columns in FACTORS
    }
    write_zeros(folder / "adapter_model.safetensors", shapes)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    return folder


def write_zeros(file: Path, shapes: dict[str, tuple[int, int]]) -> None:
    table, stop = {}, 0
    for name, shape in shapes.items():
        start, stop = stop, stop + 2 * math.prod(shape)
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
    header = json.dumps(table).encode()
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(8 + len(header) + stop)


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    options = ["--device", "cpu", "--workers", "2"]
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments), *options]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, **environment}
    )


def peak(*arguments: object) -> float:
    """The most megabytes that a command had in use."""
    return int(run(*arguments, "--buffer-size", "8MB", "--quiet", **LIVE).stderr) / 1e6


@pytest.fixture(scope="module")
def growths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """For each command: how many more megabytes the large checkpoint takes than the small one."""
    folders = [tmp_path_factory.mktemp("small"), tmp_path_factory.mktemp("large")]
    with (
        ThreadPoolExecutor() as pool
    ):  # much of the time is that of importing torch, which uses one core
        small, large = pool.map(peaks, folders, (SMALL, LARGE))
    print(small, large)
    return {command: large[command] - small[command] for command in small}


def peaks(folder: Path, weights: int) -> dict[str, float]:
    """Megabytes, by command."""
    source, packed, plain = (
        write_source(folder / "source", weights),
        folder / "packed",
        folder / "plain",
    )
    lora = ["--lora", write_adapter(folder / "adapter", weights), "--max-shard-size", "100GB"]
    # most scales for the weights, and one shard, until whose end all that its tasks hold is kept
    options = ["--blocksize", 32, "--max-shard-size", "100GB"]
    return {
        "quantize": peak("quantize", source, packed, *options),
        "verify": peak("verify", packed, "--source", source),
        "dequantize": peak("dequantize", packed, plain, "--max-shard-size", "100GB"),
        "compare": peak("compare", packed, source, "--tolerance", 1),
        "merge": peak("dequantize", source, folder / "merged", *lora),
        "merge into 4 bits": peak("dequantize", packed, folder / "from_4_bits", *lora),
    }


@pytest.mark.parametrize(
    "command", ["quantize", "verify", "dequantize", "compare", "merge", "merge into 4 bits"]
)
def test_nothing_is_kept_of_what_is_done(growths, command):
    """Of 235 MB more weights the absmax alone are 14.7 MB; an adapter, which is kept, has 1 MB
    more.
    """
    assert growths[command] < 9


# bounds on the growth: buffers, packed pieces, and the codec's scratch for each worker; measured:
# 70, 170 and 22 MB
@pytest.mark.parametrize(
    ("command", "buffer_size", "megabytes"),
    [("quantize", "8MB", 150), ("quantize", "64MB", 250), ("dequantize", "8MB", 60)],
)
def test_the_bound_is_the_option_s(tmp_path, command, buffer_size, megabytes):
    source = write_source(tmp_path / "source", LARGE)
    if command == "dequantize":
        run("quantize", source, tmp_path / "packed", "--quiet")
        source = tmp_path / "packed"
    done = run(command, source, tmp_path / "out", "--buffer-size", buffer_size, "--json", "--quiet")
    report = json.loads(done.stdout)
    growth = (report["host_peak_bytes"] - report["host_baseline_bytes"]) / 1e6
    print(f"{command}, {buffer_size}: {growth:.0f} MB")
    assert growth < megabytes
