"""The safetensors header: parse, validate, build.

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
from typing import Any, Final

from nf4conv.errors import SourceError, named
from nf4conv.sources.tensors import DTYPE_BITS, TensorInfo

LENGTH_BYTES: Final = 8
LONGEST_HEADER: Final = 100_000_000  # safetensors' own limit

METADATA_KEY: Final = "__metadata__"

MOST_TENSORS: Final = (
    1_000_000  # of a checkpoint: some times what the largest has, and what memory can bear
)
_SHORT_HEADER: Final = 2**23  # bytes; a longer one describes at least as much data
MOST_DIMENSIONS: Final = 64  # as torch
_LONGEST_NAME: Final = 1000
_MOST_DOTS: Final = 64
"""Names are taken apart at their dots: several times what models have, and no more than memory can
bear.
"""
LARGEST_SIZE: Final = 2**63  # sizes of tensors are int64 everywhere


def read_header(path: Path) -> tuple[TensorInfo, ...]:
    """The tensors of a safetensors file, in the order of their bytes; the data itself is not read.

    A SourceError if the file is missing, unreadable, truncated or malformed.
    """
    with named(path, SourceError), path.open("rb") as file:
        size = path.stat().st_size
        stop = header_stop(path, file.read(LENGTH_BYTES), size)
        raw = file.read(stop - LENGTH_BYTES)
    return parse_header(raw, path, size)


def header_stop(path: Path, head: bytes, size: int) -> int:
    """Where the header of a file of so many bytes ends, told by at least the first 8, if there are
    as many.

    A SourceError if no safetensors file begins like this.
    """
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if size < LENGTH_BYTES:
        raise SourceError(
            f"{path}: {size} bytes, too short for a safetensors file; the download is incomplete"
        )
    if length > LONGEST_HEADER:
        raise SourceError(
            f"{path}: claims a header of {length:,} bytes; this is not a safetensors file"
        )
    if length > size - LENGTH_BYTES:
        raise SourceError(
            f"{path}: claims a header of {length:,} bytes but the file has only {size:,}; the "
            f"download is incomplete"
        )
    if length > max(_SHORT_HEADER, size - length):
        raise SourceError(
            f"{path}: a header of {length:,} bytes for {size - length:,} bytes of data, as no "
            f"model has"
        )
    return LENGTH_BYTES + length


def parse_header(raw: bytes, path: Path, size: int) -> tuple[TensorInfo, ...]:
    """The tensors that JSON, without the 8 length bytes, says are in a file of so many bytes; in
    the order of theirs.

    A SourceError if it is no JSON, or has an unknown dtype, an impossible shape, or offsets that
    overlap, leave holes or reach beyond the file.
    """
    try:
        table = json.loads(
            raw
        )  # of a name given twice one entry is lost, and its bytes then belong to none
        if not isinstance(table, dict):
            raise SourceError(f"{path}: the safetensors header is not a JSON object")
        "".join(table).encode()  # JSON can spell names that no header could be written with
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are both ValueErrors
        raise SourceError(f"{path}: the safetensors header is malformed: {error}") from error
    table.pop(METADATA_KEY, None)
    if len(table) > MOST_TENSORS:
        raise SourceError(f"{path}: {len(table):,} tensors; expected at most {MOST_TENSORS:,}")
    data_start = LENGTH_BYTES + len(raw)
    tensors = [_parse_entry(path, name, table.pop(name), data_start) for name in list(table)]
    tensors.sort(key=attrgetter("start", "stop"))
    _check_coverage(path, tensors, data_start, size)
    return tuple(tensors)


def check_name(path: Path, name: str) -> None:
    """Refuse by a SourceError a tensor whose name no model can have: too long, too deep, or not to
    be written.
    """
    if not name.isascii() and any("\ud800" <= char <= "\udfff" for char in name):
        raise SourceError(
            f"{path}: {name[:50]}: a name with half a character, which no header can hold"
        )
    dots = name.count(".")
    if len(name) > _LONGEST_NAME or dots > _MOST_DOTS:
        raise SourceError(
            f"{path}: {name[:50]}…: a name of {len(name):,} characters and {dots:,} dots; "
            f"expected at most {_LONGEST_NAME:,} and {_MOST_DOTS}"
        )


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    check_name(path, name)
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError) as error:
        raise SourceError(
            f"{path}: {name}: the header entry lacks dtype, shape or data_offsets"
        ) from error
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise SourceError(
            f"{path}: {name}: unknown dtype {_brief(dtype)}; a newer nf4conv may know it"
        )
    if not _are_sizes(shape):
        raise SourceError(f"{path}: {name}: {_brief(shape)} is not a shape")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise SourceError(f"{path}: {name}: {_brief(offsets)} are not data offsets")
    expected = math.prod(shape) * bits
    if expected != (offsets[1] - offsets[0]) * 8:
        raise SourceError(
            f"{path}: {name}: {offsets[1] - offsets[0]:,} bytes, expected {-(-expected // 8):,} "
            f"for {shape} {dtype}"
        )
    return TensorInfo(
        name, dtype, tuple(shape), path, data_start + offsets[0], data_start + offsets[1]
    )


def _are_sizes(values: Any) -> bool:
    if not isinstance(values, list) or len(values) > MOST_DIMENSIONS:
        return False
    for value in values:  # noqa: SIM110 - twice as fast as all(), and a checkpoint may have 100 000 short lists
        # bool is a subclass of int, and a shape of [true] would pass for [1]
        if type(value) is not int or not 0 <= value < LARGEST_SIZE:
            return False
    return True


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def _check_coverage(path: Path, tensors: list[TensorInfo], data_start: int, size: int) -> None:
    position = data_start
    previous = "the header"
    for tensor in tensors:
        if tensor.start < position:
            raise SourceError(f"{path}: {tensor.name}: its bytes overlap those of {previous}")
        if tensor.start > position:
            raise SourceError(
                f"{path}: {tensor.name}: {tensor.start - position:,} unused bytes before it"
            )
        position, previous = tensor.stop, tensor.name
    if position > size:
        raise SourceError(
            f"{path}: {previous}: the file ends {position - size:,} bytes early; the download is "
            f"incomplete"
        )
    if position < size:
        raise SourceError(f"{path}: {size - position:,} bytes after the last tensor belong to none")


def build_header(
    entries: Iterable[tuple[str, str, tuple[int, ...], int, int]], reserve: int = 0
) -> bytes:
    """A file's first bytes: the length and the JSON, padded with spaces to a multiple of 8, and to
    what to `reserve`.

    `entries` are (name, dtype, shape, start, stop), offsets counted from the end of the header.
    """
    table: dict[str, object] = {METADATA_KEY: {"format": "pt"}}
    for name, dtype, shape, start, stop in entries:
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, stop)}
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    total = max(reserve, LENGTH_BYTES + len(raw))
    total += -total % 8  # the data starts aligned, so that a loader can map it
    length = total - LENGTH_BYTES
    return length.to_bytes(LENGTH_BYTES, "little") + raw.ljust(length)
