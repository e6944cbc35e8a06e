"""Mutates JSON trees, safetensors headers, quant states, pickles, text and whole folders.

Each function takes a file apart as a reader does, changes what it found, and puts it together
again. So most results get past the first check of a reader and reach those behind it.
"""

import json
import os
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any

LARGEST = 2**24  # bytes of a file that is mutated; others are holes
# what takes the place of a value in a JSON tree
VALUES: list[Any] = [
    None, True, False,
    # integers around limits
    0, 1, -1, 2, 3, 16, 31, 63, 64, 65, 255, 256, 4096,
    2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63),
    # floats
    0.5, -0.0, 1e-45, 1e38, 1e300, float("nan"), float("inf"), float("-inf"),
    # strings
    "", "x", "x" * 2000, "a.b" * 50, "\0", "\ud800", "../../x", "/etc/passwd", "é",
    "nf4", "fp4", "NaN", "model",
    # lists and objects
    [], {}, [0], [1, 1], [[]], [None], {"a": 1},
    [64, 64], [2**62, 4], [0, 64], [64, 0], [1] * 70, ["x"] * 3,
    # names of dtypes
    "F32", "F16", "BF16", "U8", "I8", "F8_E4M3", "F8_E8M0", "F4", "C64", "BOOL", "I64", "F64",
    "float16",
    # methods of quantization and types of models
    "bitsandbytes", "fp8", "mxfp4", "compressed-tensors", "modelopt", "gptq", "awq", "hqq",
    "auto-round", "torchao", "quark",
    "llama", "gpt_oss", "gpt2",
    # classes of models
    "LlamaForCausalLM", "GptOssForCausalLM", "GPT2LMHeadModel", "Qwen3MoeForCausalLM",
    "T5ForConditionalGeneration",
]  # fmt: skip
NAMES = [value for value in VALUES if isinstance(value, str)]


def mutate_tree(chosen: random.Random, tree: Any) -> Any:
    """Replaces, removes, doubles, renames or wraps one node of a JSON value, or copies another."""
    places = list(_places(tree))
    if not places or chosen.random() < 0.02:
        return deepcopy(chosen.choice(VALUES))
    node, key = chosen.choice(places)
    other, other_key = chosen.choice(places)
    match chosen.randrange(9):
        case 0 | 1 | 2:
            node[key] = deepcopy(chosen.choice(VALUES))
        case 3 if isinstance(node[key], int):
            node[key] += chosen.choice((-64, -8, -1, 1, 2, 8, 64))
        case 4:
            del node[key]
        case 5 if isinstance(node, dict):
            name = chosen.choice([other_key, *NAMES])
            node[name] = node.pop(key)
        case 6 if isinstance(node, list):
            node.insert(key, node[key])
        case 7:
            node[key] = nested(chosen.choice((1, 10, 100, 3000)), node[key], chosen.random() < 0.5)
        case _:
            node[key] = json.loads(text(other[other_key]))
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each node that has children, with the key or the index of each child."""
    level: list[Any] = [tree]
    while level:
        node = level.pop()
        keys: list[Any] = []
        if isinstance(node, dict):
            keys = list(node)
        elif isinstance(node, list):
            keys = list(range(len(node)))
        for key in keys:
            yield node, key
            level.append(node[key])


def nested(depth: int, value: Any, is_list: bool) -> Any:
    """Wraps a value in that many lists or objects."""
    for _ in range(depth):
        value = [value] if is_list else {"a": value}
    return value


def text(value: Any) -> str:
    """Returns a value as JSON, or 3000 brackets if it is nested too deep for the json module."""
    try:
        return json.dumps(value)
    except RecursionError:
        return "[" * 3000


def mutate_json(chosen: random.Random, content: bytes) -> bytes:
    try:
        tree = json.loads(content)
    except ValueError:
        return mutate_bytes(chosen, content)
    for _ in range(chosen.choice((1, 1, 1, 2, 4))):
        tree = mutate_tree(chosen, tree)
    found = text(tree).encode()
    if chosen.random() < 0.03:  # a key twice
        found = found[:1] + b'"model_type": 1,' + found[1:]
    return found


def mutate_bytes(chosen: random.Random, content: bytes) -> bytes:
    """Flips, removes, inserts, overwrites or cuts off bytes."""
    data = bytearray(content)
    for _ in range(chosen.choice((1, 1, 2, 8))):
        at = chosen.randrange(len(data) + 1)
        length = min(chosen.choice((1, 1, 2, 8, 64, 1000)), len(data) - at)
        match chosen.randrange(6):
            case 0 | 1 if at < len(data):
                data[at] ^= 1 << chosen.randrange(8)
            case 2:
                del data[at : at + length]
            case 3:
                data[at:at] = chosen.choice(
                    (b"\0", b"\xff" * 8, b"{", b"\n", struct.pack("<Q", 2**40), bytes(length))
                )
            case 4:
                data[at : at + length] = chosen.choice((b"\0", b"\xff")) * length
            case _:
                del data[at if chosen.random() < 0.3 else len(data) :]
    return bytes(data)


def mutate_safetensors(chosen: random.Random, content: bytes) -> bytes:
    """Changes the header as a tree, a quant state as a tree, the header's length, or the data."""
    length = struct.unpack("<Q", content[:8])[0]
    header = content[8 : 8 + length]
    data = content[8 + length :]
    match chosen.randrange(10):
        case 0:
            return mutate_bytes(chosen, content[: 8 + length]) + data
        case 1:
            wrong = chosen.choice((0, 1, length - 1, length + 1, 2**27, 2**63))
            return struct.pack("<Q", wrong) + header + data
        case 2:
            start = chosen.randrange(len(data) + 1)
            changed = mutate_bytes(chosen, data[start : start + 4096])
            return content[: 8 + length] + data[:start] + changed[:4096]
        case 3 | 4 | 5:
            table = json.loads(header)
            states = [name for name in table if "quant_state" in name]
            if states:
                return _mutate_state(chosen, table, chosen.choice(states), data)
        case 6:
            return content[: 8 + length] + _filled(chosen, json.loads(header), data)
    return _with_header(mutate_json(chosen, header), data)


def _mutate_state(chosen: random.Random, table: dict[str, Any], name: str, data: bytes) -> bytes:
    """Changes a quant state, a JSON blob in the data, and moves all that lies behind it."""
    start, stop = table[name]["data_offsets"]
    blob = mutate_json(chosen, data[start:stop])
    shift = len(blob) - (stop - start)
    for key, entry in table.items():
        if key == "__metadata__":
            continue
        offsets = entry["data_offsets"]
        for index, offset in enumerate(offsets):
            if offset >= stop:
                offsets[index] = offset + shift
    table[name] |= {"shape": [len(blob)], "data_offsets": [start, start + len(blob)]}
    return _with_header(json.dumps(table).encode(), data[:start] + blob + data[stop:])


def _filled(chosen: random.Random, table: dict[str, Any], data: bytes) -> bytes:
    """Fills a tensor, or its first bytes, with a value that no reader expects there."""
    name = chosen.choice([key for key in table if key != "__metadata__"])
    start, stop = table[name]["data_offsets"]
    value = chosen.choice(
        (
            *(struct.pack("<q", number) for number in (0, 1, -1, 10**9, 2**62, -(2**63))),
            *(struct.pack("<i", number) * 2 for number in (7, -2, 10**9)),
            *(struct.pack("<f", number) * 2 for number in (float("nan"), float("inf"), 1e38)),
            b"\0\x7c" * 4,  # infinity in float16
            b"\x80\x7f" * 4,  # infinity in bfloat16
        )
    )
    count = chosen.choice((1, 2, 4, 8, stop - start))
    filled = (value * (count // len(value) + 1))[: min(count, stop - start)]
    return data[:start] + filled + data[start + len(filled) :]


def _with_header(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def mutate_pickle(chosen: random.Random, content: bytes) -> bytes:
    """Changes, drops or compresses a part of a zip archive, or changes its bytes."""
    if not zipfile.is_zipfile(BytesIO(content)) or chosen.random() < 0.2:
        return mutate_bytes(chosen, content)
    made = BytesIO()
    with zipfile.ZipFile(BytesIO(content)) as before, zipfile.ZipFile(made, "w") as after:
        entries = before.infolist()
        victims = [entry for entry in entries if entry.filename.endswith("data.pkl")]
        victim = chosen.choice(victims if chosen.random() < 0.7 and victims else entries)
        way = chosen.choice(("change", "change", "change", "drop", "compress"))
        for entry in entries:
            part = before.read(entry)
            if entry is not victim or way == "compress":
                is_compressed = entry is victim
                method = zipfile.ZIP_DEFLATED if is_compressed else zipfile.ZIP_STORED
                after.writestr(entry.filename, part, method)
            elif way == "change":
                after.writestr(entry.filename, mutate_bytes(chosen, part))
    return made.getvalue()


STRANGE_LINES = (
    b"",
    b"---",
    b"\0",
    b"x" * 5000,
    b"&a [*a]",
    b"a: " + b"[" * 999,
)


def mutate_text(chosen: random.Random, content: bytes) -> bytes:
    """Removes lines, or puts one or two strange ones there."""
    lines = content.split(b"\n")
    for _ in range(chosen.choice((1, 2))):
        at = chosen.randrange(len(lines))
        line = chosen.choice(STRANGE_LINES)
        lines[at : at + chosen.randrange(3)] = [line] * chosen.randrange(3)
    return b"\n".join(lines)


def mutate_folder(chosen: random.Random, path: Path) -> None:
    """Replaces a file with an empty one, a folder, a pipe, a link, a hole or a copy of another, or
    removes it.
    """
    others = [other for other in path.parent.iterdir() if other.is_file()]
    with chosen.choice(others).open("rb") as other:
        content = other.read(2**26)  # an earlier mutation may have left gigabytes of nothing
    path.unlink()
    match chosen.randrange(8):
        case 0:
            path.touch()
        case 1:
            path.mkdir()
        case 2:
            os.mkfifo(path)
        case 3:
            path.symlink_to(
                chosen.choice(("/dev/zero", "/etc/hostname", "nowhere", path.name, ".."))
            )
        case 4 | 5:
            path.write_bytes(content)
        case 6:
            with path.open("wb") as file:
                file.truncate(2**32)  # a hole


BY_SUFFIX: dict[str, Callable[[random.Random, bytes], bytes]] = {
    ".json": mutate_json,
    ".safetensors": mutate_safetensors,
    ".bin": mutate_pickle,
    ".md": mutate_text,
    "": mutate_text,
}


def _ordinary_files(folder: Path) -> list[Path]:
    """Returns the files below a folder without links, and holes that earlier mutations left."""
    files = []
    for path in sorted(folder.rglob("*")):
        is_ordinary = path.is_file() and not path.is_symlink()
        if is_ordinary and path.stat().st_size < LARGEST:
            files.append(path)
    return files


def mutate_checkpoint(chosen: random.Random, folder: Path) -> None:
    """Change one or two files of a checkpoint."""
    for _ in range(chosen.choice((1, 1, 1, 2))):
        files = _ordinary_files(folder)
        if not files:
            return
        path = chosen.choice(files)
        if chosen.random() < 0.03:
            mutate_folder(chosen, path)
            continue
        mutate = BY_SUFFIX.get(path.suffix, mutate_bytes)
        if chosen.random() < 0.1:
            mutate = mutate_bytes
        try:
            changed = mutate(chosen, path.read_bytes())
        except Exception:  # noqa: BLE001 - an earlier mutation may have left what cannot be parsed
            changed = mutate_bytes(chosen, path.read_bytes())
        path.write_bytes(changed)
