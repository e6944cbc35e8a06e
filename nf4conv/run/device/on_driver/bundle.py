"""Compiled kernels on disk: made once for a GPU, a purpose and a release; then loaded without
torch.

Bundles lie in the user's cache folder, one file each, named by a hash of all that decides their
content.
"""

import base64
import functools
import hashlib
import json
import logging
import os
import stat
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from nf4conv import codec, format
from nf4conv.errors import OutputError
from nf4conv.output.writer import write_file
from nf4conv.run.device.on_driver.driver import CudaError, Device, Function, Stream

T = TypeVar("T")


@dataclass(frozen=True)
class Kernels(Generic[T]):
    """The kernels for a purpose on a device, see codec.kernels.ahead.Codec; tables are bytes, or
    addresses there.
    """

    functions: Mapping[str, Function]
    tables: Mapping[str, T]
    numbers: Mapping[str, int]


class Action(Enum):
    """What kernels do; the value is the function of codec.kernels.ahead that makes them."""

    PACK = "encoder"
    UNPACK = "decoder"
    COMPARE = "comparer"
    SUBTRACT = "subtractor"
    DECODE_SCALED = "scaled_decoder"
    DECODE_FP4 = "fp4_decoder"
    CAST = "caster"


class Purpose(NamedTuple):
    """What kernels are for."""

    action: Action
    details: tuple[
        Any, ...
    ]  # the arguments of that function; dtypes are tags, but of packed weights names


def load_bundles(
    device: Device, purposes: Iterable[Purpose]
) -> dict[Purpose, Kernels[bytes]] | None:
    """The kernels for some purposes on a device, from now on the current one; compiled now, with
    torch, the first time.

    None if torch has no CUDA here, or takes means in an order that our kernels do not repeat, or if
    the GPU is too old.
    """
    capability, folder = device.capability(), kernel_folder()
    paths = {
        purpose: folder and folder / f"{_key(capability, purpose)}.json" for purpose in purposes
    }
    contents = {
        purpose: content
        for purpose, path in paths.items()
        if path and (content := _read(path)) is not None
    }
    if missing := [purpose for purpose in paths if purpose not in contents]:
        logging.getLogger("nf4conv").warning(
            "compiling kernels for this GPU, once; later runs find them in the cache"
        )
        compiled = _compile(device, capability, missing)
        if compiled is None:
            return None
        for purpose, content in compiled.items():
            contents[purpose] = content
            if (path := paths[purpose]) is not None:
                _keep(path, content)
    device.use()
    return {purpose: _loaded(content) for purpose, content in contents.items()}


def _loaded(content: dict[str, Any]) -> Kernels[bytes]:
    functions = {
        name: Function(**kernel | {"cubin": base64.b64decode(kernel["cubin"])})
        for name, kernel in content["kernels"].items()
    }
    tables = {name: base64.b64decode(table) for name, table in content["tables"].items()}
    return Kernels(functions, tables, content["numbers"])


def kernel_folder() -> Path | None:
    """Where bundles are kept; None for a user who has no home."""
    folder = Path(
        os.environ.get("XDG_CACHE_HOME") or ""
    )  # relative ones are to be ignored, by its specification
    try:
        return (folder if folder.is_absolute() else Path.home() / ".cache") / "nf4conv"
    except RuntimeError:
        return None


def deciding_sources() -> list[Path]:
    """Every file of ours that decides a kernel: the codec, and the tables that it is built from."""
    files = (path for room in (codec, format) for path in Path(room.__path__[0]).rglob("*"))
    return sorted(path for path in files if path.suffix in (".py", ".txt", ".json"))


@functools.cache
def _sources() -> bytes:
    return b"".join(source.read_bytes() for source in deciding_sources())


def _key(capability: tuple[int, int], purpose: Purpose) -> str:
    digest = hashlib.sha256(_sources())
    choice = (
        capability,
        purpose.action.value,
        *purpose.details,
        version_of("torch"),
        version_of("triton"),
    )
    digest.update(repr(choice).encode())
    return digest.hexdigest()[:32]


def version_of(package: str) -> str:
    """Of an installed package; empty for one that is not there."""
    try:
        return version(package)
    except PackageNotFoundError:  # torch's CPU build brings no Triton
        return ""


def _read(path: Path) -> dict[str, Any] | None:
    """A bundle that this user has written, and nobody else could; None in any doubt: it runs on the
    GPU.
    """
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


def _compile(
    gpu: Device, capability: tuple[int, int], purposes: Sequence[Purpose]
) -> dict[Purpose, dict[str, Any]] | None:
    meanwhile = threading.Thread(target=_prepare, args=(gpu,))
    meanwhile.start()
    import torch

    from nf4conv.codec import backends, reference  # importing torch takes seconds

    meanwhile.join()
    gpu.use()
    device = torch.device("cuda", gpu.ordinal)
    if not torch.cuda.is_available() or backends.backend(device) is reference:
        return None
    from nf4conv.codec.kernels import ahead  # importing torch takes seconds
    from nf4conv.codec.kernels.packing import mean  # importing torch takes seconds

    with torch.cuda.device(device):
        codecs = {purpose: make_codec(device, purpose) for purpose in purposes}
        variants = [variant for found in codecs.values() for variant in found.kernels.values()]
        kernels = iter(ahead.compiled(variants, capability))
        contents = {
            purpose: {
                "kernels": {name: next(kernels) for name in found.kernels},
                "tables": {
                    name: base64.b64encode(table).decode() for name, table in found.tables.items()
                },
                "numbers": found.numbers,
            }
            for purpose, found in codecs.items()
        }
        stream = Stream(torch.cuda.current_stream().cuda_stream)
        packing = [
            content for purpose, content in contents.items() if purpose.action is Action.PACK
        ][:1]
        is_usable = all(
            mean.repeats_torch(device, partial(_launch, _loaded(one).functions, stream))
            for one in packing
        )
    return contents if is_usable else None


def _launch(
    functions: Mapping[str, Function],
    stream: Stream,
    name: str,
    programs: int,
    arguments: Sequence[Any],
) -> None:
    """Launches a kernel on tensors and numbers; Triton, which could do it, needs a C compiler for
    that.
    """
    values = [value if isinstance(value, int) else value.data_ptr() for value in arguments]
    functions[name].launch(stream, programs, values)


def _prepare(gpu: Device) -> None:
    """What can be done while torch is imported: make a context; and Triton hashes half a gigabyte
    of itself.
    """
    with suppress(
        ImportError, CudaError
    ):  # torch's CPU build brings no Triton; the other is met again
        gpu.use()
        from triton.runtime.cache import triton_key

        triton_key()


def make_codec(device: Any, purpose: Purpose) -> Any:
    """The kernels for a purpose, not compiled yet: a codec.kernels.ahead.Codec."""
    from nf4conv.codec.kernels import ahead  # importing torch takes seconds
    from nf4conv.codec.quant_state import DTYPES  # which importing torch comes with
    from nf4conv.run.device.on_torch.reading import (
        TORCH_DTYPES,  # likewise: importing torch takes seconds
    )

    dtypes = TORCH_DTYPES | DTYPES
    details = [
        dtypes.get(detail, detail) if isinstance(detail, str) else detail
        for detail in purpose.details
    ]
    return getattr(ahead, purpose.action.value)(device, *details)
