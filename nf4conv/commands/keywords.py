"""Lets functions take options as keywords: which ones, for type checkers, and what each means.

Each `TypedDict` repeats the fields of option classes. tests/cli/test_keywords.py holds it to them.
"""

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Final, TypedDict, TypeVar

from nf4conv.choices import (
    Blocksize,
    CalibrateOutput,
    Dtype,
    LoraExperts,
    Moe,
    QuantStorage,
    QuantType,
    Scales,
)

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_COLUMNS: Final = 100


class Place(TypedDict, total=False):
    """Names the fields of SourceOptions but `stream`."""

    revision: str | None
    token: str | None
    cache_dir: Path | None
    local_files_only: bool
    subfolder: str | None
    variant: str | None
    gguf_file: str | None
    mmproj: str | None
    config_from: str | None


class StreamedPlace(Place, total=False):
    """Names the fields of SourceOptions."""

    stream: bool


class Machine(TypedDict, total=False):
    """Names the fields of RunOptions for a command that reads weights."""

    device: str
    workers: int
    buffer_size: int


class WritingMachine(Machine, total=False):
    """Names the fields of RunOptions for a command that writes a checkpoint."""

    overwrite: bool
    checksum: bool
    part: str | None
    ray: bool


class Quantizing(WritingMachine, StreamedPlace, total=False):
    """Names the keywords of `quantize`: QuantizeOptions, RunOptions, SourceOptions, PushOptions."""

    quant_type: QuantType | None
    blocksize: Blocksize | None
    double_quant: bool | None
    compute_dtype: Dtype | None
    dtype: Dtype | None
    include: tuple[str, ...] | list[str]
    exclude: tuple[str, ...] | list[str]
    moe: Moe | None
    max_shard_size: int
    lora: tuple[str, ...] | list[str]
    lora_experts: LoraExperts | None
    single_file: bool
    quant_storage: QuantStorage | None
    base_model: str | None
    scales: Scales | None
    calibrate: tuple[str, ...] | list[str]
    calibrate_output: CalibrateOutput | None
    calibration_tokens: int | None
    calibration_seed: int | None
    calibration_memory: int | None
    verify: bool
    tolerance: float | None
    push_to_hub: str | None
    public: bool
    create_pr: bool


class Dequantizing(WritingMachine, StreamedPlace, total=False):
    """Names the keywords of `dequantize`: DequantizeOptions, RunOptions, SourceOptions."""

    dtype: Dtype | None
    include: tuple[str, ...] | list[str]
    exclude: tuple[str, ...] | list[str]
    max_shard_size: int
    lora: tuple[str, ...] | list[str]
    lora_experts: LoraExperts | None


class Verifying(Machine, Place, total=False):
    """Names the keywords of `verify`: VerifyOptions, RunOptions, SourceOptions."""

    tolerance: float | None
    exact: bool
    lora: tuple[str, ...] | list[str]
    lora_experts: LoraExperts | None


class Comparing(Machine, Place, total=False):
    """Names the keywords of `compare`: CompareOptions, RunOptions, SourceOptions."""

    tolerance: float | None
    include: tuple[str, ...] | list[str]
    exclude: tuple[str, ...] | list[str]


def takes(keywords: type[Any], *kinds: type[Any]) -> Callable[[FunctionT], FunctionT]:
    """Describes the keywords that a function takes, in its signature and in its docstring.

    Args:
        keywords: a TypedDict, whose keys the function takes as `**options`.
        kinds: the option classes that have these fields. The first that has a field explains it.

    Returns:
        A decorator.
    """
    taken: dict[str, Field[Any]] = {}
    meanings: dict[str, str] = {}
    for kind in kinds:
        described = attributes(kind)
        for field in fields(kind):
            if field.name in keywords.__annotations__ and field.name not in taken:
                taken[field.name] = field
                meanings[field.name] = described.get(field.name, "")  # none with python -OO

    def describe(function: FunctionT) -> FunctionT:
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[:-1]
        parameters += [_parameter(field) for field in taken.values()]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=parameters
        )
        function.__doc__ = _with_arguments(inspect.cleandoc(function.__doc__ or ""), meanings)
        return function

    return describe


def _parameter(field: Field[Any]) -> inspect.Parameter:
    assert field.default is not MISSING
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default)


def _with_arguments(docstring: str, meanings: dict[str, str]) -> str:
    """Puts what each keyword means at the end of the section Args of a docstring."""
    above, args, below = docstring.partition("\nArgs:\n")
    own, gap, rest = below.partition("\n\n")
    return f"{above}{args}{own}\n{chr(10).join(_entries(meanings))}{gap}{rest}"


def _entries(meanings: dict[str, str]) -> Iterator[str]:
    """Yields an entry of a docstring for each name, wrapped and indented."""
    for name, meaning in meanings.items():
        yield textwrap.fill(
            f"{name}: {meaning}",
            _COLUMNS,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_long_words=False,
            break_on_hyphens=False,
        )


def check_keywords(function: Callable[..., Any], given: Mapping[str, object]) -> None:
    """Refuses a keyword that a function does not take, with the one that was meant perhaps.

    Raises:
        TypeError: as for every function of Python.
    """
    known = inspect.signature(function).parameters
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}")


def attributes(kind: type[Any]) -> dict[str, str]:
    """Returns what the docstrings of a class and of its bases say of each field, in one line each.

    The section is in Google style: "name: text." for each field, with more lines indented below it.
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        section = inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")[2]
        name = ""
        for line in section.splitlines():
            entry = re.fullmatch(r" {4}(\w+): (.*)", line)
            if entry is not None:
                name = entry[1]
                found[name] = entry[2]
            elif line.startswith(" " * 8):
                found[name] += f" {line.strip()}"
            elif line:
                break  # the section has ended
    return found
