"""Fetches weight files of a repository one ahead of their use, and drops them after it.

A reader announces in order which file each piece of work needs, waits for it, and says when it
is done:

    expect(file) ▸ wait_for(file) ▸ read_into(file, …) ▸ done(file)

A file is dropped when the next one has been expected and all its own work is done. At most two
files are on disk, the one being fetched included. Bytes of a file that is not there when they are
read, such as a scale in another file than its weight, are asked for by range.
"""

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from nf4conv.errors import SourceError
from nf4conv.sources.reader import Reader
from nf4conv.sources.remote.asking import explained
from nf4conv.sources.remote.hub import Fetched
from nf4conv.sources.remote.repository import PATIENCE, abort_transfers
from nf4conv.system.background import Background, outlast

FILES_ON_DISK: Final = 2  # the one being read and the one being fetched


class ShardStream(Reader):
    """Fetches absent files in the order of their use; use it as a context manager.

    `order` has the place of every file, absent or not. Only those that are needed are fetched, into
    a folder that is not there yet, and which its owner removes in the end.
    """

    def __init__(
        self,
        fetched: Fetched,
        *,
        order: Mapping[Path, int],
        needed: Collection[Path],
        folder: Path,
    ) -> None:
        super().__init__(fetched.absent)
        self.order = order
        self._repository = fetched.repository
        in_order = sorted(needed, key=order.__getitem__)
        self._needed = {path: fetched.absent[path] for path in in_order}
        self._folder = folder
        self._changed = threading.Condition()  # guards everything below
        self._ready: dict[Path, Path] = {}  # where the files are that can be read
        self._in_work: Counter[Path] = Counter()  # work that is expected and not done
        self._reached = 0  # the place of the first file in the order that more work may need
        self._error: Exception | None = None  # why fetching has ended early
        self._stopped = threading.Event()
        self._fetching = Background(self._fetch_all, "nf4conv-fetch")

    def __enter__(self) -> "ShardStream":
        self._fetching.start()
        return self

    def __exit__(self, *failure: object) -> None:
        outlast([self._fetching], self._stop, PATIENCE)
        super().__exit__(*failure)

    def _stop(self) -> None:
        self.interrupt()
        if self._fetching.is_busy:
            abort_transfers()

    def expect(self, path: Path | None) -> None:
        """Announces a piece of work that needs a file, None for the end of all work. Files before
        it in the order get no more work.
        """
        with self._changed:
            if path is None:
                self._reached = len(self.order)
            else:
                self._in_work[path] += 1
                self._reached = max(self._reached, self.order[path])
            for ready in [*self._ready]:
                self._drop_if_done(ready)

    def wait_for(self, path: Path) -> None:
        """Waits until a file can be read; raises a SourceError if it could not be fetched, or is no
        longer wanted.
        """
        with self._changed:
            while path in self._needed and path not in self._ready:
                if self._error is not None:
                    raise self._error
                self._go_on()
                self._changed.wait()

    def done(self, path: Path) -> None:
        """Notes that a piece of work that was expected is finished."""
        with self._changed:
            self._in_work[path] -= 1
            self._drop_if_done(path)

    def read_into(self, path: Path, start: int, buffer: memoryview) -> None:
        with self._changed:
            local = self._ready.get(path)
        if local is None:
            super().read_into(path, start, buffer)
        else:
            super().read_into(local, start, buffer)

    def interrupt(self) -> None:
        """Lets every thread that waits give up."""
        with self._changed:
            self._stopped.set()
            self._changed.notify_all()

    def _drop_if_done(self, path: Path) -> None:
        """Deletes a file if all work that needs it is done."""
        is_past = self.order[path] < self._reached
        if is_past and self._in_work[path] == 0 and path in self._ready:
            local = self._ready.pop(path)
            self.forget(local)
            local.unlink(missing_ok=True)
            self._changed.notify_all()

    def _fetch_all(self) -> None:
        """Fetches file after file as there is room; runs in a thread of its own."""
        try:
            for path, file in self._needed.items():
                with self._changed:
                    self._changed.wait_for(
                        lambda: len(self._ready) < FILES_ON_DISK or self._stopped.is_set()
                    )
                    self._go_on()
                with explained(f"{self._repository.repo}/{file.name}"):
                    local = self._repository.download(file, self._pause, local_dir=self._folder)
                with self._changed:
                    self._ready[path] = local
                    self._drop_if_done(path)
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - raised again by whoever waits
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        self._stopped.wait(seconds)
        self._go_on()

    def _go_on(self) -> None:
        """Raises a SourceError if nobody waits any more."""
        if self._stopped.is_set():
            raise SourceError("no longer wanted")
