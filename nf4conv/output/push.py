"""Uploads a checkpoint while it is being made (`--push-to-hub`).

Finished shards go up while later ones are made, and one commit at the end makes them a model. Until
that commit the repository holds nothing new: large files are uploaded ahead of it to the Hub's
storage, where they belong to nobody until a commit names them. So an interrupted run leaves no half
of a model, and the next one uploads what the Hub lacks.
"""

import logging
import shlex
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session

# disable_progress_bars is exported, but by name only
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

from nf4conv.errors import Nf4convError, OutputError
from nf4conv.sources.files import LOADED_SUFFIXES, MODEL_INDEX
from nf4conv.sources.remote.asking import is_unreachable, one_line, patiently, timeout
from nf4conv.sources.remote.repository import LIBRARY, PATIENCE, abort_transfers
from nf4conv.system.background import Background, outlast

_log: Final = logging.getLogger(__name__)

_WEIGHTS: Final = (*LOADED_SUFFIXES, *(f"{suffix}.index.json" for suffix in LOADED_SUFFIXES))
"""Endings of files that hold weights or list them."""

_MISLEADING: Final = ("SHA256SUMS", MODEL_INDEX)
"""Files that are wrong beside other weights than those that they were written for."""

_SILENCE: Final = 30
"""How many times as long as other requests a write may be silent: the Hub looks at all files of a
commit before it answers.
"""

_MESSAGE: Final = "Quantize to 4 bits with nf4conv"

_LOGIN: Final = "; log in with `hf auth login`, or set HF_TOKEN to a token that may write"


class Push:
    """Fills a model repository in the background; use it as a context manager.

    Attributes:
        repo: the repository.
    """

    def __init__(
        self, repo: str, *, token: str | bool | None, public: bool, overwrite: bool
    ) -> None:
        disable_progress_bars()  # uploads go on beside our own bar
        self.repo = repo
        self._api = HfApi(token=token, library_name=LIBRARY)
        _limit_silence(get_session(), _SILENCE * timeout())
        # finished files to upload, with their names in the repository; None ends the uploads
        self._queue: SimpleQueue[tuple[str, Path] | None] = SimpleQueue()
        self._uploaded: dict[str, CommitOperationAdd] = {}
        # what ended the uploads
        self._error: Exception | None = None
        self._stopped = threading.Event()
        self._uploading = Background(self._upload_all, "nf4conv-push")
        # names of the files that the repository holds so far
        self._before = self._open_repository(public, overwrite)

    def _open_repository(self, public: bool, overwrite: bool) -> set[str]:
        """Creates the repository if needed, and returns the names of its files."""
        try:
            self._api.create_repo(self.repo, private=not public, exist_ok=True)
            info = self._api.model_info(self.repo)
        except Exception as error:  # an odd answer makes huggingface_hub raise anything
            hint = "; you seem offline" if is_unreachable(error) else ""
            if "401" in str(error):
                hint = _LOGIN
            raise OutputError(f"--push-to-hub {self.repo}: {one_line(error)}{hint}") from error
        if not info.private and not public:
            raise OutputError(
                f"--push-to-hub {self.repo}: is public; say --public if you mean it, or choose "
                f"another name"
            )
        names = {str(file.rfilename) for file in info.siblings or ()}
        weights = sorted(name for name in names if name.endswith(_WEIGHTS))
        if weights and not overwrite:
            raise OutputError(
                f"--push-to-hub {self.repo}: holds weights already ({weights[0]}); choose another "
                f"name, or --overwrite"
            )
        return names

    def __enter__(self) -> "Push":
        self._uploading.start()
        return self

    def __exit__(self, *_: object) -> None:
        outlast([self._uploading], self._stop, PATIENCE)

    def _stop(self) -> None:
        self._stopped.set()
        self._queue.put(None)
        if self._uploading.is_busy:
            abort_transfers()

    def offer(self, name: str, path: Path) -> None:
        """Uploads a finished file in the background. May be called from any thread."""
        self._queue.put((name, path))

    def commit(self, folder: Path, changed: Mapping[str, bytes]) -> str:
        """Makes the files of a folder a model, once those that were offered are uploaded.

        `changed` has what is to be on the Hub in the place of some of them, by their names.
        """
        started = time.perf_counter()
        self._queue.put(None)
        self._uploading.wait()
        try:
            if self._error is not None:
                raise self._error
            operations = self._operations(folder, changed)
            commit = self._api.create_commit(self.repo, operations, commit_message=_MESSAGE)
            seconds = time.perf_counter() - started
            _log.info("uploaded what was left of %d files in %.1f s", len(operations), seconds)
            return str(commit.commit_url)
        except Exception as error:  # an odd answer makes huggingface_hub raise anything
            command = f"hf upload {self.repo} {shlex.quote(str(folder))} ."
            raise Nf4convError(
                f"--push-to-hub {self.repo}: {one_line(error)}; the checkpoint itself is "
                f"complete, so this pushes it: {command}"
            ) from error

    def _operations(
        self, folder: Path, changed: Mapping[str, bytes]
    ) -> list[CommitOperationAdd | CommitOperationDelete]:
        """Returns what the commit does: adds the files, and deletes stale ones."""
        files: dict[str, Path | bytes] = {**changed}
        for path in folder.rglob("*"):
            if path.is_file():
                files.setdefault(path.relative_to(folder).as_posix(), path)
        operations: list[CommitOperationAdd | CommitOperationDelete] = []
        for name, content in sorted(files.items()):
            operations.append(self._uploaded.get(name) or CommitOperationAdd(name, content))
        others = sorted(self._before - files.keys())
        stale = [name for name in others if name.endswith((*_WEIGHTS, *_MISLEADING))]
        return [*operations, *map(CommitOperationDelete, stale)]

    def _upload_all(self) -> None:
        try:
            while True:
                file = self._queue.get()
                if file is None or self._stopped.is_set():
                    return
                self._upload(*file)
        except Exception as error:  # noqa: BLE001 - raised again by `commit`
            self._error = error

    def _upload(self, name: str, path: Path) -> None:
        addition = CommitOperationAdd(name, path)
        patiently(lambda: self._api.preupload_lfs_files(self.repo, [addition]), self._pause)
        self._uploaded[name] = addition

    def _pause(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise OutputError("no longer wanted")


def _limit_silence(session: Any, seconds: float) -> None:
    """Lets requests give up on a Hub that is silent so long; huggingface_hub waits for ever."""
    if hasattr(session, "timeout"):
        session.timeout = seconds
    else:  # requests, before huggingface_hub 1.0
        session.request = partial(session.request, timeout=seconds)
