"""Locks an output folder for one run at a time, and resumes what an earlier run has begun.

    OUT/.nf4conv/lock               held for as long as a process works here
    OUT/.nf4conv/run.json           the fingerprint of the run
    OUT/.nf4conv/shards/NAME.json   a record of each shard that is finished, see FinishedFile
    OUT/.nf4conv/calibrated         finished blocks of a calibration
    OUT/.nf4conv/*.partial          shards being written
    OUT/.nf4conv/source             source files being streamed
    OUT/*.safetensors               finished shards
    OUT/config.json                 last of all: without it no loader takes the folder for a model

The folder is never mistaken for a finished checkpoint. A folder that several processes fill has no
lock, see shared_folder.py.

A rerun with the same fingerprint keeps the finished shards and makes the rest; one with another
fingerprint is refused. A finished shard is kept if it still is what was written.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from nf4conv.errors import OutputError, named
from nf4conv.output.folder import LOCK, OutputFolder, as_json, require_same_run
from nf4conv.output.writer import write_file
from nf4conv.sources.files import ADAPTER_CONFIG, MARKS_OF_MODELS
from nf4conv.sources.unfinished import RECORD, SHARDS, WORK_FOLDER, is_unfinished
from nf4conv.system.files import sync_folder
from nf4conv.system.folders import hold, open_lock, remove, remove_contents
from nf4conv.system.machine import IS_POSIX

_IS_HELD: Final = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK, 36)
"""Errors of a lock that somebody else holds; Windows says 36."""

_MARKS: Final = (*MARKS_OF_MODELS, ADAPTER_CONFIG)
"""Files by which a loader takes a folder for something whole, beside an index."""


class Workspace(OutputFolder):
    """Holds an output folder that this process has locked; use it as a context manager.

    The fingerprint is whatever decides the bytes of the result, as JSON values.
    """

    def __init__(self, out: Path, fingerprint: Mapping[str, Any], *, overwrite: bool) -> None:
        super().__init__(out, out / WORK_FOLDER)
        self._fingerprint = as_json(fingerprint)
        with named(out, OutputError, inside=True):
            self.check_occupied(overwrite=overwrite)
            self._lock: int | None = self._acquire()
            try:
                if overwrite:
                    self._clear()
                else:
                    self._resume()
                self._save()
            except BaseException:
                self._unlock()
                raise

    def __exit__(self, *_: object) -> None:
        self._unlock()

    def _unlock(self) -> None:
        """Lets the lock go. Does nothing the second time."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _prepare_removal_of_lock(self) -> None:
        if not IS_POSIX:  # Windows removes no file that is open
            self._unlock()

    def _acquire(self) -> int:
        """Returns the descriptor of the lock, which is held for as long as it is open."""
        while True:
            with suppress(FileExistsError):  # also where it is being removed at this moment
                self._work.mkdir(parents=True)
            lock = self._try_to_lock()
            if lock is not None:
                return lock

    def _try_to_lock(self) -> int | None:
        """Returns the descriptor of the lock; None if a run that ends has just removed the file."""
        path = self._work / LOCK
        try:
            lock = open_lock(path)
        except FileNotFoundError:
            return None
        try:
            hold(lock)
        except OSError as error:
            os.close(lock)
            if error.errno not in _IS_HELD:
                raise OutputError(
                    f"{path}: cannot be locked ({error.strerror or error}), so nothing would keep "
                    f"a second run out; choose a folder on a file system that has locks",
                    path=path,
                ) from error
            raise OutputError(
                f"{self.out}: another nf4conv is writing here", path=self.out
            ) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        os.close(lock)
        return None

    def _resume(self) -> None:
        """Takes over what an earlier run of the same fingerprint has finished."""
        if is_unfinished(self.out):
            before = self.read_run()
            advice = "repeat that command to resume it, or --overwrite to start anew"
            require_same_run(self.out, before, self._fingerprint, advice)
            self.finished = self.intact(self.known())
            return
        if any(entry.name != WORK_FOLDER for entry in self.out.iterdir()):
            # all that was left to do for an earlier run, which is complete but for this
            self.remove_work_folder()
            raise OutputError(
                f"{self.out}: exists and is not empty; choose another folder, or --overwrite",
                path=self.out,
            )

    def _clear(self) -> None:
        """Removes everything but the lock."""
        # The marks go first, since nothing may stand beside them that is not whole. Those of the
        # whole folder go before those of parts of it.
        for path in sorted(_marks_in(self.out), key=_order_of_removal):
            remove(self.out, *path.relative_to(self.out).parts)
        sync_folder(self.out)
        remove_contents(self.out, keep=(WORK_FOLDER,))
        self._remove_leftovers()

    def _save(self) -> None:
        """Writes run.json."""
        content = json.dumps({"fingerprint": self._fingerprint}).encode()
        write_file(self._work / RECORD, [content], folder=self._work)
        self._plan = hashlib.sha256(content).hexdigest()
        (self._work / SHARDS).mkdir(exist_ok=True)

    def forget(self) -> None:
        """Takes no shard for finished, so that all are written again."""
        self.finished = {}
        with named(self.out, OutputError, inside=True):
            # left by a run that ended between its last two steps
            remove(self.out, "config.json")
            remove_contents(self.out, WORK_FOLDER, SHARDS)


def _marks_in(folder: Path) -> Iterator[Path]:
    """Yields the files by which a loader would take a folder, or one in it, for a whole model."""
    for parent, _, names in os.walk(folder):
        for name in names:
            if name in _MARKS or name.endswith(".index.json"):
                yield Path(parent, name)


def _order_of_removal(mark: Path) -> tuple[int, bool]:
    is_index = mark.name not in _MARKS
    return len(mark.parts), is_index


def tidy(out: Path) -> None:
    """Removes the work folder beside a result that is complete.

    A run leaves it there that is killed at its very end.
    """
    if (out / WORK_FOLDER).is_dir():
        # opening it removes the work folder of a run that was complete, and then refuses a folder
        # that is not empty; nothing is removed if another run is at work there
        with suppress(OutputError):
            Workspace(out, {}, overwrite=False)
