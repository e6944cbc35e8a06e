"""Writes what a GGUF file's metadata says as files of a checkpoint, into the user's cache.

To make tokenizer.json of a large vocabulary takes longer than to read the header. So the cache also
has what was made of metadata, by a digest of it.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nf4conv import __version__
from nf4conv.errors import SourceError
from nf4conv.sources.gguf import tokenizing
from nf4conv.sources.gguf.header import GgufHeader
from nf4conv.system.private import cache_folder, read_private, write_private


def unpack(path: Path, config: Mapping[str, Any], tokenizer: Mapping[str, bytes]) -> Path:
    """Writes small files into a folder of the cache that belongs to a GGUF file.

    Args:
        path: the GGUF file.
        config: the content of config.json.
        tokenizer: the files of the tokenizer, by their names.

    Returns:
        The folder. Its name is that of the GGUF file without its ending.

    Raises:
        SourceError: there is no cache to write to.
    """
    contents = {"config.json": _as_json(config, indent=2), **tokenizer}
    digest = hashlib.sha256(_packed(contents)).hexdigest()[:32]
    cache = cache_folder()
    if cache is None:
        raise SourceError(f"{path}: needs a home folder to unpack its metadata, or --config-from")
    folder = cache / "gguf" / digest / path.stem
    try:
        for name, content in contents.items():
            _write(folder / name, content)
    except OSError as error:
        raise SourceError(
            f"{path}: its metadata cannot be unpacked: {error.filename}: {error.strerror}"
        ) from error
    return folder


def made_tokenizer(header: GgufHeader) -> dict[str, bytes]:
    """Returns the files of the tokenizer, by their names: from the cache, or made of the metadata.

    Args:
        header: of the file.

    Returns:
        Nothing, if nf4conv cannot make a tokenizer of the metadata.
    """
    kept = _kept_at(header)
    if kept is not None:
        with suppress(OSError, ValueError, TypeError):
            return _unpacked(read_private(kept))
    # json's fast encoder indents nothing
    made = {
        name: _as_json(content, indent=None if name == "tokenizer.json" else 2)
        for name, content in tokenizing.tokenizer_files(header.metadata).items()
    }
    if kept is not None:
        with suppress(OSError):
            write_private(kept, _packed(made))
    return made


def _kept_at(header: GgufHeader) -> Path | None:
    """Returns where the cache has what this release made of the metadata."""
    cache = cache_folder()
    if cache is None or header.digest is None:
        return None
    made_by = f"nf4conv {__version__}, way {tokenizing.WAY_OF_MAKING}"
    digest = hashlib.sha256(f"{header.digest} {made_by}".encode()).hexdigest()[:32]
    return cache / "gguf" / f"{digest}.tokenizer"


def _packed(files: Mapping[str, bytes]) -> bytes:
    """Returns a line with the names and sizes of files, and their contents behind it."""
    sizes = {name: len(content) for name, content in files.items()}
    return b"".join([json.dumps(sizes).encode(), b"\n", *files.values()])


def _unpacked(packed: bytes | None) -> dict[str, bytes]:
    """Returns the files that `_packed` has put together.

    Raises:
        ValueError: it has not, or they are not all there.
    """
    line, _, contents = (packed or b"").partition(b"\n")
    sizes = json.loads(line)
    if not isinstance(sizes, dict):
        raise ValueError("no names and sizes")
    found = {}
    place = 0
    for name, size in sizes.items():
        found[name] = contents[place : place + size]
        place += size
    if place != len(contents):
        raise ValueError("cut off")
    return found


def _as_json(content: Any, indent: int | None) -> bytes:
    return (json.dumps(content, indent=indent) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    """Writes a file unless it is there with this content."""
    if path.is_file() and not path.is_symlink() and path.read_bytes() == content:
        return
    write_private(path, content)
