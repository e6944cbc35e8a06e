"""The core of nf4conv on this system, and on one that lacks what Windows lacks.

On Linux the latter is a process in which it is hidden, see like_windows.py. CI runs this file on
Windows and macOS, too, where the bytes must be those that Linux made.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from checkpoints import contents, save_model
from click.testing import CliRunner

from nf4conv.cli import main
from nf4conv.errors import OutputError
from nf4conv.output.workspace import Workspace
from nf4conv.system import files, folders, machine, signals

LIKE_WINDOWS = Path(__file__).parents[1] / "helpers/like_windows.py"

_SUMS = (
    "8bc6f86beb17facbfda9366c89d29e37ee6fbbcf1ef65460ca7109394eac703d",
    "201a115265b66b8cd374b7f00cfc3ab3c82b88a34feb3b8e56be9e5be66e7dc3",
    "99f49db94eb8f89ad8c499641eb7afce84b728c4ebaad21f48169803b91f53ce",
    "c28af6124c0a6870a703b9e8fbbd0d9dfe54fd95c7584ef67701c11f1db266a2",
    "b07e0e4094e7125142e3a2c4e79c967d308d8ed8b2b4226038bb30db8dd19b4e",
)
SHARDS = {
    f"model-{number:05d}-of-{len(_SUMS):05d}.safetensors": sha256
    for number, sha256 in enumerate(_SUMS, start=1)
}
"""SHA-256 of the weights that `quantize` makes of `source`, as Linux made them."""


def values(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Returns bfloat16 values that are the same on every system."""
    numbers = torch.arange(rows * columns, dtype=torch.int64) * 2654435761 + seed
    return ((numbers >> 7) % 2001 - 1000).reshape(rows, columns).float().div(512).bfloat16()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of 12 linear layers, which becomes four shards."""
    folder = tmp_path / "source"
    tensors = {"model.embed_tokens.weight": values(64, 64, 1)}
    for layer in range(6):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.mlp.up_proj.weight"] = values(256, 128, layer)
        tensors[f"{prefix}.self_attn.q_proj.weight"] = values(64, 64, -layer)
        tensors[f"{prefix}.input_layernorm.weight"] = torch.ones(64).bfloat16()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    save_model(folder, tensors, config)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_bytes("---\nlicense: mit\n---\nÀ propos: 4 → 2\n".encode())
    return folder


def commands(folder: Path) -> list[list[str]]:
    """Returns the core of what nf4conv does, as command lines."""
    at = {name: str(folder / name) for name in ("source", "out", "again", "resumed", "parts")}
    quantize = ["--device", "cpu", "--max-shard-size", "40KB", "--double-quant"]
    return [
        ["--help"],
        ["quantize", "--help"],
        ["quantize", at["source"], at["out"], *quantize, "--verify"],
        ["quantize", at["source"], at["resumed"], *quantize],
        ["quantize", at["source"], at["parts"], *quantize, "--part", "1/2"],
        ["quantize", at["source"], at["parts"], *quantize, "--part", "2/2"],
        ["quantize", at["source"], at["resumed"], *quantize],  # is complete
        ["verify", at["out"], "--source", at["source"], "--device", "cpu"],
        ["inspect", at["out"]],
        ["verify", at["parts"], "--source", at["source"], "--exact", "--device", "cpu"],
        ["dequantize", at["out"], at["again"], "--device", "cpu"],
        ["dequantize", at["parts"], at["again"], "--device", "cpu", "--overwrite"],
        ["env", "--json"],
    ]


def weights(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("*.safetensors"))
    }


def results(folder: Path) -> dict[str, dict[str, bytes]]:
    """Returns all files that the commands have written, but for the times of runs in cards."""
    return {name: contents(folder / name) for name in ("out", "again", "resumed", "parts")}


def run_here(folder: Path) -> None:
    for words in commands(folder):
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, (words, result.output)


def run_hidden(folder: Path, words: list[list[str]], *more: str) -> subprocess.CompletedProcess:
    """Runs commands in a process that lacks what Windows lacks."""
    path = folder / "commands.json"
    path.write_text(json.dumps(words))
    program = [sys.executable, "-W", "ignore", str(LIKE_WINDOWS), *more, str(path)]
    return subprocess.run(program, capture_output=True, text=True, check=False)


def test_the_core_gives_these_bytes_on_this_system(tmp_path: Path, source: Path):
    run_here(tmp_path)
    assert source.is_dir()
    found = weights(tmp_path / "out")
    assert found == SHARDS
    assert weights(tmp_path / "parts") == weights(tmp_path / "resumed") == found


@pytest.mark.skipif(sys.platform != "linux", reason="hides what Linux has")
def test_the_core_gives_the_same_without_what_windows_lacks(tmp_path: Path, source: Path):
    words = commands(tmp_path)
    killed = run_hidden(tmp_path, words[3:4], "killed")
    assert killed.returncode == 9, killed.stderr
    kept = sorted(path.name for path in (tmp_path / "resumed").glob("*.safetensors"))
    assert kept
    assert not (tmp_path / "resumed" / "config.json").exists()

    done = run_hidden(tmp_path, words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = results(tmp_path)
    for name in found:
        for path in (tmp_path / name).rglob("*"):
            assert path.name != ".nf4conv", f"{path} is left"

    (tmp_path / "posix").mkdir()
    source.rename(tmp_path / "posix" / "source")
    run_here(tmp_path / "posix")
    assert found == results(tmp_path / "posix")


# --- one function at a time -----------------------------------------------------------------------


@pytest.fixture(params=["shared descriptor", "one handle"])
def kind_of_file(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "one handle":
        monkeypatch.delattr(os, "preadv", raising=False)
        monkeypatch.delattr(os, "pwrite", raising=False)
    elif not hasattr(os, "preadv"):
        pytest.skip("this system has none")
    return request.param


@pytest.mark.usefixtures("kind_of_file")
def test_threads_write_and_read_one_file_at_positions(tmp_path: Path):
    path, piece = tmp_path / "file", 4096
    content = os.urandom(64 * piece)
    writing = files.create_to_write(path)
    writing.truncate(len(content))
    starts = range(0, len(content), piece)
    barrier = threading.Barrier(8)

    def write(start: int) -> None:
        if start < 8 * piece:
            barrier.wait()
        data = memoryview(content)[start : start + piece]
        assert writing.write(data, start) == piece

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, starts))
    writing.sync()
    writing.close()
    writing.close()
    assert path.read_bytes() == content

    reading = files.open_to_read(path)

    def read(start: int) -> bytes:
        buffer = bytearray(piece)
        assert reading.read(memoryview(buffer), start) == piece
        return bytes(buffer)

    with ThreadPoolExecutor(8) as pool:
        assert b"".join(pool.map(read, starts)) == content
    tail = bytearray(piece)
    assert reading.read(memoryview(tail), len(content) - 10) == 10
    assert reading.read(memoryview(tail), len(content)) == 0
    reading.close()
    path.rename(tmp_path / "other")


@pytest.mark.usefixtures("kind_of_file")
def test_a_file_to_write_is_new(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        files.create_to_write(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_figures_of_this_machine():
    assert 2**28 < machine.total_memory() < 2**50
    assert 2**20 < machine.peak_resident() < machine.total_memory()
    assert machine.usable_cores() <= frozenset(range(4096))
    assert machine.cores_beside("no such device") == frozenset()
    machine.keep_to(machine.usable_cores())


def test_memory_is_compared():
    a, b = bytearray(b"abcdef"), bytearray(b"abcdeF")
    assert machine.is_equal(memoryview(a)[:5], memoryview(b)[:5])
    assert not machine.is_equal(memoryview(a), memoryview(b))


def test_words_for_every_signal_that_ends_a_command():
    assert set(signals.WORDS.values()) == {"interrupted", "stopped"}
    assert (signals.INTERRUPTED_EXIT, signals.STOPPED_EXIT, signals.UNREAD_EXIT) == (130, 143, 141)
    assert signals.is_unread(BrokenPipeError())
    assert not signals.is_unread(OSError(28, "No space left on device"))


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["c:a", "../a", "a/../../b", "/a"])
def test_a_name_that_leads_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(folders, "_FORBIDDEN", ":")
    with Workspace(tmp_path / "out", {}, overwrite=False) as space:
        space.require_name("unet")
        with pytest.raises(OutputError, match="such a name may lead out of the folder"):
            space.write(name, [])
