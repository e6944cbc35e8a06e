"""One output shard: a temporary file, positional writes from many threads, then header, fsync and
the final name.
"""

import os
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from nf4conv.errors import OutputError, named
from nf4conv.output.crc32 import crc32_of_pieces
from nf4conv.sources.header import build_header, read_header


class ShardWriter:
    """Writes one safetensors file whose layout is known in advance.

    The file has its final name only after `finish`, which checks and syncs it first. Thread-safe:
    writes are positional and do not overlap.

    An existing `temporary` file is started anew. So many bytes are reserved for the header; to
    those of data, which are at fixed offsets, `finish` may append.
    """

    def __init__(self, temporary: Path, final: Path, header_size: int, data_size: int) -> None:
        self._temporary = temporary
        self._final = final
        self._header_size = header_size
        self._data_size = data_size
        self._pieces: list[tuple[int, int, int]] = []  # to which threads append
        # of the finished file, from the pieces that were written, not from what the disk made of
        # them
        self.crc32 = 0
        with named(temporary, OutputError):
            temporary.unlink(missing_ok=True)
            self._descriptor = os.open(
                temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
            )
            os.ftruncate(self._descriptor, header_size + data_size)

    def place(self, offset: int) -> tuple[Path, int]:
        """Where data at `offset` is for now: the file, which still has its temporary name, and the
        position in it.
        """
        return self._temporary, self._header_size + offset

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at `offset`, counted from the end of the header; an OutputError if that
        fails.
        """
        position = self._header_size + offset
        self._pieces.append((position, position + len(data), zlib.crc32(data)))
        with named(self._final, OutputError):
            while data:
                count = os.pwrite(self._descriptor, data, position)
                data = data[count:]
                position += count

    def finish(
        self, entries: Iterable[tuple[str, str, tuple[int, ...], int, int]], tail: bytes
    ) -> int:
        """Append `tail` to the data, write the header, sync, check, and give the file its final
        name; its size.

        `entries` are (name, dtype, shape, start, stop) of every tensor, the tail's included. An
        OutputError if the disk is full or failing, or the file read back is not what was written.
        """
        entries = list(entries)
        expected = {name: (start, stop) for name, _, _, start, stop in entries}
        header = build_header(entries, reserve=self._header_size)
        if len(header) != self._header_size:
            raise AssertionError(
                f"{self._final}: header of {len(header)} bytes, {self._header_size} were reserved"
            )
        self.write(-self._header_size, memoryview(header))
        self.write(self._data_size, memoryview(tail))
        size = self._header_size + self._data_size + len(tail)
        with named(self._final, OutputError):
            os.ftruncate(self._descriptor, size)
            os.fsync(self._descriptor)
            self.close()
            self._check(expected, size)
            self._temporary.replace(self._final)
        self.crc32 = crc32_of_pieces(self._pieces, size)
        return size

    def _check(self, expected: dict[str, tuple[int, int]], size: int) -> None:
        found = read_header(self._temporary)  # refuses holes, overlaps and a wrong file size
        offsets = {
            tensor.name: (tensor.start - self._header_size, tensor.stop - self._header_size)
            for tensor in found
        }
        if self._temporary.stat().st_size != size or offsets != expected:
            raise OutputError(
                f"{self._final}: the header read back is not the one written; is the disk failing?"
            )

    def close(self) -> None:
        """Write no more to the file; one that is not finished keeps its temporary name."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def write_file(
    path: Path, chunks: Iterable[bytes], *, folder: Path | None = None, mode: int = 0o666
) -> None:
    """Write a file in one go so that it either exists whole or not at all; an OutputError if that
    fails.

    What is not whole yet is in a `folder` on the same disk, or in that of the file. The process's
    umask takes from the permissions `mode`.
    """
    # a name that nobody can foresee, and that nobody has: not even as a link to another file
    temporary = (folder or path.parent) / f".{path.name[:40]}.{os.urandom(8).hex()}.partial"
    with named(path, OutputError):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_result(path: Path, content: bytes) -> None:
    """Write a file that the user has named: into what is there if it is a pipe, a device or a link,
    or else whole.
    """
    if not path.is_symlink() and (path.is_file() or not path.exists()):
        write_file(path, [content])
        return
    with named(path, OutputError):
        path.write_bytes(content)


def let_go(path: Path) -> None:
    """Let the page cache drop a file that is on disk; where the system cannot be told, it stays."""
    with suppress(OSError, AttributeError), path.open("rb") as file:  # macOS has no such function
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
