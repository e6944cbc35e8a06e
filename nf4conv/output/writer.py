"""Writes files so that they have their final name only once they are whole.

A shard is a temporary file that many threads write to at known positions. Then follow its header,
fsync and the final name.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from nf4conv.errors import OutputError, named
from nf4conv.output.digest import digest_of_piece, sum_up
from nf4conv.sources.header import build_header, read_header
from nf4conv.system.files import create, create_to_write, sync


class ShardWriter:
    """Writes one safetensors file whose layout is known in advance.

    The file has its final name only after `finish`, which checks and syncs it first. Writes are
    positional and do not overlap, so that any thread may write.

    Attributes:
        digest: of the finished file. It comes from the pieces that were written, not from what the
            disk made of them.
    """

    def __init__(self, temporary: Path, final: Path, header_size: int, data_size: int) -> None:
        self.digest = 0
        self._temporary = temporary
        self._final = final
        self._header_size = header_size
        self._data_size = data_size
        # threads append to it, which is atomic
        self._digests: list[int] = []
        with named(temporary, OutputError):
            temporary.unlink(missing_ok=True)
            self._file = create_to_write(temporary)
            self._file.truncate(header_size + data_size)

    def place(self, offset: int) -> tuple[Path, int]:
        """Returns the file and position where data is for now, to read it back."""
        return self._temporary, self._header_size + offset

    def write(self, offset: int, data: memoryview) -> None:
        """Writes bytes at an offset from the end of the header. May be called from any thread."""
        position = self._header_size + offset
        self._place(position, data)
        self._digests.append(digest_of_piece(data, position))

    def _place(self, position: int, data: memoryview) -> None:
        with named(self._final, OutputError):
            while data:
                count = self._file.write(data, position)
                data = data[count:]
                position += count

    def finish(
        self, entries: Iterable[tuple[str, str, tuple[int, ...], int, int]], tail: bytes
    ) -> int:
        """Writes the tail, syncs and checks the file, names it, and returns its size in bytes."""
        entries = list(entries)
        header = build_header(entries, reserve=self._header_size)
        if len(header) != self._header_size:
            raise AssertionError(
                f"{self._final}: header of {len(header)} bytes, {self._header_size} were reserved"
            )
        self.write(-self._header_size, memoryview(header))
        self.write(self._data_size, memoryview(tail))
        size = self._header_size + self._data_size + len(tail)
        ranges = {name: (start, stop) for name, _, _, start, stop in entries}
        with named(self._final, OutputError):
            self._file.truncate(size)
            self._file.sync()
            self.close()
            self._check(ranges, size)
            self._temporary.replace(self._final)
        self.digest = sum_up(self._digests)
        return size

    def _check(self, ranges: dict[str, tuple[int, int]], size: int) -> None:
        """Reads the header back."""
        # refuses holes, overlaps and a wrong file size
        header = read_header(self._temporary)
        found = {}
        for tensor in header:
            start = tensor.start - self._header_size
            stop = tensor.stop - self._header_size
            found[tensor.name] = (start, stop)
        if self._temporary.stat().st_size != size or found != ranges:
            raise OutputError(
                f"{self._final}: the header read back is not the one written; is the disk failing?",
                path=self._final,
            )

    def close(self) -> None:
        """Closes the file. One that is not finished keeps its temporary name."""
        self._file.close()


def write_file(
    path: Path, chunks: Iterable[bytes], *, folder: Path | None = None, mode: int = 0o666
) -> None:
    """Writes a file so that it exists whole or not at all.

    What is not whole yet is in `folder`, which is on the same disk.
    """
    if folder is None:
        folder = path.parent
    # a name that nobody can foresee, and that nobody has: not even as a link to another file
    temporary = folder / f".{path.name[:40]}.{os.urandom(8).hex()}.partial"
    with named(path, OutputError):
        descriptor = create(temporary, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.writelines(chunks)
                file.flush()
                sync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_result(path: Path, content: bytes) -> None:
    """Writes a file that the user has named.

    A pipe, a device or the target of a link is written into; a file appears whole or not at all.
    """
    if not path.is_symlink() and (path.is_file() or not path.exists()):
        write_file(path, [content])
        return
    with named(path, OutputError):
        path.write_bytes(content)
