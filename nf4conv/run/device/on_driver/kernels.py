"""Compiles kernels once for a GPU, a purpose and a release, keeps them on disk, and loads them
without torch.

They lie in the user's cache folder, in one file for each purpose, named by a hash of all that
decides their content.
"""

import base64
import functools
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from nf4conv import codec, format
from nf4conv.errors import OutputError
from nf4conv.format.dtypes import TAGS
from nf4conv.format.layout import Format
from nf4conv.output.writer import write_file
from nf4conv.run.device.on_driver.driver import Device, Function
from nf4conv.sources.tensors import TensorInfo
from nf4conv.system.files import cache_folder, read_private

T = TypeVar("T")


class Purpose(NamedTuple):
    """Says what kernels are for."""

    maker: str  # the function of codec.kernels.ahead that makes them
    # its arguments. dtypes are tags, but those of packed weights are names
    details: tuple[Any, ...]


def packing_purpose(format: Format) -> Purpose:
    details = (format.dtype, format.quant_type, format.blocksize, format.scales)
    return Purpose("encoder", details)


def measuring_purpose(format: Format) -> Purpose:
    details = (format.dtype, format.quant_type, format.blocksize, format.scales)
    return Purpose("comparer", (*details, format.double_quant))


def packing_steps(source: TensorInfo, format: Format) -> tuple[str, ...]:
    """Returns the dtypes that a weight goes through before it is packed."""
    tag = TAGS[format.dtype]
    return (tag,) if source.dtype == tag else (source.dtype, tag)


@dataclass(frozen=True)
class Kernels(Generic[T]):
    """Holds the kernels for a purpose, see codec.kernels.ahead.Codec."""

    functions: Mapping[str, Function]
    tables: Mapping[str, T]  # what they read: bytes, or addresses on the GPU
    numbers: Mapping[str, int]  # what decides how many programs are launched


def load_kernels(content: Mapping[str, Any]) -> Kernels[bytes]:
    """Loads kernels to the current device from the JSON that `compile_kernels` makes of them."""
    functions = {}
    for name, kernel in content["kernels"].items():
        functions[name] = Function(
            cubin=base64.b64decode(kernel["cubin"]),
            entry=kernel["entry"],
            shared=kernel["shared"],
            threads=kernel["threads"],
        )
    tables = {name: base64.b64decode(table) for name, table in content["tables"].items()}
    return Kernels(functions, tables, content["numbers"])


def load_bundles(
    device: Device, purposes: Iterable[Purpose]
) -> dict[Purpose, Kernels[bytes]] | None:
    """Loads the kernels for some purposes to a device, which becomes the current one.

    Those that are not on disk are compiled with torch, and kept there. None if they cannot be
    compiled.
    """
    capability = device.capability()
    folder = cache_folder()
    contents: dict[Purpose, dict[str, Any]] = {}
    missing: dict[Purpose, Path | None] = {}
    for purpose in purposes:
        path = None if folder is None else folder / f"{_key(capability, purpose)}.json"
        content = None if path is None else _read(path)
        if content is None:
            missing[purpose] = path
        else:
            contents[purpose] = content
    if missing:
        logging.getLogger("nf4conv").warning(
            "compiling kernels for this GPU, once; later runs find them in the cache"
        )
        compiled = compile_kernels(device, capability, list(missing))
        if compiled is None:
            return None
        contents |= compiled
        for purpose, path in missing.items():
            if path is not None:
                _keep(path, compiled[purpose])
    device.use()
    return {purpose: load_kernels(content) for purpose, content in contents.items()}


def deciding_sources() -> list[Path]:
    """Lists every file of ours that decides a kernel: the codec, and the tables it uses."""
    files = (path for room in (codec, format) for path in Path(room.__path__[0]).rglob("*"))
    return sorted(path for path in files if path.suffix in (".py", ".txt", ".json"))


@functools.cache
def _sources() -> bytes:
    return b"".join(source.read_bytes() for source in deciding_sources())


def _key(capability: tuple[int, int], purpose: Purpose) -> str:
    digest = hashlib.sha256(_sources())
    choice = (
        capability,
        purpose.maker,
        *purpose.details,
        version_of("torch"),
        version_of("triton"),
    )
    digest.update(repr(choice).encode())
    return digest.hexdigest()[:32]


def version_of(package: str) -> str:
    """Returns the version of an installed package; empty for one that is not there."""
    try:
        return version(package)
    except PackageNotFoundError:  # torch's CPU build brings no Triton
        return ""


def _read(path: Path) -> dict[str, Any] | None:
    """Reads a bundle that this user has written, and nobody else could.

    None in any doubt, because it runs on the GPU.
    """
    try:
        found = read_private(path)
        if found is None:
            return None
        kept = json.loads(found)
        content: dict[str, Any] = kept["bundle"]
        if kept["sha256"] != _checksum(content):
            return None
        return content
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


def compile_kernels(
    gpu: Device, capability: tuple[int, int], purposes: Sequence[Purpose]
) -> dict[Purpose, dict[str, Any]] | None:
    """Compiles kernels for a GPU, which becomes the thread's current device.

    Returns kernels, tables and numbers by purpose, as JSON. None if torch has no CUDA here, if the
    GPU is too old, or if torch is: before 2.10 it takes means in another order than our kernels.
    """
    import torch

    from nf4conv.codec import backends, reference  # importing torch takes seconds

    gpu.use()
    device = torch.device("cuda", gpu.ordinal)
    is_too_old = torch.__version__ < "2.10"
    if is_too_old or not torch.cuda.is_available() or backends.backend(device) is reference:
        return None
    with torch.cuda.device(device):
        return _compiled(device, capability, purposes)


def _compiled(
    device: Any, capability: tuple[int, int], purposes: Sequence[Purpose]
) -> dict[Purpose, dict[str, Any]]:
    from nf4conv.codec.kernels.compiling import compile_kernels  # importing torch takes seconds

    made = {purpose: make_codec(device, purpose) for purpose in purposes}
    variants = []
    for one in made.values():
        variants += one.kernels.values()
    compiled = iter(compile_kernels(variants, capability))
    contents = {}
    for purpose, one in made.items():
        kernels = {name: next(compiled) for name in one.kernels}
        tables = {name: base64.b64encode(table).decode() for name, table in one.tables.items()}
        contents[purpose] = {"kernels": kernels, "tables": tables, "numbers": one.numbers}
    return contents


def make_codec(device: Any, purpose: Purpose) -> Any:
    """Returns the kernels for a purpose, not compiled yet: a codec.kernels.ahead.Codec."""
    from nf4conv.codec.kernels import ahead  # importing torch takes seconds
    from nf4conv.codec.quant_state import DTYPES  # importing torch takes seconds
    from nf4conv.run.device.on_torch.reading import TORCH_DTYPES  # importing torch takes seconds

    dtypes = TORCH_DTYPES | DTYPES

    def of_torch(detail: Any) -> Any:
        return dtypes.get(detail, detail) if isinstance(detail, str) else detail

    make = getattr(ahead, purpose.maker)
    return make(device, *map(of_torch, purpose.details))
