"""The output folder while a run is in progress: one run at a time, resumable, never mistaken for a finished checkpoint.

    OUT/.nf4conv/lock       held for as long as a process works here
    OUT/.nf4conv/run.json   the fingerprint of the run, and a line for each shard that is finished
    OUT/.nf4conv/*.partial  shards being written
    OUT/.nf4conv/source     source files being streamed
    OUT/*.safetensors       finished shards
    OUT/config.json         last of all: without it no loader takes the folder for a model

A rerun with the same fingerprint keeps the finished shards and makes the rest; with another it is refused. A finished
shard is kept if it still is what was written, and the source what it was when it was read.
"""

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import compress
from pathlib import Path
from typing import Any, Final, NamedTuple

from nf4conv.checkpoint.crc32 import crc32_of_file
from nf4conv.checkpoint.reader import digest_of, read_chunks
from nf4conv.checkpoint.writer import ShardWriter, sync_folder, write_file
from nf4conv.errors import OutputError, SourceError, named

CHECKSUMS: Final = "SHA256SUMS"
WORK_FOLDER: Final = ".nf4conv"
_RECORD: Final = "run.json"
_MARKS: Final = ("config.json", "model_index.json", "adapter_config.json")
"""By these, and by an index, a loader takes a folder for something whole."""
_READS_AT_A_TIME: Final = 4


class FinishedFile(NamedTuple):
    """A shard that is complete."""

    size: int  # bytes
    crc32: int  # of its content
    sha256: str | None  # hexadecimal; None when no checksums were asked for


class Workspace:
    """An output folder that this process has locked; use it as a context manager.

    Args:
        out: the folder; made if it does not exist.
        fingerprint: whatever decides the bytes of the result, as JSON values: source, options, versions.
        stamps: what else must be as it was for finished shards to be kept, as JSON values; None for nothing.
        overwrite: whether to delete what is there.
        checksum: whether to write SHA256SUMS.

    Raises:
        OutputError: the folder holds something else, another run, or a run with another fingerprint.
    """

    def __init__(
        self, out: Path, fingerprint: Mapping[str, Any], stamps: Any = None, *, overwrite: bool, checksum: bool
    ) -> None:
        self.out = out
        self._checksum = checksum
        self._written: dict[str, str] = {}
        self._guard = threading.Lock()
        self._work = out / WORK_FOLDER
        self.downloads = self._work / "source"  # for source files that are fetched while the run needs them
        self._fingerprint, self._stamps = json.loads(json.dumps([fingerprint, stamps]))
        self.finished: dict[str, FinishedFile] = {}  # the shards that are complete, by name
        with named(out, OutputError, inside=True):
            self._check_folder(overwrite)
            self._lock = self._acquire()
            try:
                self._load(overwrite)
            except BaseException:
                os.close(self._lock)
                raise

    def _check_folder(self, overwrite: bool) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise OutputError(f"{self.out}: exists and is not a folder")
        if self._work.is_symlink():
            raise OutputError(f"{self._work}: is a link, which no run of nf4conv leaves; remove it")
        occupied = self.out.is_dir() and any(self.out.iterdir())
        if occupied and not self._work.is_dir() and not overwrite:
            raise OutputError(f"{self.out}: exists and is not empty; choose another folder, or --overwrite")
        if occupied and overwrite and not _looks_like_checkpoint(self.out):
            raise OutputError(f"{self.out}: does not look like a checkpoint, so --overwrite will not delete it")

    def _acquire(self) -> int:
        """The lock, which is held as long as it is open; not one that a run which ends has just removed."""
        while True:
            with suppress(FileExistsError):  # also of one that is removed at this moment
                self._work.mkdir(parents=True)
            with suppress(FileNotFoundError):
                lock = os.open(self._work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.path.samestat(os.fstat(lock), (self._work / "lock").stat()):
                        return lock
                except FileNotFoundError:
                    pass
                except OSError as error:
                    os.close(lock)
                    raise OutputError(f"{self.out}: another nf4conv is writing here") from error
                os.close(lock)

    def _load(self, overwrite: bool) -> None:
        if overwrite:
            self._clear()
        elif is_unfinished(self.out):
            before, stamps, shards = self._read_record(self._work / _RECORD)
            self._compare(before)
            if stamps == self._stamps:
                with ThreadPoolExecutor(_READS_AT_A_TIME) as pool:
                    kept = pool.map(self._is_intact, shards, shards.values())
                    self.finished = dict(compress(shards.items(), kept))
        elif {entry.name for entry in self.out.iterdir()} - {WORK_FOLDER}:
            self._remove_work_folder()  # all that an earlier run, complete but for this, had left to do
            raise OutputError(f"{self.out}: exists and is not empty; choose another folder, or --overwrite")
        self._save()

    def _is_intact(self, name: str, file: FinishedFile) -> bool:
        path = self.out / name
        return path.is_file() and path.stat().st_size == file.size and crc32_of_file(path) == file.crc32

    def _read_record(self, record: Path) -> tuple[Mapping[str, Any], Any, dict[str, FinishedFile]]:
        try:
            run, *lines = record.read_bytes().split(b"\n")
            before = json.loads(run)
            fingerprint, stamps = dict(before["fingerprint"]), before["stamps"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise OutputError(f"{record}: is damaged, so the run cannot be resumed; --overwrite starts anew") from error
        shards = {}
        for line in lines:
            with suppress(ValueError, TypeError, KeyError, RecursionError):  # as a run that is killed leaves the last
                shard = json.loads(line)
                shards[str(shard["name"])] = FinishedFile(int(shard["size"]), int(shard["crc32"]), shard["sha256"])
        return fingerprint, stamps, shards

    def _compare(self, before: Mapping[str, Any]) -> None:
        changed = [key for key in {**before, **self._fingerprint} if before.get(key) != self._fingerprint.get(key)]
        if changed:
            key = changed[0]
            raise OutputError(
                f"{self.out}: holds an unfinished run that differs in {', '.join(changed)} "
                f"({key} was {_short(before.get(key))}, is {_short(self._fingerprint.get(key))}); "
                "repeat that command to resume it, or --overwrite to start anew"
            )

    def _clear(self) -> None:
        files = [Path(folder, name) for folder, _, names in os.walk(self.out) for name in names]
        marks = [path for path in files if path.name in _MARKS or path.name.endswith(".index.json")]
        for path in sorted(marks, key=lambda path: (len(path.parts), path.name not in _MARKS)):
            path.unlink()  # first: nothing may stand beside them that is not whole
        sync_folder(self.out)
        for entry in self.out.iterdir():
            if entry.name == WORK_FOLDER:
                self._remove_leftovers(keep=("lock",))
            else:
                _remove(entry)

    def _remove_leftovers(self, keep: tuple[str, ...]) -> None:
        for leftover in self._work.iterdir():
            if leftover.name not in keep:
                _remove(leftover)

    def _remove_work_folder(self) -> None:
        self._remove_leftovers(keep=("lock", _RECORD))
        (self._work / _RECORD).unlink(missing_ok=True)  # until then an interrupted run is completed by the next
        (self._work / "lock").unlink()
        with suppress(OSError):  # a run that has come in since finds out itself that there is nothing to do
            self._work.rmdir()

    def _save(self) -> None:
        """Write the record anew, with what is finished now."""
        run = json.dumps({"fingerprint": self._fingerprint, "stamps": self._stamps})
        lines = (run, *(_line(name, file) for name, file in self.finished.items()))
        write_file(self._work / _RECORD, [f"{line}\n".encode() for line in lines], folder=self._work)

    def forget(self) -> None:
        """Take no shard for finished, so that all are written again."""
        self.finished = {}
        with named(self.out, OutputError, inside=True):
            (self.out / "config.json").unlink(missing_ok=True)  # of a run that ended between its last two steps
            self._save()

    def check_space(self, needed: int) -> None:
        """Refuse by an OutputError, before the first byte, what the disk has less room for than the bytes `needed`.

        What unfinished shards of an earlier try take is not free but will be.
        """
        leftovers = (*self._work.glob("*.partial"), *self.downloads.rglob("*"))
        reusable = sum(leftover.stat().st_blocks * 512 for leftover in leftovers)
        free = shutil.disk_usage(self.out).free + reusable
        if needed > free:
            raise OutputError(f"{self.out}: the result takes {needed:,} bytes but the disk has only {free:,} free")

    def open_shard(self, name: str, header_size: int, data_size: int) -> ShardWriter:
        return ShardWriter(self._work / f"{name}.partial", self.out / name, header_size, data_size)

    def record(self, name: str, size: int, crc32: int | None = None) -> None:
        """Note that a shard is complete; without its CRC-32 it is read for that. May be called from any thread."""
        path = self.out / name
        with named(path, OutputError, inside=True):
            crc32 = crc32_of_file(path) if crc32 is None else crc32
            finished = FinishedFile(size, crc32, digest_of(path) if self._checksum else None)
            with self._guard:
                self.finished[name] = finished
                record = os.open(self._work / _RECORD, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    os.write(record, f"{_line(name, finished)}\n".encode())
                finally:
                    os.close(record)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file of the result."""
        self._write(name, [content])

    def copy(self, name: str, source: Path) -> None:
        """Copy a file of the source, of any size, into the result; a SourceError if it cannot be read."""
        self._write(name, read_chunks(source))

    def _write(self, name: str, chunks: Iterable[bytes]) -> None:
        path, digest = self.out / name, hashlib.sha256()
        with named(path, OutputError, inside=True):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, _digested(chunks, digest), folder=self._work)
        self._written[name] = digest.hexdigest()

    def complete(self, last: Mapping[str, bytes]) -> None:
        """Write the files that make the folder a checkpoint, make everything durable and remove the work files."""
        if self._checksum:
            self.write(CHECKSUMS, self._manifest(last))
        with named(self.out, OutputError, inside=True):
            sync_folder(self.out)  # before a loader could take the folder for complete
            for name, content in last.items():
                self.write(name, content)
            sync_folder(self.out)
            self._remove_work_folder()

    def _manifest(self, last: Mapping[str, bytes]) -> bytes:
        sums = {name: file.sha256 or digest_of(self.out / name) for name, file in self.finished.items()}
        sums |= self._written | {name: hashlib.sha256(content).hexdigest() for name, content in last.items()}
        return b"".join(f"{sums[name]}  ".encode() + os.fsencode(name) + b"\n" for name in sorted(sums))

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)


def is_unfinished(out: Path) -> bool:
    """Whether a run into a folder has begun and not ended."""
    return (out / WORK_FOLDER / _RECORD).is_file()


def tidy(out: Path) -> None:
    """Remove the work folder beside a result that is complete, as a run leaves it that is killed at its very end."""
    if (out / WORK_FOLDER).is_dir():
        with suppress(OutputError):  # which says that the folder is not empty; or that another run is at work there
            Workspace(out, {}, overwrite=False, checksum=False)


def _line(name: str, file: FinishedFile) -> str:
    return json.dumps({"name": name, **file._asdict()})


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _digested(chunks: Iterable[bytes], digest: "hashlib._Hash") -> Iterator[bytes]:
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


def check_finished(folder: Path) -> None:
    """Refuse by a SourceError to read a folder in which a run has not ended, and say how to go on."""
    if not is_unfinished(folder) or _is_model(folder):
        return
    _, *shards = (folder / WORK_FOLDER / _RECORD).read_bytes().split(b"\n")
    finished = sum(shard != b"" for shard in shards)
    raise SourceError(
        f"{folder}: an unfinished run of nf4conv, in which {finished:,} files are finished; the same command as before "
        "goes on with it, and --overwrite starts anew"
    )


def _looks_like_checkpoint(folder: Path) -> bool:
    return _is_model(folder) or (folder / WORK_FOLDER).is_dir() or any(folder.glob("*.safetensors"))


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "model_index.json"))


def _short(value: object) -> str:
    text = "not given" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
