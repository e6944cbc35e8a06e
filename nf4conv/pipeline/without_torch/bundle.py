"""Compiled kernels on disk: made once for a GPU, a format and a release; then loaded without torch.

Bundles lie in the user's cache folder, one file each, named by a hash of all that decides their content.
"""

import base64
import hashlib
import json
import os
import stat
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from nf4conv import codec, format
from nf4conv.checkpoint.writer import write_file
from nf4conv.errors import OutputError
from nf4conv.pipeline.without_torch.driver import Device, Function


@dataclass(frozen=True)
class Bundle:
    """The kernels on a device; the attributes are those of codec.kernels.ahead.CompiledCodec."""

    functions: dict[str, Function]
    tables: dict[str, bytes]
    numbers: dict[str, int]


class Action(Enum):
    """What is done to weights."""

    PACK = "pack"
    UNPACK = "unpack"


class Purpose(NamedTuple):
    """What kernels are for.

    Attributes:
        action: what is done to weights.
        dtype: of the weights that are not packed: "float32", "float16" or "bfloat16".
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one absmax.
        scales: of what is packed: "absmax" or "search".
    """

    action: Action
    dtype: str
    quant_type: str
    blocksize: int
    scales: str = "absmax"


def load_bundle(device: Device, purpose: Purpose) -> Bundle | None:
    """The kernels for a purpose; compiled now, with torch, if this is the first time.

    Args:
        device: the current one.
        purpose: what they are for.

    Returns:
        None if torch has no CUDA here, or takes means in an order that our kernels do not repeat, or if the GPU is too
        old for them.
    """
    folder = kernel_folder()
    path = None if folder is None else folder / f"{_key(device.capability(), purpose)}.json"
    content = None if path is None else _read(path)
    if content is None:
        content = _compile(device.ordinal, purpose)
        if content is None:
            return None
        if path is not None:
            _keep(path, content)
    functions = {
        name: Function(base64.b64decode(kernel["cubin"]), kernel["entry"], kernel["shared"], kernel["threads"])
        for name, kernel in content["kernels"].items()
    }
    tables = {name: base64.b64decode(table) for name, table in content["tables"].items()}
    return Bundle(functions, tables, content["numbers"])


def kernel_folder() -> Path | None:
    """Where bundles are kept; None for a user who has no home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "")  # relative ones are to be ignored, by its specification
    try:
        return (folder if folder.is_absolute() else Path.home() / ".cache") / "nf4conv"
    except RuntimeError:
        return None


def deciding_sources() -> list[Path]:
    """Every file of ours that decides a kernel: the codec, and the tables that it is built from."""
    return sorted(path for room in (codec, format) for path in Path(room.__path__[0]).rglob("*.py"))


def _key(capability: tuple[int, int], purpose: Purpose) -> str:
    digest = hashlib.sha256()
    for source in deciding_sources():
        digest.update(source.read_bytes())
    choice = (capability, purpose.action.value, *purpose[1:], _version("torch"), _version("triton"))
    digest.update(repr(choice).encode())
    return digest.hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # torch's CPU build brings no Triton
        return ""


def _read(path: Path) -> dict[str, Any] | None:
    """A bundle that this user has written, and nobody else could; None in any doubt: it runs on the GPU."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            kept = json.loads(file.read())
        content: dict[str, Any] = kept["bundle"]
        return content if kept["sha256"] == _checksum(content) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _keep(path: Path, content: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {"sha256": _checksum(content), "bundle": content}
        write_file(path, [json.dumps(kept).encode()], mode=0o600)
    except (OSError, OutputError):
        return  # a home that cannot be written to costs time at the next run, not this result


def _compile(ordinal: int, purpose: Purpose) -> dict[str, Any] | None:
    import torch

    from nf4conv.codec import ops, reference  # importing torch takes seconds

    device = torch.device("cuda", ordinal)
    if not torch.cuda.is_available() or ops.backend(device) is reference:
        return None
    from nf4conv.codec.kernels.ahead import compile_decoder, compile_encoder  # importing torch takes seconds
    from nf4conv.codec.quant_state import DTYPES  # which importing torch comes with

    with torch.cuda.device(device):
        weights = device, DTYPES[purpose.dtype], purpose.quant_type, purpose.blocksize
        is_packing = purpose.action is Action.PACK
        compiled = compile_encoder(*weights, purpose.scales) if is_packing else compile_decoder(*weights)
    if compiled is None:
        return None
    return {
        "kernels": {
            name: asdict(kernel) | {"cubin": base64.b64encode(kernel.cubin).decode()}
            for name, kernel in compiled.kernels.items()
        },
        "tables": {name: base64.b64encode(table).decode() for name, table in compiled.tables.items()},
        "numbers": compiled.numbers,
    }
