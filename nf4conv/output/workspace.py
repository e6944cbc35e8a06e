"""The output folder while a run is in progress: one run at a time, resumable, never mistaken for a
finished checkpoint.

    OUT/.nf4conv/lock               held for as long as a process works here
    OUT/.nf4conv/run.json           the fingerprint of the run
    OUT/.nf4conv/shards/NAME.json   of each shard that is finished, see FinishedFile
    OUT/.nf4conv/*.partial          shards being written
    OUT/.nf4conv/source             source files being streamed
    OUT/*.safetensors               finished shards
    OUT/config.json                 last of all: without it no loader takes the folder for a model

A folder that several processes fill has no lock, see parts.py.

A rerun with the same fingerprint keeps the finished shards and makes the rest; with another it is
refused. A finished shard is kept if it still is what was written, and the source what it was when
it was read.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import compress
from pathlib import Path
from typing import Any, Final

from nf4conv.errors import OutputError, named
from nf4conv.output.crc32 import crc32_of_file
from nf4conv.output.writer import ShardWriter, sync_folder, write_file
from nf4conv.sources.reader import digest_of, read_chunks
from nf4conv.sources.unfinished import (
    HOW_TO_FINISH,
    PARTS,
    RECORD,
    SHARDS,
    WORK_FOLDER,
    FinishedFile,
    finished_shards,
    is_model,
    is_unfinished,
    record_name,
)

CHECKSUMS: Final = "SHA256SUMS"

_MARKS: Final = ("config.json", "model_index.json", "adapter_config.json")
"""By these, and by an index, a loader takes a folder for something whole."""
_READS_AT_A_TIME: Final = 4


class OutputFolder:
    """A folder that becomes a checkpoint: shards get their names one by one, and the last files
    make it whole.

    Args:
        out: the folder.
        private: the folder in its work folder in which only this process writes.
        checksum: whether to write SHA256SUMS.
    """

    def __init__(self, out: Path, private: Path, *, checksum: bool) -> None:
        self.out = out
        self.finished: dict[str, FinishedFile] = {}  # the shards that are complete, by name
        self.downloads = (
            private / "source"
        )  # for source files that are fetched while the run needs them
        self._private = private
        self._checksum = checksum
        self._written: dict[str, str] = {}
        self._work = out / WORK_FOLDER
        self._plan = ""  # SHA-256 of run.json

    def check_occupied(self, *, overwrite: bool) -> None:
        """Refuse by an OutputError what is neither empty nor in work, nor, with `overwrite`, a
        checkpoint.
        """
        if self.out.exists() and not self.out.is_dir():
            raise OutputError(f"{self.out}: exists and is not a folder")
        if self._work.is_symlink():
            raise OutputError(f"{self._work}: is a link, which no run of nf4conv leaves; remove it")
        occupied = self.out.is_dir() and any(self.out.iterdir())
        if occupied and not self._work.is_dir() and not overwrite:
            raise OutputError(
                f"{self.out}: exists and is not empty; choose another folder, or --overwrite"
            )
        if occupied and overwrite and not _looks_like_checkpoint(self.out):
            raise OutputError(
                f"{self.out}: does not look like a checkpoint, so --overwrite will not delete it"
            )

    def _is_intact(self, name: str, file: FinishedFile) -> bool:
        path = self.out / name
        return (
            path.is_file()
            and path.stat().st_size == file.size
            and crc32_of_file(path) == file.crc32
        )

    def intact(self, shards: Mapping[str, FinishedFile]) -> dict[str, FinishedFile]:
        """Those that are still what was written."""
        with ThreadPoolExecutor(_READS_AT_A_TIME) as pool:
            return dict(
                compress(shards.items(), pool.map(self._is_intact, shards, shards.values()))
            )

    def known(self, names: Iterable[str] | None = None) -> dict[str, FinishedFile]:
        """As `finished_shards`, but only those of this plan."""
        return {
            name: file
            for name, file in finished_shards(self.out, names).items()
            if file.plan == self._plan
        }

    def read_run(self) -> dict[str, Any]:
        """The content of run.json, which is an object with a fingerprint; an OutputError if it is
        damaged.
        """
        path = self._work / RECORD
        try:
            with named(path, OutputError):
                content = path.read_bytes()
            run: dict[str, Any] = json.loads(content)
            dict(run["fingerprint"], stamps=run["stamps"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise OutputError(
                f"{path}: is damaged, so the run cannot be resumed; --overwrite starts anew"
            ) from error
        self._plan = hashlib.sha256(content).hexdigest()
        return run

    def check_space(self, needed: int) -> None:
        """Refuse by an OutputError, before the first byte, what the disk has less room for than the
        bytes `needed`.

        What unfinished shards of an earlier try take is not free but will be.
        """
        leftovers = (*self._private.glob("*.partial"), *self.downloads.rglob("*"))
        reusable = sum(leftover.stat().st_blocks * 512 for leftover in leftovers)
        free = shutil.disk_usage(self.out).free + reusable
        if needed > free:
            raise OutputError(
                f"{self.out}: the result takes {needed:,} bytes but the disk has only {free:,} free"
            )

    def open_shard(self, name: str, header_size: int, data_size: int) -> ShardWriter:
        return ShardWriter(
            self._private / f"{name}.partial", self.out / name, header_size, data_size
        )

    def record(self, name: str, size: int, crc32: int | None = None, *beside: Any) -> None:
        """Note that a shard is complete; without its CRC-32 it is read for that. May be called from
        any thread.

        `beside` is what else a FinishedFile has, but for the plan.
        """
        path, record = self.out / name, self._work / SHARDS / record_name(name)
        with named(path, OutputError, inside=True):
            crc32 = crc32_of_file(path) if crc32 is None else crc32
            file = FinishedFile(size, crc32, digest_of(path) if self._checksum else None, *beside)
            sync_folder(path.parent)  # no record may outlive its shard
        content = {"name": name, **file._replace(plan=self._plan)._asdict()}
        write_file(record, [json.dumps(content).encode()], folder=self._private)
        self.finished[name] = file

    def write(self, name: str, content: bytes) -> None:
        """Write a small file of the result."""
        self._write(name, [content])

    def copy(self, name: str, source: Path) -> None:
        """Copy a file of the source, of any size, into the result; a SourceError if it cannot be
        read.
        """
        self._write(name, read_chunks(source))

    def _write(self, name: str, chunks: Iterable[bytes]) -> None:
        path, digest = self.out / name, hashlib.sha256()
        with named(path, OutputError, inside=True):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, _digested(chunks, digest), folder=self._private)
        self._written[name] = digest.hexdigest()

    def complete(self, last: Mapping[str, bytes]) -> None:
        """Write the files that make the folder a checkpoint, make everything durable and remove the
        work files.
        """
        if self._checksum:
            self.write(CHECKSUMS, self._manifest(last))
        with named(self.out, OutputError, inside=True):
            sync_folder(self.out)  # before a loader could take the folder for complete
            for name, content in last.items():
                self.write(name, content)
            sync_folder(self.out)
            self.remove_work_folder()

    def _manifest(self, last: Mapping[str, bytes]) -> bytes:
        sums = {
            name: file.sha256 or digest_of(self.out / name) for name, file in self.finished.items()
        }
        sums |= self._written | {
            name: hashlib.sha256(content).hexdigest() for name, content in last.items()
        }
        return b"".join(
            f"{sums[name]}  ".encode() + os.fsencode(name) + b"\n" for name in sorted(sums)
        )

    def _remove_leftovers(self) -> None:
        (self._work / RECORD).unlink(
            missing_ok=True
        )  # first: what is there without it is nothing to go on with
        for leftover in [path for path in self._work.iterdir() if path.name != "lock"]:
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(
                    leftover, ignore_errors=True
                )  # of which another process may remove the rest
            else:
                leftover.unlink(missing_ok=True)

    def remove_work_folder(self) -> None:
        """Leave nothing but the result."""
        with suppress(FileNotFoundError):  # another process has been faster
            self._remove_leftovers()
        (self._work / "lock").unlink(missing_ok=True)
        with suppress(
            OSError
        ):  # a run that has come in since finds out itself that there is nothing to do
            self._work.rmdir()


class Workspace(OutputFolder):
    """An output folder that this process has locked; use it as a context manager.

    Args:
        out: the folder; made if it does not exist.
        fingerprint: whatever decides the bytes of the result, as JSON values: source, options,
            versions.
        stamps: what else must be as it was for finished shards to be kept, as JSON values; None for
            nothing.
        overwrite: whether to delete what is there.
        checksum: whether to write SHA256SUMS.

    Raises:
        OutputError: the folder holds something else, another run, or a run with another
            fingerprint.
    """

    def __init__(
        self,
        out: Path,
        fingerprint: Mapping[str, Any],
        stamps: Any = None,
        *,
        overwrite: bool,
        checksum: bool,
    ) -> None:
        super().__init__(out, out / WORK_FOLDER, checksum=checksum)
        self._fingerprint, self._stamps = json.loads(json.dumps([fingerprint, stamps]))
        with named(out, OutputError, inside=True):
            self.check_occupied(overwrite=overwrite)
            self._lock = self._acquire()
            try:
                self._load(overwrite)
            except BaseException:
                os.close(self._lock)
                raise

    def _acquire(self) -> int:
        """The lock, which is held as long as it is open; not one that a run which ends has just
        removed.
        """
        while True:
            with suppress(FileExistsError):  # also of one that is removed at this moment
                self._work.mkdir(parents=True)
            with suppress(FileNotFoundError):
                lock = os.open(
                    self._work / "lock",
                    os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                    0o666,
                )
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
            before = self.read_run()
            if PARTS in before["fingerprint"]:
                raise OutputError(
                    f"{self.out}: is filled in parts; {HOW_TO_FINISH}, or --overwrite to start anew"
                )
            how = "repeat that command to resume it, or --overwrite to start anew"
            compare(self.out, before["fingerprint"], self._fingerprint, how)
            self.finished = self.intact(self.known()) if before["stamps"] == self._stamps else {}
        elif {entry.name for entry in self.out.iterdir()} - {WORK_FOLDER}:
            # all that an earlier run, complete but for this, had left to do
            self.remove_work_folder()
            raise OutputError(
                f"{self.out}: exists and is not empty; choose another folder, or --overwrite"
            )
        self._save()

    def _clear(self) -> None:
        files = [Path(folder, name) for folder, _, names in os.walk(self.out) for name in names]
        marks = [path for path in files if path.name in _MARKS or path.name.endswith(".index.json")]
        for path in sorted(marks, key=lambda path: (len(path.parts), path.name not in _MARKS)):
            path.unlink()  # first: nothing may stand beside them that is not whole
        sync_folder(self.out)
        for entry in self.out.iterdir():
            if entry.name == WORK_FOLDER:
                self._remove_leftovers()
            elif entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _save(self) -> None:
        content = json.dumps({"fingerprint": self._fingerprint, "stamps": self._stamps}).encode()
        write_file(self._work / RECORD, [content], folder=self._work)
        self._plan = hashlib.sha256(content).hexdigest()
        (self._work / SHARDS).mkdir(exist_ok=True)

    def forget(self) -> None:
        """Take no shard for finished, so that all are written again."""
        self.finished = {}
        with named(self.out, OutputError, inside=True):
            (self.out / "config.json").unlink(
                missing_ok=True
            )  # of a run that ended between its last two steps
            shutil.rmtree(self._work / SHARDS)
            (self._work / SHARDS).mkdir()

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)


def compare(out: Path, before: Mapping[str, Any], now: Mapping[str, Any], advice: str) -> None:
    """Refuse by an OutputError a run whose fingerprint is not that of the one that has begun; says
    in what.
    """
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if changed:
        key = changed[0]
        raise OutputError(
            f"{out}: holds an unfinished run that differs in {', '.join(changed)} "
            f"({key} was {short(before.get(key))}, is {short(now.get(key))}); {advice}"
        )


def tidy(out: Path) -> None:
    """Remove the work folder beside a result that is complete, as a run leaves it that is killed at
    its very end.
    """
    if (out / WORK_FOLDER).is_dir():
        with suppress(
            OutputError
        ):  # which says that the folder is not empty; or that another run is at work there
            Workspace(out, {}, overwrite=False, checksum=False)


def _digested(chunks: Iterable[bytes], digest: "hashlib._Hash") -> Iterator[bytes]:
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


def _looks_like_checkpoint(folder: Path) -> bool:
    return is_model(folder) or (folder / WORK_FOLDER).is_dir() or any(folder.glob("*.safetensors"))


def short(value: object) -> str:
    """A JSON value in few characters."""
    text = "not given" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
