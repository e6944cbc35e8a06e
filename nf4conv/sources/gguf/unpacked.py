"""Writes what a GGUF file's metadata says as files of a checkpoint, into the user's cache."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nf4conv.errors import SourceError
from nf4conv.system.private import cache_folder, write_private


def unpack(path: Path, files: Mapping[str, Any]) -> Path:
    """Writes small JSON files into a folder of the cache that belongs to a GGUF file.

    Args:
        path: the GGUF file.
        files: the content of each file, by its name.

    Returns:
        The folder. Its name is that of the GGUF file without its ending.

    Raises:
        SourceError: there is no cache to write to.
    """
    cache = cache_folder()
    contents = {name: _as_json(name, content) for name, content in files.items()}
    digest = hashlib.sha256()
    for name in sorted(contents):
        content = contents[name]
        digest.update(f"{name} {len(content)} ".encode() + content)
    if cache is None:
        raise SourceError(f"{path}: needs a home folder to unpack its metadata, or --config-from")
    folder = cache / "gguf" / digest.hexdigest()[:32] / path.stem
    try:
        for name, content in contents.items():
            _write(folder / name, content)
    except OSError as error:
        raise SourceError(
            f"{path}: its metadata cannot be unpacked: {error.filename}: {error.strerror}"
        ) from error
    return folder


def _as_json(name: str, content: Any) -> bytes:
    """Returns the content of a file; that of a vocabulary in one line, which takes a third of the
    time.
    """
    indent = None if name == "tokenizer.json" else 2
    return (json.dumps(content, indent=indent) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    """Writes a file unless it is there with this content."""
    if path.is_file() and not path.is_symlink() and path.read_bytes() == content:
        return
    write_private(path, content)
