"""Structured mutations: of JSON trees, safetensors headers, quant states, pickles, text and whole
folders.

Each takes a file apart as a reader does, changes what it found, and puts it together again, so that
most of what comes out gets past the first check and reaches those behind it.
"""

import json
import os
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

LARGEST = 2**24
VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        16,
        31,
        63,
        64,
        65,
        255,
        256,
        4096,
        2**31,
        2**32,
        2**63 - 1,
        2**63,
        2**64,
    ),
    *(10**30, -(2**63), 0.5, -0.0, 1e-45, 1e38, 1e300, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        "x",
        "x" * 2000,
        "a.b" * 50,
        "\0",
        "\ud800",
        "../../x",
        "/etc/passwd",
        "é",
        "nf4",
        "fp4",
        "NaN",
        "model",
    ),
    *(
        [],
        {},
        [0],
        [1, 1],
        [[]],
        [None],
        {"a": 1},
        [64, 64],
        [2**62, 4],
        [0, 64],
        [64, 0],
        [1] * 70,
        ["x"] * 3,
    ),
    *(
        "F32",
        "F16",
        "BF16",
        "U8",
        "I8",
        "F8_E4M3",
        "F8_E8M0",
        "F4",
        "C64",
        "BOOL",
        "I64",
        "F64",
        "float16",
    ),
    *(
        "bitsandbytes",
        "fp8",
        "mxfp4",
        "compressed-tensors",
        "modelopt",
        "gptq",
        "llama",
        "gpt_oss",
        "gpt2",
    ),
    *(
        "LlamaForCausalLM",
        "GptOssForCausalLM",
        "GPT2LMHeadModel",
        "Qwen3MoeForCausalLM",
        "T5ForConditionalGeneration",
    ),
]


def mutate_tree(chosen: random.Random, tree: Any) -> Any:
    """A JSON value, one node of which is replaced, removed, doubled, renamed, wrapped or exchanged
    with another.
    """
    places: list[tuple[Any, Any]] = []
    level: list[Any] = [tree]
    while level:
        node = level.pop()
        keys = (
            list(node)
            if isinstance(node, dict)
            else range(len(node))
            if isinstance(node, list)
            else ()
        )
        places += [(node, key) for key in keys]
        level += [node[key] for key in keys]
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
            node[chosen.choice([other_key, *(v for v in VALUES if isinstance(v, str))])] = node.pop(
                key
            )
        case 6 if isinstance(node, list):
            node.insert(key, node[key])
        case 7:
            node[key] = nested(chosen.choice((1, 10, 100, 3000)), node[key], chosen.random() < 0.5)
        case _:
            node[key] = json.loads(text(other[other_key]))
    return tree


def nested(depth: int, value: Any, is_list: bool) -> Any:
    for _ in range(depth):
        value = [value] if is_list else {"a": value}
    return value


def text(value: Any) -> str:
    """As `json.dumps`; empty for what is nested too deep for that."""
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
    """Bytes flipped, removed, inserted, repeated, or cut off."""
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
    """Its header as a tree, the quant states in it as trees, its length, or its data."""
    length = struct.unpack("<Q", content[:8])[0]
    header, data = content[8 : 8 + length], content[8 + length :]
    match chosen.randrange(10):
        case 0:
            return mutate_bytes(chosen, content[: 8 + length]) + data
        case 1:
            return (
                struct.pack("<Q", chosen.choice((0, 1, length - 1, length + 1, 2**27, 2**63)))
                + header
                + data
            )
        case 2:
            start = chosen.randrange(len(data) + 1)
            return (
                content[: 8 + length]
                + data[:start]
                + mutate_bytes(chosen, data[start : start + 4096])[:4096]
            )
        case 3 | 4 | 5:
            table = json.loads(header)
            if states := [name for name in table if "quant_state" in name]:
                return _mutate_state(chosen, table, chosen.choice(states), data)
    return _with_header(mutate_json(chosen, header), data)


def _mutate_state(chosen: random.Random, table: dict[str, Any], name: str, data: bytes) -> bytes:
    """The JSON blob takes another length; all that lies behind it moves."""
    start, stop = table[name]["data_offsets"]
    blob = mutate_json(chosen, data[start:stop])
    shift = len(blob) - (stop - start)
    for entry in (entry for key, entry in table.items() if key != "__metadata__"):
        entry["data_offsets"] = [at + shift if at >= stop else at for at in entry["data_offsets"]]
    table[name] |= {"shape": [len(blob)], "data_offsets": [start, start + len(blob)]}
    return _with_header(json.dumps(table).encode(), data[:start] + blob + data[stop:])


def _with_header(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def mutate_pickle(chosen: random.Random, content: bytes) -> bytes:
    """A zip archive with its parts changed, or the opcodes of a legacy file."""
    if not zipfile.is_zipfile(BytesIO(content)) or chosen.random() < 0.2:
        return (
            mutate_program(chosen, content)
            if chosen.random() < 0.7
            else mutate_bytes(chosen, content)
        )
    made = BytesIO()
    with zipfile.ZipFile(BytesIO(content)) as before, zipfile.ZipFile(made, "w") as after:
        entries = before.infolist()
        victim = chosen.choice(entries)
        for entry in entries:
            part = before.read(entry)
            if entry.filename.endswith("data.pkl") and chosen.random() < 0.7:
                part = mutate_program(chosen, part)
            elif entry is victim and chosen.random() < 0.5:
                part = mutate_bytes(chosen, part)
            if entry is victim and chosen.random() < 0.1:
                continue
            kind = (
                zipfile.ZIP_DEFLATED
                if entry is victim and chosen.random() < 0.1
                else zipfile.ZIP_STORED
            )
            after.writestr(entry.filename, part, kind)
    return made.getvalue()


def mutate_program(chosen: random.Random, content: bytes) -> bytes:
    """The opcodes of the first pickles in some bytes: removed, repeated, exchanged, and their
    arguments changed.
    """
    pieces, end = _opcodes(content)
    if not pieces:
        return mutate_bytes(chosen, content)
    for _ in range(chosen.choice((1, 1, 2, 5))):
        at, other = chosen.randrange(len(pieces)), chosen.randrange(len(pieces))
        match chosen.randrange(6):
            case 0:
                pieces[at] = b""
            case 1:
                pieces[at] *= chosen.choice((2, 100))
            case 2:
                pieces[at], pieces[other] = pieces[other], pieces[at]
            case 3:
                pieces[at] = chosen.choice(OPCODES)
            case 4:
                pieces[at] = pieces[at] + chosen.choice(OPCODES)
            case _ if len(pieces[at]) > 1:
                pieces[at] = pieces[at][:1] + mutate_bytes(chosen, pieces[at][1:])
    return b"".join(pieces) + content[end:]


def _opcodes(content: bytes) -> tuple[list[bytes], int]:
    """Those of the pickles that some bytes begin with, and where they end."""
    stream, starts = BytesIO(content), list[int]()
    with suppress(ValueError):  # where storages begin
        for _ in range(5):
            starts += [position or 0 for _, _, position in pickletools.genops(stream)]
    end = stream.tell()
    return [content[start:stop] for start, stop in pairwise([*starts, end])], end


OPCODES = [
    *(
        b"(",
        b"t",
        b"l",
        b"d",
        b"}",
        b"]",
        b")",
        b"0",
        b"2",
        b"N",
        b"\x88",
        b"\x85",
        b"\x86",
        b"\x87",
        b"s",
        b"u",
        b"a",
    ),
    *(
        b"e",
        b"R",
        b"b",
        b"Q",
        b".",
        b"\x94",
        b"h\0",
        b"q\0",
        b"h\5",
        b"K\x40",
        b"M\0\1",
        b"J\xff\xff\xff\xff",
    ),
    *(
        b"\x8a\x09" + b"\xff" * 8 + b"\0",
        b"\x8b\0\0\1\0" + b"\7" * 65536,
        b"X\1\0\0\0a",
        b"cos\nsystem\n",
    ),
    *(
        b"G" + struct.pack(">d", float("nan")),
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctorch\nFloatStorage\n",
    ),
    *(
        b"ccollections\nOrderedDict\n)R",
        b"\x86" * 300,
        b"(" * 300,
        b"2\x86" * 40,
        b"\x8f",
        b"\x91",
        b"o",
        b"i",
    ),
]


def mutate_text(chosen: random.Random, content: bytes) -> bytes:
    """Lines removed, doubled, exchanged or replaced."""
    lines = content.split(b"\n")
    for _ in range(chosen.choice((1, 2))):
        at = chosen.randrange(len(lines))
        line = chosen.choice(
            (
                b"",
                b"---",
                b"\0",
                b"x" * 5000,
                b"&a [*a]",
                b"0" * 64 + b"  ../x",
                b"a: " + b"[" * 999,
            )
        )
        lines[at : at + chosen.randrange(3)] = [line] * chosen.randrange(3)
    return b"\n".join(lines)


def mutate_folder(chosen: random.Random, path: Path) -> None:
    """A file that is empty, missing, a folder, a pipe or a link, or has the content of another."""
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


def mutate_checkpoint(chosen: random.Random, folder: Path) -> None:
    """Change one or two files of a checkpoint."""
    for _ in range(chosen.choice((1, 1, 1, 2))):
        files = sorted(
            path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()
        )
        files = [
            path for path in files if path.stat().st_size < LARGEST
        ]  # no hole that an earlier mutation has left
        path = chosen.choice(files)
        if chosen.random() < 0.03:
            mutate_folder(chosen, path)
            continue
        mutate = mutate_bytes if chosen.random() < 0.1 else BY_SUFFIX.get(path.suffix, mutate_bytes)
        try:
            changed = mutate(chosen, path.read_bytes())
        except Exception:  # noqa: BLE001 - of what an earlier mutation has left
            changed = mutate_bytes(chosen, path.read_bytes())
        path.write_bytes(changed)
