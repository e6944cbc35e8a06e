"""Opens a file of a repository as if it were here: what is read of it is asked for by ranges.

The first range is small, and each one that follows is twice as long: a header of 20 MB takes five
requests, and one of 10 KB no more than one.
"""

import io
from typing import IO, Final

from nf4conv.sources.remote.contents import RemoteFile
from nf4conv.sources.remote.repository import Repository

_SHORTEST: Final = 2**20  # bytes; most headers of GGUF are 5 to 20 MB, for they hold tokenizers
_LONGEST: Final = 2**24
_TOGETHER: Final = 2**16  # bytes that one call takes of what was fetched


def open_ranges(repository: Repository, file: RemoteFile) -> IO[bytes]:
    """Opens a file of a repository; use it as a context manager.

    Args:
        repository: the repository.
        file: the file.

    Returns:
        A file to read from the beginning on. Reading raises a SourceError if the Hub does not give
        the bytes.
    """
    return io.BufferedReader(_Ranges(repository, file), _TOGETHER)


class _Ranges(io.RawIOBase):
    """A file of a repository, of which a run of bytes is here."""

    def __init__(self, repository: Repository, file: RemoteFile) -> None:
        super().__init__()
        self._repository = repository
        self._file = file
        self._position = 0
        self._here = b""
        self._start = 0  # of the bytes that are here
        self._next = _SHORTEST  # bytes of the next range

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}
        self._position = origin[whence] + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._position >= self._file.size:
            return 0
        if not self._start <= self._position < self._start + len(self._here):
            self._fetch()
        offset = self._position - self._start
        content = self._here[offset : offset + len(buffer)]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _fetch(self) -> None:
        """Fetches the range that begins where reading goes on."""
        stop = min(self._position + self._next, self._file.size)
        self._here = self._repository.read(self._file, self._position, stop)
        self._start = self._position
        self._next = min(2 * self._next, _LONGEST)
