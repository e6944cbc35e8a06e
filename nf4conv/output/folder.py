"""Fills an output folder step by step: finished shards, their records, and the last files.

OUT/.nf4conv/run.json           what the run makes: its fingerprint
OUT/.nf4conv/shards/NAME.json   a record of each shard that is finished, see FinishedFile
OUT/*.safetensors               finished shards
OUT/config.json                 last of all: without it no loader takes the folder for a model
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Final, Self

from nf4conv.errors import OutputError, SourceError, named
from nf4conv.output.digest import digest_of_file
from nf4conv.output.writer import ShardWriter, write_file
from nf4conv.sources.header import read_header
from nf4conv.sources.reader import read_small
from nf4conv.sources.record import MAKING, as_bytes
from nf4conv.sources.unfinished import (
    LARGEST_RECORD,
    RECORD,
    SHARDS,
    WORK_FOLDER,
    FinishedFile,
    describe_finished,
    finished_shards,
    is_model,
    record_name,
)
from nf4conv.system.files import space_taken, sync_folder
from nf4conv.system.folders import is_link, leads_elsewhere, remove

LOCK: Final = "lock"

_READS_AT_A_TIME: Final = 4


class OutputFolder:
    """Holds a folder that becomes a checkpoint; what holds one is a context manager.

    Shards get their names one by one, and the last files make it whole.

    Attributes:
        out: the folder.
        finished: the shards that are complete, by name.
        downloads: a folder for source files that are fetched while the run needs them.
    """

    def __init__(self, out: Path, private: Path) -> None:
        self.out = out
        self.finished: dict[str, FinishedFile] = {}
        self.downloads = private / "source"
        self._private = private
        self._work = out / WORK_FOLDER
        # SHA-256 of run.json
        self._plan = ""

    def __enter__(self) -> Self:
        return self

    @property
    def size(self) -> int:
        """Bytes of the shards that are finished so far; other threads may finish one meanwhile."""
        return sum(file.size for file in dict(self.finished).values())

    def check_occupied(self, *, overwrite: bool) -> None:
        """Checks that the folder may be written to."""
        if self.out.exists() and not self.out.is_dir():
            raise OutputError(f"{self.out}: exists and is not a folder", path=self.out)
        self.check_links()
        is_occupied = self.out.is_dir() and any(self.out.iterdir())
        if not is_occupied or self._work.is_dir():
            return
        if not overwrite:
            raise OutputError(
                f"{self.out}: exists and is not empty; choose another folder, or --overwrite",
                path=self.out,
            )
        if not is_model(self.out) and not any(self.out.glob("*.safetensors")):
            raise OutputError(
                f"{self.out}: does not look like a checkpoint, so --overwrite will not delete it",
                path=self.out,
            )

    def check_links(self) -> None:
        """Checks that the folder of the run's state, and every folder in it, is no link.

        No run leaves one. Through a link, files outside would be written and removed.
        """
        with named(self._work, OutputError):
            folders = [self._work]
            # there is no such folder yet, or a run that ends has just removed it
            with suppress(FileNotFoundError, NotADirectoryError):
                folders += [path for path in self._work.iterdir() if path.is_dir()]
            for path in folders:
                if is_link(path):
                    raise OutputError(
                        f"{path}: is a link, which no run of nf4conv leaves; remove it", path=path
                    )

    def intact(self, shards: Mapping[str, FinishedFile]) -> dict[str, FinishedFile]:
        """Returns the shards that are still what was written, after reading all of them."""

        def is_intact(name: str) -> bool:
            path, file = self.out / name, shards[name]
            if is_link(path) or not path.is_file() or path.stat().st_size != file.size:
                return False
            return digest_of_file(path) == file.digest

        with ThreadPoolExecutor(_READS_AT_A_TIME) as pool:
            found = zip(shards.items(), pool.map(is_intact, shards), strict=True)
            return dict(shard for shard, verdict in found if verdict)

    def known(self, names: Iterable[str] | None = None) -> dict[str, FinishedFile]:
        """Returns the shards of this plan that have been recorded as finished, by name."""
        recorded = finished_shards(self.out, names)
        return {name: file for name, file in recorded.items() if file.plan == self._plan}

    def read_run(self) -> dict[str, Any]:
        """Returns the fingerprint in run.json, whose plan this folder then belongs to."""
        path = self._work / RECORD
        try:
            content = read_small(path, LARGEST_RECORD)
            run = json.loads(content)
            begun = dict(run["fingerprint"])
        except (SourceError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise OutputError(
                f"{path}: is damaged, so the run cannot be resumed; --overwrite starts anew",
                path=path,
            ) from error
        self._plan = hashlib.sha256(content).hexdigest()
        return begun

    def check_space(self, needed: int) -> None:
        """Checks before the first byte that the disk has room for the result.

        What unfinished shards of an earlier try take is not free, but will be.
        """
        leftovers = (*self._private.glob("*.partial"), *self.downloads.rglob("*"))
        reusable = sum(space_taken(leftover) for leftover in leftovers)
        free = shutil.disk_usage(self.out).free + reusable
        if needed > free:
            raise OutputError(
                f"{self.out}: the result takes {needed:,} bytes but the disk has only "
                f"{free:,} free",
                path=self.out,
            )

    def open_shard(self, name: str, header_size: int, data_size: int) -> ShardWriter:
        """Begins to write a shard under a temporary name."""
        self.require_name(name)
        temporary = self._private / f"{name}.partial"
        return ShardWriter(temporary, self.out / name, header_size, data_size)

    def record(
        self,
        name: str,
        size: int,
        digest: int,
        source_bytes: int = 0,
        verified: Mapping[str, Any] | None = None,
    ) -> None:
        """Records that a shard is complete. May be called from any thread."""
        with named(self.out / name, OutputError, inside=True):
            sync_folder(self.out)  # no record may outlive its shard
        file = FinishedFile(size, digest, source_bytes, verified)
        content = describe_finished(name, file._replace(plan=self._plan))
        record = self._work / SHARDS / record_name(name)
        write_file(record, [content], folder=self._private)
        self.finished[name] = file

    def require_name(self, name: str) -> None:
        """Refuses a path that may lead out of the folder, or through a link to another one."""
        path = self.out
        if leads_elsewhere(name):
            path /= name
            raise OutputError(f"{path}: such a name may lead out of the folder", path=path)
        for part in PurePosixPath(name).parts:
            path /= part
            if is_link(path) and path.is_dir():
                raise OutputError(f"{path}: is a link to another folder; remove it", path=path)

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """Writes a file of the result piece by piece."""
        path = self.out / name
        self.require_name(name)
        with named(path, OutputError, inside=True):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, chunks, folder=self._private)

    def finish(
        self,
        *,
        stem: str,
        card: str | None,
        record: Mapping[str, Any],
        config: bytes | None,
        verified: Mapping[str, Any] | None,
    ) -> None:
        """Writes the files beside shards that are all there, config.json last.

        Without a card, a config or a verification, each is None.
        """
        if len(self.finished) > 1:
            self.write(f"{stem}.safetensors.index.json", [self._index()])
        if card is not None:
            self.write("README.md", [card.encode(errors="backslashreplace")])
        if verified is not None:
            record = {**record, "verified": verified}
        self.write(MAKING, [as_bytes(record)])
        self.complete({} if config is None else {"config.json": config})

    def _index(self) -> bytes:
        """Returns the index of the shards, by their headers."""
        total = 0
        files = {}
        for name in self.finished:
            for tensor in read_header(self.out / name):
                total += tensor.nbytes
                files[tensor.name] = name
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()

    def complete(self, last: Mapping[str, bytes]) -> None:
        """Makes the folder a checkpoint, makes everything durable and removes the work files."""
        with named(self.out, OutputError, inside=True):
            sync_folder(self.out)  # before a loader could take the folder for complete
            for name, content in last.items():
                self.write(name, [content])
            sync_folder(self.out)
            self.remove_work_folder()

    def remove_work_folder(self) -> None:
        """Removes everything but the result."""
        with suppress(FileNotFoundError):  # another process has been faster
            self._remove_leftovers()
        self._prepare_removal_of_lock()
        with suppress(PermissionError):  # on Windows another process may hold it by now
            remove(self.out, WORK_FOLDER, LOCK)
        # a run that has come in since finds out itself that there is nothing to do
        with suppress(OSError):
            self._work.rmdir()

    def _prepare_removal_of_lock(self) -> None:
        """Does what the system wants done before the lock's file can be removed."""

    def _remove_leftovers(self) -> None:
        # first: what is there without it is nothing to go on with
        remove(self.out, WORK_FOLDER, RECORD)
        for leftover in list(self._work.iterdir()):
            if leftover.name != LOCK:
                # another process may be removing it, or writing into it
                with suppress(OSError):
                    remove(self.out, WORK_FOLDER, leftover.name)

    def remove_downloads(self) -> None:
        """Removes the source files that were fetched while the run needed them."""
        with suppress(OSError):
            remove(self.out, *self.downloads.relative_to(self.out).parts)


# --- whether two runs are the same ----------------------------------------------------------------


def require_same_run(
    out: Path, before: Mapping[str, Any], now: Mapping[str, Any], advice: str
) -> None:
    """Checks that a run makes what the one makes that has begun in the same folder."""
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if changed:
        first = changed[0]
        raise OutputError(
            f"{out}: holds an unfinished run that differs in {', '.join(changed)} ({first} was "
            f"{shortened(before.get(first))}, is {shortened(now.get(first))}); {advice}",
            path=out,
        )


def as_json(value: Any) -> Any:
    """Returns a value as it would be read back from JSON, to compare it with one that was."""
    return json.loads(json.dumps(value))


def shortened(value: object) -> str:
    """Returns a JSON value as a text of at most 60 characters."""
    if value is None:
        return "not given"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
