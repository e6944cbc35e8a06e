"""dequantize at the scale of Kimi K2.6 in the number of tensors and files, killed and resumed."""

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from kimi import Kimi
from safetensors import safe_open

PROGRAM = """
import re, resource, sys
from nf4conv.cli.main import main
main(sys.argv[1:], standalone_mode=False)
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())
used = resource.getrusage(resource.RUSAGE_SELF)
print("used", used.ru_utime + used.ru_stime, peak[1] if peak else 0, file=sys.stderr)
"""

SMALL = {
    "width": 64, "inner": 64, "words": 256, "ranks": (32, 16, 16), "heads": (128, 128),
}  # fmt: skip


def command(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(what: str, *arguments: object) -> str:
    """Runs a command to its end, prints what it took, and returns what it printed."""
    started = time.perf_counter()
    process = command(*arguments)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    used = re.search(r"^used (.*) (.*)$", errors, re.MULTILINE)
    assert used is not None
    seconds = time.perf_counter() - started
    memory = int(used[2]) // 1000
    print(f"{what}: {seconds:.1f} s, {float(used[1]):.1f} s of processor, {memory} MB")
    return output


def digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def decoded(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Decodes INT4 as the release describes it: (nibble - 8) times a scale for 32 columns."""
    codes = torch.stack([(packed >> shift) & 15 for shift in range(0, 32, 4)], dim=-1)
    return (codes.flatten(1) - 8).to(scale.dtype) * scale.repeat_interleave(32, dim=1)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(Kimi(layers=3, experts=12, files=5, **SMALL), id="small"),
        pytest.param(Kimi(**SMALL), id="208,093 tensors", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_killed_ends_in_the_same_bytes(tmp_path: Path, sizes: Kimi):
    source, whole, out = (tmp_path / name for name in ("source", "whole", "out"))
    source.mkdir()
    count = sizes.write(source, has_data=True)
    planned = json.loads(run("plan", "dequantize", source, whole, "--dry-run", "--json"))
    size = planned["totals"]["bytes_after"] // sizes.files
    options = ("--max-shard-size", f"{size // 1000}kB", "--device", "cpu")
    planned = json.loads(run("plan", "dequantize", source, whole, *options, "--dry-run", "--json"))
    run(f"{count:,} tensors", "dequantize", source, whole, *options)
    written = list(whole.glob("*.safetensors"))
    assert sizes.files - 2 <= len(written) <= sizes.files + 2
    assert sum(path.stat().st_size for path in written) == planned["totals"]["bytes_after"]

    process = command("dequantize", source, out, *options)
    records = out / ".nf4conv/shards"
    while process.poll() is None and not any(records.glob("*")):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    left = len(list(records.glob("*")))
    assert 0 < left < len(written)
    assert not (out / "config.json").exists()
    run(f"resumed, {left} of {len(written)} files kept", "dequantize", source, out, *options)
    assert digests(out) == digests(whole)

    layer = sizes.layers - 1
    name = f"language_model.model.layers.{layer}.mlp.experts.{sizes.experts - 1}.up_proj.weight"
    packed, scale, weight = (
        tensor_of(folder, found)
        for folder, found in ((source, f"{name}_packed"), (source, f"{name}_scale"), (whole, name))
    )
    assert torch.equal(weight, decoded(packed, scale))
    if count < 200_000:  # test_parts.py has parts of small checkpoints
        return
    parts = tmp_path / "parts"
    for number in (2, 3, 1):
        run(f"part {number}", "dequantize", source, parts, *options, "--part", f"{number}/3")
    assert digests(parts) == digests(whole)


def tensor_of(folder: Path, name: str) -> torch.Tensor:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    with safe_open(folder / index["weight_map"][name], "pt") as file:
        return file.get_tensor(name)
