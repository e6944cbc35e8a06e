"""Writes what a GGUF file's metadata says as files of a checkpoint, into the user's cache.

    CACHE/gguf/DIGEST/NAME/config.json          NAME is that of the GGUF file without its ending
    CACHE/gguf/DIGEST/NAME/README.md            licence and languages
    CACHE/gguf/DIGEST/NAME/tokenizer.json
    CACHE/gguf/DIGEST/NAME/tokenizer_config.json
    CACHE/gguf/DIGEST/sizes.json                the sizes of the tokenizer's files; written last

To make tokenizer.json of a large vocabulary takes longer than to read the header, and nobody needs
it before the weights are written. So it is made in a thread meanwhile, and found there by the next
run.
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nf4conv import __version__
from nf4conv.errors import SourceError
from nf4conv.sources.gguf import tokenizing
from nf4conv.sources.gguf.card import CARD, card_of
from nf4conv.sources.gguf.header import GgufHeader
from nf4conv.sources.gguf.incoming import Texts
from nf4conv.sources.gguf.tokenizing import Vocabulary
from nf4conv.sources.source import PendingFiles
from nf4conv.system.background import Background
from nf4conv.system.private import (
    belongs_to_user,
    cache_folder,
    read_private,
    remove_oldest,
    write_private,
)

_NAMES: Final = ("tokenizer.json", "tokenizer_config.json")
_MOST_KEPT: Final = 200_000_000  # bytes; a vocabulary of 128,000 tokens takes 9 MB
_REST: Final = 0.0002
"""Seconds in which other threads can work, after each piece of about 1 ms: they would wait 5 ms
for one that does not rest."""


def unpack(
    path: Path, header: GgufHeader, config: Mapping[str, Any]
) -> tuple[Path, PendingFiles | None]:
    """Writes config.json and a model card into a folder of the cache that belongs to a GGUF file.

    Args:
        path: the GGUF file.
        header: the header of that file.
        config: the content of config.json.

    Returns:
        The folder, and the files of the tokenizer, which may be still to be made: None if nf4conv
        cannot make a tokenizer of the metadata.

    Raises:
        SourceError: there is no cache to write to.
    """
    content = _as_json(config)
    cache = cache_folder()
    if cache is None:
        raise SourceError(f"{path}: needs a home folder to unpack its metadata, or --config-from")
    made_by = f"nf4conv {__version__}, way {tokenizing.WAY_OF_MAKING}"
    described = f"{header.digest} {made_by} {path.stem}\n".encode() + content
    entry = cache / "gguf" / hashlib.sha256(described).hexdigest()[:32]
    folder = entry / path.stem
    pending = TokenizerFiles(path, folder, header.metadata)
    try:
        _write_changed(folder / "config.json", content)
        _write_changed(folder / CARD, card_of(header.metadata))
    except OSError as error:
        raise pending.failure(error) from error
    return folder, pending if pending.can_be_made() else None


class TokenizerFiles:
    """The files of a tokenizer, which are made in a thread, or when they are needed.

    Args:
        path: the GGUF file, for messages.
        folder: where the files belong.
        metadata: the metadata of the GGUF file.

    Attributes:
        names: the names of the files.
        largest: the most bytes that the files have together: an estimate until they are made.
    """

    def __init__(self, path: Path, folder: Path, metadata: Mapping[str, Any]) -> None:
        self.names: tuple[str, ...] = _NAMES
        self.largest = 0
        self._path = path
        self._folder = folder
        self._metadata = metadata
        self._vocabulary: Vocabulary | None = None
        self._thread: Background | None = None
        self._error: Exception | None = None

    def can_be_made(self) -> bool:
        """Returns True if the files are there, or can be made of the metadata."""
        there = self._bytes_there()
        if there is not None:
            self.largest = there
            return True
        self._vocabulary = tokenizing.read_vocabulary(self._metadata)
        if self._vocabulary is None:
            return False
        self.largest = 32 * len(self._vocabulary.encoded)
        for texts in self._metadata.values():
            if isinstance(texts, Texts):
                self.largest += 3 * len(texts.content)
        return True

    def begin(self) -> None:
        """Begins to make the files in a thread, if they are not there."""
        if self._vocabulary is None or self._thread is not None:
            return
        self._thread = Background(self._make_or_note, "nf4conv-tokenizer")
        self._thread.start()

    def finish(self) -> None:
        """Returns when the files are there.

        Raises:
            SourceError: they cannot be written.
        """
        if self._thread is not None:
            self._thread.wait()
            self._thread = None
        error = self._error
        if error is None and self._bytes_there() is None:  # or not any more: others share the cache
            self._make_or_note()
            error = self._error
        if isinstance(error, OSError):
            raise self.failure(error) from error
        if error is not None:
            raise error

    def failure(self, error: OSError) -> SourceError:
        """Returns what to tell a user."""
        place = error.filename or self._folder
        return SourceError(
            f"{self._path}: its metadata cannot be unpacked: {place}: {error.strerror}; "
            f"XDG_CACHE_HOME names another folder for it"
        )

    def _make_or_note(self) -> None:
        """Makes the files; keeps an error for `finish`, which raises it."""
        try:
            self._make()
        except Exception as error:  # noqa: BLE001 - raised again by whoever waits
            self._error = error

    def _make(self) -> None:
        """Makes the files, and removes what the cache has no room for."""
        vocabulary = self._vocabulary or tokenizing.read_vocabulary(self._metadata)
        assert vocabulary is not None
        pieces = []
        for piece in tokenizing.tokenizer_json(vocabulary):
            pieces.append(piece)
            time.sleep(_REST)
        contents = (b"".join(pieces), _as_json(tokenizing.tokenizer_config(vocabulary)))
        sizes = {}
        for name, content in zip(_NAMES, contents, strict=True):
            write_private(self._folder / name, content)
            sizes[name] = len(content)
        entry = self._folder.parent
        write_private(entry / "sizes.json", _as_json(sizes))
        self._vocabulary = None
        remove_oldest(entry.parent, _MOST_KEPT)

    def _bytes_there(self) -> int | None:
        """Returns the bytes of the files together; None unless a run has left them so."""
        entry = self._folder.parent
        total = 0
        try:
            os.utime(entry)  # used now: nobody removes it
            sizes = json.loads(read_private(entry / "sizes.json") or b"")
            for name in _NAMES:
                if not _is_intact(self._folder / name, sizes[name]):
                    return None
                total += sizes[name]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return total


def _is_intact(path: Path, size: int) -> bool:
    """Returns True if a file of the cache has its size, and nobody else could have written it."""
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and belongs_to_user(status) and status.st_size == size


def _as_json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _write_changed(path: Path, content: bytes) -> None:
    """Writes a file unless it is there with this content."""
    if not _has_content(path, content):
        write_private(path, content)


def _has_content(path: Path, content: bytes) -> bool:
    """Returns True for a file with this content. Another process may remove it at any moment."""
    try:
        return path.is_file() and not path.is_symlink() and path.read_bytes() == content
    except FileNotFoundError:
        return False
