"""Parses, validates and builds the header of a safetensors file.

A file is 8 bytes N (little endian), N bytes of JSON and the data:

    {"__metadata__": {"format": "pt"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0,
    24]}, …}

Offsets count from the end of the JSON; tensors must cover the data without holes or overlap; the
JSON may be padded with spaces (https://github.com/huggingface/safetensors#format).
"""

import json
import math
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias

from nf4conv.errors import SourceError
from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.sources.reader import FileBytes, bytes_of
from nf4conv.sources.tensors import TensorInfo

LENGTH_BYTES: Final = 8
LONGEST_HEADER: Final = 100_000_000  # safetensors' own limit

METADATA_KEY: Final = "__metadata__"

MOST_TENSORS: Final = 1_000_000
"""Most tensors of a checkpoint: more than the largest one has, and what memory can bear."""

MOST_DIMENSIONS: Final = 64  # as torch
LARGEST_SIZE: Final = 2**63  # sizes of tensors are int64 everywhere

_Known: TypeAlias = dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], int]]
"""The shape of tensors of a dtype and a shape, so that memory holds it once, and their bytes."""

_POINTER: Final = b"version https://git-lfs"
"""How a file of git-lfs begins that has not been fetched."""

_HEAD: Final = 2**17  # bytes that are read first; most headers are shorter
_LONGEST_NAME: Final = 1000  # characters
_MOST_DOTS: Final = 64
"""The most dots of a name. It is several times what models have.

Names are divided at their dots, so many dots would take much memory.
"""


def read_header(path: Path) -> tuple[TensorInfo, ...]:
    """Returns the tensors of a safetensors file, in the order of their bytes."""
    return read_header_with_metadata(path)[0]


def read_header_with_metadata(path: Path) -> tuple[tuple[TensorInfo, ...], object]:
    """Returns the tensors of a safetensors file, and its metadata; None if it has none."""
    with bytes_of(path) as file:
        raw = header_json(path, file)
    return parse_header(raw, path, file.size)


def header_json(path: Path, file: FileBytes) -> bytes:
    """Reads the JSON of the header of a safetensors file."""
    size = file.size
    head = file.read(0, min(_HEAD, size))
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if head.startswith(_POINTER[: len(head)]) and len(head) >= LENGTH_BYTES:
        raise SourceError(
            f"{path}: a git-lfs pointer, not the file that it stands for; run `git lfs pull` in "
            f"that folder",
            path=path,
        )
    if length > min(size - LENGTH_BYTES, LONGEST_HEADER):
        raise SourceError(
            f"{path}: claims a header of {length:,} bytes, and the file has {size:,}; it is no "
            f"safetensors file, or the download is incomplete",
            path=path,
        )
    stop = LENGTH_BYTES + length
    if stop > len(head):
        head += file.read(len(head), stop)
    return head[LENGTH_BYTES:stop]


def parse_header(raw: bytes, path: Path, size: int) -> tuple[tuple[TensorInfo, ...], object]:
    """Returns the tensors that a header describes, in the order of their bytes, and the file's
    metadata, None if it has none; `raw` is the header's JSON.

    Raises a SourceError if that is no JSON, or has an unknown dtype, an impossible shape, or
    offsets that overlap, leave holes or reach beyond the file.
    """
    try:
        # if a name is given twice, one entry is lost, and its bytes then belong to no tensor
        table = json.loads(raw)
        if not isinstance(table, dict):
            raise SourceError(f"{path}: the safetensors header is not a JSON object", path=path)
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are both ValueErrors
        raise SourceError(
            f"{path}: the safetensors header is malformed: {error}", path=path
        ) from error
    metadata = table.pop(METADATA_KEY, None)
    data_start = LENGTH_BYTES + len(raw)
    known: _Known = {}
    tensors = [_parse_entry(path, name, table.pop(name), data_start, known) for name in [*table]]
    tensors.sort(key=attrgetter("start", "stop"))
    _check_coverage(path, tensors, data_start, size)
    return tuple(tensors), metadata


def check_name(path: Path, name: str) -> None:
    """Raises a SourceError for a name that no tensor of a model can have.

    Such a name is too long, has too many dots, or could not be written into a header.
    """
    if not name.isascii() and any("\ud800" <= char <= "\udfff" for char in name):
        raise SourceError(
            f"{path}: {name[:50]}: a name with half a character, which no header can hold",
            path=path,
        )
    dots = name.count(".")
    if len(name) > _LONGEST_NAME or dots > _MOST_DOTS:
        brief = f"{name[:50]}…"
        raise SourceError(
            f"{path}: {brief}: a name of {len(name):,} characters and {dots:,} dots; "
            f"expected at most {_LONGEST_NAME:,} and {_MOST_DOTS}",
            path=path,
        )


def _parse_entry(path: Path, name: str, entry: Any, data_start: int, known: _Known) -> TensorInfo:
    """Returns the tensor that an entry describes; raises a SourceError if it describes none."""
    check_name(path, name)
    try:
        dtype = entry["dtype"]
        shape = tuple(entry["shape"])
        start, stop = entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise SourceError.about(
            path, name, "the header entry lacks dtype, shape or two data_offsets"
        ) from error
    try:
        shape, size = known[dtype, shape]
    except (KeyError, TypeError):  # a list as a dtype cannot be a key
        size = _bytes_of(path, name, dtype, shape)
        known[dtype, shape] = shape, size
    are_ints = type(start) is type(stop) is int
    if not are_ints or not 0 <= start <= stop < LARGEST_SIZE:
        raise SourceError.about(path, name, f"{_brief([start, stop])} are not data offsets")
    if stop - start != size:
        raise SourceError.about(
            path, name, f"{stop - start:,} bytes, expected {size:,} for {list(shape)} {dtype}"
        )
    return TensorInfo(name, dtype, shape, path, data_start + start, data_start + stop)


def _bytes_of(path: Path, name: str, dtype: Any, shape: tuple[Any, ...]) -> int:
    """Returns how many bytes a tensor takes; raises a SourceError if there is none of the kind."""
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise SourceError.about(
            path, name, f"unknown dtype {_brief(dtype)}; a newer nf4conv may know it"
        )
    # bool is a subclass of int, and a shape of [true] would pass for [1]
    are_sizes = all(type(size) is int and 0 <= size < LARGEST_SIZE for size in shape)
    if not are_sizes or len(shape) > MOST_DIMENSIONS:
        raise SourceError.about(path, name, f"{_brief(list(shape))} is not a shape")
    size: int = math.prod(shape) * bits
    if size % 8:
        raise SourceError.about(path, name, f"{list(shape)} {dtype} ends inside a byte")
    return size // 8


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def _check_coverage(path: Path, tensors: list[TensorInfo], data_start: int, size: int) -> None:
    """Raises a SourceError unless tensors, in the order of their bytes, cover the data exactly."""
    position = data_start
    previous = "the header"
    for tensor in tensors:
        if tensor.start < position:
            raise SourceError.about(path, tensor.name, f"its bytes overlap those of {previous}")
        if tensor.start > position:
            raise SourceError.about(
                path, tensor.name, f"{tensor.start - position:,} unused bytes before it"
            )
        position = tensor.stop
        previous = tensor.name
    if position > size:
        raise SourceError(
            f"{path}: {previous}: the file ends {position - size:,} bytes early; the download is "
            f"incomplete",
            path=path,
        )
    if position < size:
        raise SourceError(
            f"{path}: {size - position:,} bytes after the last tensor belong to none", path=path
        )


def build_header(
    entries: Iterable[tuple[str, str, tuple[int, ...], int, int]],
    reserve: int = 0,
) -> bytes:
    """Returns the first bytes of a safetensors file: the length of the header, and the header.

    Entries are (name, dtype, shape, start, stop), in bytes from the end of the header. It has at
    least `reserve` bytes, padded with spaces.
    """
    table: dict[str, object] = {METADATA_KEY: {"format": "pt"}}
    for name, dtype, shape, start, stop in entries:
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, stop)}
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    total = max(reserve, LENGTH_BYTES + len(raw))
    total += -total % 8  # the data starts aligned, so that a loader can map it
    length = total - LENGTH_BYTES
    return length.to_bytes(LENGTH_BYTES, "little") + raw.ljust(length)
