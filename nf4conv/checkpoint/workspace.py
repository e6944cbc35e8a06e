"""The output folder while a run is in progress: one run at a time, resumable, never mistaken for a finished checkpoint.

    OUT/.nf4conv/lock       held for as long as a process works here
    OUT/.nf4conv/run.json   the fingerprint of the run, and the shards that are finished
    OUT/.nf4conv/*.partial  shards being written
    OUT/.nf4conv/source     source files being streamed
    OUT/*.safetensors       finished shards
    OUT/config.json         last of all: without it no loader takes the folder for a model

A rerun with the same fingerprint keeps the finished shards and makes the rest; with another it is refused.
"""

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from nf4conv.checkpoint.reader import read_chunks
from nf4conv.checkpoint.writer import ShardWriter, sync_folder, write_file
from nf4conv.errors import OutputError

CHECKSUMS: Final = "SHA256SUMS"
WORK_FOLDER: Final = ".nf4conv"
_RECORD: Final = "run.json"


class FinishedFile(NamedTuple):
    """A shard that is complete.

    Attributes:
        size: bytes.
        sha256: hexadecimal; None when no checksums were asked for.
    """

    size: int
    sha256: str | None


class Workspace:
    """An output folder that this process has locked; use it as a context manager.

    Args:
        out: the folder; made if it does not exist.
        fingerprint: whatever decides the bytes of the result, as JSON values: source, options, versions.
        overwrite: whether to delete what is there.
        checksum: whether to write SHA256SUMS.

    Attributes:
        out: the folder.
        finished: the shards that are complete, by name.
        downloads: a folder for source files that are fetched while the run needs them.

    Raises:
        OutputError: the folder holds something else, another run, or a run with another fingerprint.
    """

    def __init__(self, out: Path, fingerprint: Mapping[str, Any], *, overwrite: bool, checksum: bool) -> None:
        self.out = out
        self._checksum = checksum
        self._written: dict[str, str] = {}
        self._guard = threading.Lock()
        self._work = out / WORK_FOLDER
        self.downloads = self._work / "source"
        self._fingerprint = json.loads(json.dumps(fingerprint))
        self.finished: dict[str, FinishedFile] = {}
        with _as_output_error(out):
            self._check_folder(overwrite)
            self._work.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise OutputError(f"{self.out}: another nf4conv is writing here") from error
                self._load(overwrite)
            except BaseException:
                os.close(self._lock)
                raise

    def _check_folder(self, overwrite: bool) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise OutputError(f"{self.out}: exists and is not a folder")
        occupied = self.out.is_dir() and any(self.out.iterdir())
        if occupied and not self._work.is_dir() and not overwrite:
            raise OutputError(f"{self.out}: exists and is not empty; choose another folder, or --overwrite")
        if occupied and overwrite and not _looks_like_checkpoint(self.out):
            raise OutputError(f"{self.out}: does not look like a checkpoint, so --overwrite will not delete it")

    def _load(self, overwrite: bool) -> None:
        record = self._work / _RECORD
        if overwrite:
            self._clear()
        elif record.is_file():
            before, shards = self._read_record(record)
            self._compare(before)
            self.finished = {
                name: file
                for name, file in shards.items()
                if (self.out / name).is_file() and (self.out / name).stat().st_size == file.size
            }
        elif {entry.name for entry in self.out.iterdir()} - {WORK_FOLDER}:
            self._remove_work_folder()  # all that an earlier run, complete but for this, had left to do
            raise OutputError(f"{self.out}: exists and is not empty; choose another folder, or --overwrite")
        self._save()

    def _read_record(self, record: Path) -> tuple[Mapping[str, Any], Mapping[str, FinishedFile]]:
        try:
            run = json.loads(record.read_bytes())
            shards = {name: FinishedFile(size, sha256) for name, (size, sha256) in run["shards"].items()}
            return dict(run["fingerprint"]), shards
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise OutputError(f"{record}: is damaged, so the run cannot be resumed; --overwrite starts anew") from error

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
        for entry in self.out.iterdir():
            if entry.name == WORK_FOLDER:
                self._remove_leftovers(keep=("lock",))
            elif entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _remove_leftovers(self, keep: tuple[str, ...] = (_RECORD,)) -> None:
        for leftover in self._work.iterdir():
            if leftover.is_dir():
                shutil.rmtree(leftover)
            elif leftover.name not in keep:
                leftover.unlink()

    def _remove_work_folder(self) -> None:
        self._remove_leftovers()
        (self._work / _RECORD).unlink(missing_ok=True)  # until then an interrupted run is completed by the next
        self._work.rmdir()

    def _save(self) -> None:
        run = {"fingerprint": self._fingerprint, "shards": self.finished}
        write_file(self._work / _RECORD, [json.dumps(run, indent=1).encode()])

    def forget(self) -> None:
        """Take no shard for finished, so that all are written again."""
        self.finished = {}
        with _as_output_error(self.out):
            (self.out / "config.json").unlink(missing_ok=True)  # of a run that ended between its last two steps
            self._save()

    def check_space(self, needed: int) -> None:
        """Refuse before the first byte what cannot end well.

        Args:
            needed: bytes still to be written; what unfinished shards of an earlier try take is not free but will be.

        Raises:
            OutputError: the disk has less room.
        """
        leftovers = (*self._work.glob("*.partial"), *self.downloads.rglob("*"))
        reusable = sum(leftover.stat().st_blocks * 512 for leftover in leftovers)
        free = shutil.disk_usage(self.out).free + reusable
        if needed > free:
            raise OutputError(f"{self.out}: the result takes {needed:,} bytes but the disk has only {free:,} free")

    def open_shard(self, name: str, header_size: int, data_size: int) -> ShardWriter:
        return ShardWriter(self._work / f"{name}.partial", self.out / name, header_size, data_size)

    def record(self, name: str, size: int) -> None:
        """Note that a shard is complete. May be called from any thread."""
        with _as_output_error(self.out / name):
            finished = FinishedFile(size, _sha256(self.out / name) if self._checksum else None)
        with self._guard:
            self.finished[name] = finished
            self._save()

    def write(self, name: str, content: bytes) -> None:
        """Write a small file of the result."""
        path = self.out / name
        with _as_output_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, [content])
        self._written[name] = hashlib.sha256(content).hexdigest()

    def copy(self, name: str, source: Path) -> None:
        """Copy a file of the source, of any size, into the result.

        Raises:
            SourceError: it cannot be read.
            OutputError: the disk is full or failing.
        """
        path = self.out / name
        with _as_output_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        write_file(path, _digested(read_chunks(source), digest))
        self._written[name] = digest.hexdigest()

    def complete(self, last: Mapping[str, bytes]) -> None:
        """Write the files that make the folder a checkpoint, make everything durable and remove the work files."""
        if self._checksum:
            self.write(CHECKSUMS, self._manifest(last))
        with _as_output_error(self.out):
            sync_folder(self.out)  # before a loader could take the folder for complete
            for name, content in last.items():
                self.write(name, content)
            sync_folder(self.out)
            self._remove_work_folder()

    def _manifest(self, last: Mapping[str, bytes]) -> bytes:
        sums = {name: file.sha256 or _sha256(self.out / name) for name, file in self.finished.items()}
        sums |= self._written | {name: hashlib.sha256(content).hexdigest() for name, content in last.items()}
        return "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode()

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)


@contextmanager
def _as_output_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{error.filename or path}: {error.strerror or error}") from error


def _digested(chunks: Iterable[bytes], digest: "hashlib._Hash") -> Iterator[bytes]:
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()


def _looks_like_checkpoint(folder: Path) -> bool:
    return (
        (folder / WORK_FOLDER).is_dir()
        or (folder / "config.json").is_file()
        or (folder / "model_index.json").is_file()
        or any(folder.glob("*.safetensors"))
    )


def _short(value: object) -> str:
    text = "not given" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
