"""Memory follows buffer_size, not the checkpoint. The real functions read checkpoints that are
larger than what they may hold.
"""

import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

# numbers of weights; each has 16.8 MB, which are several pieces
SMALL = 3
LARGE = 17

# factors of an adapter: name, rows, columns
FACTORS = (("A", 4, 8192), ("B", 1024, 4))

# These settings make glibc give back every large block at once, so a peak is what is alive, and
# repeats to within 2 MB. By default the allocator keeps some 50 MB, now more, now less.
LIVE = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}

# calls each function of a JSON list in a fork, which has torch already, and prints the peaks
PROGRAM = """
import json
import os
import sys
import torch
import nf4conv
from nf4conv.system.machine import peak_resident

peaks = []
for name, places, options in json.loads(sys.argv[1]):
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        status = 3
        try:
            getattr(nf4conv, name)(*places, device="cpu", **options)
            status = 0
        except nf4conv.Nf4convError as error:
            print(error)
        os.write(sending, str(peak_resident()).encode())
        os._exit(status)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"{name} {places} {options}: status {status}")
    peaks.append(int(os.read(receiving, 100)))
print(json.dumps(peaks))
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


OPTIONS = {"workers": 2, "buffer_size": 8 * 10**6}


@dataclass(frozen=True)
class Made:
    """The results that the commands made of one checkpoint.

    Attributes:
        source: the checkpoint.
        packed: it in 4 bits.
        peaks: the most megabytes that each command had in use.
    """

    source: Path
    packed: Path
    peaks: dict[str, float]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Made]:
    """Runs the commands on the small checkpoint and on the large one."""
    return run_on_both(tmp_path_factory)


def run_on_both(tmp_path_factory: pytest.TempPathFactory) -> list[Made]:
    """Runs the commands on the small checkpoint and, at the same time, on the large one."""
    folders = [tmp_path_factory.mktemp("small"), tmp_path_factory.mktemp("large")]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(run_commands, folders, (SMALL, LARGE)))
    for one in found:
        print(one.peaks)
    return found


def run_commands(folder: Path, weights: int) -> Made:
    source = write_source(folder / "source", weights)
    packed = folder / "packed"
    # one shard, until whose end all that its tasks hold is kept, and most scales for the weights
    one_shard = {"max_shard_size": 10**11}
    lora = {"lora": [str(write_adapter(folder / "adapter", weights))], **one_shard}
    commands = {
        "quantize": ("quantize", [source, packed], {"blocksize": 32, **one_shard}),
        "verify": ("verify", [packed], {"source": str(source)}),
        "dequantize": ("dequantize", [packed, folder / "plain"], one_shard),
        "verify decoded": ("verify", [folder / "plain"], {"source": str(packed)}),
        "merge": ("dequantize", [source, folder / "merged"], lora),
        "merge into 4 bits": ("dequantize", [packed, folder / "from_4_bits"], lora),
    }
    calls = [
        (name, [str(place) for place in places], {**options, **OPTIONS})
        for name, places, options in commands.values()
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(calls)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **LIVE},
    )
    peaks = json.loads(done.stdout.splitlines()[-1])
    megabytes = [peak / 1e6 for peak in peaks]
    return Made(source, packed, dict(zip(commands, megabytes, strict=True)))


@pytest.mark.parametrize(
    "command", ["quantize", "verify", "dequantize", "verify decoded", "merge", "merge into 4 bits"]
)
def test_nothing_is_kept_of_what_is_done(made, command, tmp_path_factory):
    """The absmax alone of 235 MB more weights are 14.7 MB. An adapter, which is kept, has 1 MB
    more.
    """
    growth = growth_of(made, command)
    if growth >= 9:
        # On a busy machine both workers can be at their peak at once in the one run and not in the
        # other. What is kept is there in every run, so the smaller growth of two is what counts.
        growth = min(growth, growth_of(run_on_both(tmp_path_factory), command))
    assert growth < 9


def growth_of(made: list[Made], command: str) -> float:
    """Returns the megabytes that the large checkpoint takes more than the small one."""
    small, large = made
    return large.peaks[command] - small.peaks[command]


# bounds on the growth: buffers, packed pieces, and the codec's scratch for each worker; measured:
# 70, 170 and 22 MB
@pytest.mark.parametrize(
    ("command", "buffer_size", "megabytes"),
    [("quantize", 8, 150), ("quantize", 64, 250), ("dequantize", 8, 60)],
)
def test_the_bound_is_the_option_s(made, tmp_path, command, buffer_size, megabytes):
    _, large = made
    source = large.packed if command == "dequantize" else large.source
    program = (
        "import nf4conv\n"
        f"report = nf4conv.{command}({str(source)!r}, {str(tmp_path / 'out')!r}, device='cpu',\n"
        f"    workers=2, buffer_size={buffer_size * 10**6})\n"
        "print(nf4conv.to_json(report))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True
    )
    report = json.loads(done.stdout)
    growth = (report["host_peak_bytes"] - report["host_baseline_bytes"]) / 1e6
    print(f"{command}, {buffer_size} MB: {growth:.0f} MB")
    assert growth < megabytes
