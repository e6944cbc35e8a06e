"""Keeps compiled kernels on disk: made once for a GPU, a purpose and a release; then loaded without
torch.

Bundles lie in the user's cache folder, one file each, named by a hash of all that decides their
content.
"""

import functools
import hashlib
import json
import logging
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nf4conv import codec, format
from nf4conv.errors import OutputError
from nf4conv.output.writer import write_file
from nf4conv.run.device.on_driver.compiling import compile_kernels
from nf4conv.run.device.on_driver.driver import Device
from nf4conv.run.device.on_driver.kernels import Kernels, Purpose, load_kernels
from nf4conv.system.private import cache_folder, read_private


def load_bundles(
    device: Device, purposes: Iterable[Purpose]
) -> dict[Purpose, Kernels[bytes]] | None:
    """Loads the kernels for some purposes to a device, which becomes the current one.

    Those that are not on disk are compiled with torch, and kept there.

    Returns:
        The kernels; None if they cannot be compiled, see `compile_kernels`.
    """
    capability = device.capability()
    folder = cache_folder()
    contents: dict[Purpose, dict[str, Any]] = {}
    missing: dict[Purpose, Path | None] = {}
    for purpose in purposes:
        path = None
        if folder is not None:
            path = folder / f"{_key(capability, purpose)}.json"
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

    Returns:
        The bundle; None in any doubt, because it runs on the GPU.
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
