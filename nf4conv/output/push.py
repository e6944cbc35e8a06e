"""`--push-to-hub`: finished shards go up while later ones are made, and one commit at the end makes
them a model.

Until that commit the repository holds nothing new: large files are uploaded ahead of it to the
Hub's storage, where they are nobody's until a commit names them. So an interrupted run leaves no
half of a model, and the next one uploads what the Hub lacks.
"""

import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # exported, but by name only

from nf4conv.errors import Nf4convError, OutputError
from nf4conv.sources.remote.hub import (
    HUB_ERRORS,
    LIBRARY,
    PATIENCE,
    abort_transfers,
    one_line,
    patiently,
)
from nf4conv.system.background import Background, outlast

_WEIGHTS: Final = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_MISLEADING: Final = (
    "SHA256SUMS",
    "model_index.json",
)  # beside other weights than those that they were written for


class Push:
    """A model repository that is being filled; use it as a context manager.

    Args:
        repo: "org/name"; made if it does not exist.
        token: to write with; None for the one that is logged in.
        public: whether everybody may see it.
        overwrite: whether weights that it holds already are replaced.

    Raises:
        OutputError: it cannot be written, is public though nobody asked for that, or holds weights
            already.
    """

    def __init__(
        self, repo: str, *, token: str | bool | None, public: bool, overwrite: bool
    ) -> None:
        disable_progress_bars()  # uploads go on beside our own bar
        self.repo = repo
        self._api = HfApi(token=token, library_name=LIBRARY)
        self._queue: SimpleQueue[tuple[str, Path] | None] = SimpleQueue()
        self._uploaded: dict[str, CommitOperationAdd] = {}
        self._error: Exception | None = None
        self._stopped = threading.Event()
        self._uploading = Background(self._upload_all, "nf4conv-push")
        try:
            self._api.create_repo(repo, private=not public, exist_ok=True)
            info = self._api.model_info(repo)
        except HUB_ERRORS as error:
            raise OutputError(f"--push-to-hub {repo}: {one_line(error)}") from error
        self._before = {file.rfilename for file in info.siblings or ()}
        if not info.private and not public:
            raise OutputError(
                f"--push-to-hub {repo}: is public; say --public if you mean it, or choose another "
                f"name"
            )
        weights = sorted(name for name in self._before if name.endswith(_WEIGHTS))
        if weights and not overwrite:
            raise OutputError(
                f"--push-to-hub {repo}: holds weights already ({weights[0]}); choose another "
                f"name, or --overwrite"
            )

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
        """Say that a file is finished; it is uploaded in the background. May be called from any
        thread.
        """
        self._queue.put((name, path))

    def commit(self, folder: Path, message: str) -> str:
        """Make the files of a folder a model, when those that were offered are uploaded; the
        address of the commit.

        Raises:
            Nf4convError: the hub did not take them.
        """
        self._queue.put(None)
        self._uploading.wait()
        files = {
            path.relative_to(folder).as_posix(): path
            for path in folder.rglob("*")
            if path.is_file()
        }
        try:
            if self._error is not None:
                raise self._error
            additions = [
                self._uploaded.get(name) or CommitOperationAdd(name, path)
                for name, path in sorted(files.items())
            ]
            stale = sorted(
                name
                for name in self._before - files.keys()
                if name.endswith((*_WEIGHTS, *_MISLEADING))
            )
            deletions = [CommitOperationDelete(path_in_repo=name) for name in stale]
            return str(
                self._api.create_commit(
                    self.repo, [*additions, *deletions], commit_message=message
                ).commit_url
            )
        except HUB_ERRORS as error:
            raise Nf4convError(
                f"--push-to-hub {self.repo}: {one_line(error)}; the checkpoint itself is "
                f"complete, so this pushes "
                f"it: hf upload {self.repo} {folder} ."
            ) from error

    def _upload_all(self) -> None:
        try:
            while (entry := self._queue.get()) is not None and not self._stopped.is_set():
                self._upload(*entry)
        except Exception as error:  # noqa: BLE001 - raised again by `commit`
            self._error = error

    def _upload(self, name: str, path: Path) -> None:
        def upload() -> CommitOperationAdd:
            addition = CommitOperationAdd(name, path)
            self._api.preupload_lfs_files(self.repo, [addition])
            return addition

        addition = patiently(upload, self._stopped)
        if addition is not None:
            self._uploaded[name] = addition
