"""Declares what a case of the fuzzing target is, and writes the results, adapters and runnable
models that it mutates; checkpoints are those of golden/inputs.py.
"""

import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from click.testing import CliRunner
from inputs import SOURCES

from nf4conv.cli import main as command_line
from nf4conv.output.folder import OutputFolder
from nf4conv.sources.unfinished import is_model

PART_OPTIONS = ("--max-shard-size", "60kB")


def run(*arguments: object) -> Any:
    """Runs a command in this process; with few threads, if it takes such options."""
    words = [str(argument) for argument in arguments]
    if words[0] != "inspect":
        words += ["--device", "cpu"]
    if words[0] not in ("inspect", "evaluate"):
        words += ["--workers", "1"]
    return CliRunner().invoke(command_line, words, catch_exceptions=False)


def done(*arguments: object) -> None:
    """Runs a command that must succeed."""
    finished = run(*arguments)
    assert finished.exit_code == 0, finished.output


Judge = Callable[[Any], str | None]
"""Says what is wrong with how a command ended; None if nothing is."""


@dataclass(frozen=True)
class Case:
    """A command on something that was mutated.

    Attributes:
        words: the command.
        out: the folder that it may change, and nothing else.
        judge: looks at its result.
        may_be_whole: True if a model may be in `out` although the command fails.
    """

    words: list[object]
    out: Path
    judge: Judge = lambda _: None
    may_be_whole: bool = False


@dataclass(frozen=True)
class Kind:
    """A kind of mutated input.

    Attributes:
        write: writes what is mutated, before it is.
        make: mutates a copy, by (random numbers, what was written, an empty folder to work in).
    """

    write: Callable[[Path], object]
    make: Callable[[random.Random, Path, Path], Case]


def passes_verify(words: list[object], out: Path, finished: Any) -> str | None:
    """Returns what is wrong with a result by our own verify."""
    if finished.exit_code or not is_model(out):
        return None
    if words[0] == "quantize":
        checked = run("verify", out)
        is_found_again = "already complete, nothing was done" in finished.output
        if is_found_again and set(re.findall(r"FAIL +(\w+)", checked.output)) == {"scales"}:
            return None  # a run that finds its result looks at how it is stored, not at values
    elif words[0] == "dequantize":
        checked = run("verify", out, "--source", words[1], "--exact", *words[3:])
    else:
        return None
    return f"verify: {checked.output}" if checked.exit_code else None


def is_same(path: Path, other: Path) -> bool:
    if not path.is_file() or not other.is_file():
        return False
    return path.stat().st_size == other.stat().st_size and path.read_bytes() == other.read_bytes()


def own(folder: Path) -> None:
    """Writes a result, and its source as the sub-folder `original`."""
    source = folder.with_name("own source")
    SOURCES["plain"](source)
    done("quantize", source, folder)
    source.rename(folder / "original")


def adapter(folder: Path) -> None:
    """Writes a model as `base`, and as `adapter` one that changes modules and replaces a norm."""
    SOURCES["coarse"](folder / "base")
    SOURCES["adapter"](folder / "adapter")


def adapter_of_experts(folder: Path) -> None:
    """Writes a mixture as `base`, and as `adapter` one that changes its fused experts."""
    SOURCES["coarse mixture"](folder / "base")
    SOURCES["adapter of experts"](folder / "adapter")


# --- results, whole and unfinished ----------------------------------------------------------------


def finished(folder: Path) -> None:
    """Writes a `source`, and as `out` what was made of it."""
    folder.mkdir()
    SOURCES["plain"](folder / "source")
    done("quantize", folder / "source", folder / "out", *PART_OPTIONS)
    shutil.copytree(folder / "out", folder / "expected")


def packed_experts(folder: Path) -> None:
    folder.mkdir()
    SOURCES["coarse mixture"](folder / "source")
    done("quantize", folder / "source", folder / "out", *PART_OPTIONS, "--moe", "packed")
    shutil.copytree(folder / "out", folder / "expected")


def unfinished(folder: Path) -> None:
    """Writes a `source`, what two parts made of it, and a run that ended before its last files."""
    finished(folder)
    shutil.rmtree(folder / "out")
    parts = ("quantize", folder / "source", folder / "parts", *PART_OPTIONS, "--part")
    done(*parts, "1/2")
    complete = OutputFolder.complete

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    OutputFolder.complete = stop  # type: ignore[method-assign,assignment]
    run(*parts, "2/2")
    run("quantize", folder / "source", folder / "interrupted", *PART_OPTIONS)
    OutputFolder.complete = complete  # type: ignore[method-assign]
    assert (folder / "interrupted/.nf4conv/run.json").is_file()
    assert not (folder / "interrupted/config.json").exists()


# --- models that run ------------------------------------------------------------------------------


def runnable(folder: Path) -> None:
    """Writes a `source` that transformers can run, what was made of it, and token ids."""
    folder.mkdir()
    settings = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(settings).bfloat16()
    model.save_pretrained(folder / "source")
    np.save(folder / "source/ids.npy", np.arange(256, dtype=np.int32) * 37 % 96)
    done("quantize", folder / "source", folder / "out")
