"""Declares what a case of the fuzzing target is."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz_templates import run

from nf4conv.sources.unfinished import is_model

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
    elif words[0] == "dequantize":
        checked = run("verify", out, "--source", words[1], "--exact", *words[3:])
    else:
        return None
    return f"verify: {checked.output}" if checked.exit_code else None


def is_same(path: Path, other: Path) -> bool:
    if not path.is_file() or not other.is_file():
        return False
    return path.stat().st_size == other.stat().st_size and path.read_bytes() == other.read_bytes()
