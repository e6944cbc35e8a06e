"""Holds a repository of the Hugging Face Hub at one commit: fetches its files, whole or in ranges.

Everything goes through huggingface_hub, which knows endpoints, tokens, caches and retries, and
reads HF_HOME, HF_TOKEN and HF_ENDPOINT. A revision is resolved once; from then on its commit is
what is asked for. Files that are in the cache are used where they are. What is fetched is compared
with the size and hash that the Hub states for it.
"""

import glob
import hashlib
import inspect
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

import huggingface_hub
import huggingface_hub.utils

from nf4conv.errors import SourceError
from nf4conv.options import SourceOptions
from nf4conv.sources.reader import digest_of
from nf4conv.sources.remote.asking import explained, get_range, patiently, timeout

_log: Final = logging.getLogger(__name__)

LIBRARY: Final = "nf4conv"

# its functions are exported by name only, and differ between releases
_utils: Any = huggingface_hub.utils

_CHECKED_AT_ONCE: Final = 4  # files

PATIENCE: Final = 5.0
"""Seconds that a transfer gets to notice that it is not wanted.

A transfer that stalls is left alone with its own files.
"""


class RemoteFile(NamedTuple):
    """A file of a repository, as the Hub describes it."""

    name: str  # its path in the repository
    size: int  # bytes
    sha256: str | None  # of its content; None for a small file that is kept in git itself
    blob: str | None  # git's name for it; None if unknown


def fetch_checked(file: RemoteFile, fetch: Callable[[bool], Path], repo: str) -> Path:
    """Fetches a file and returns where it is; one whose content is not what the Hub describes is
    fetched again, once. `fetch` takes True to fetch the whole file, whatever is there already.
    """
    for again in (False, True):
        path = fetch(again)
        problem = check_content(path, file)
        if problem is None:
            return path
    raise SourceError(f"{repo}/{file.name}: {problem}, twice; what the hub delivers is damaged")


def check_content(path: Path, file: RemoteFile) -> str | None:
    """Returns what is wrong with a downloaded file; None if it is what the Hub describes."""
    size = path.stat().st_size
    if size != file.size:
        return f"has {size:,} bytes, not the {file.size:,} that the hub says"
    if file.sha256 is not None:
        digest = hashlib.sha256()
        expected = file.sha256
    elif file.blob is not None:
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)  # as git computes it
        expected = file.blob
    else:
        return None
    if digest_of(path, digest) != expected:
        return f"its hash is not {expected}, which the hub says"
    return None


class Repository:
    """A model repository at the commit that a revision stands for.

    Making it raises a SourceError with the Hub's own message if it does not exist or may not be
    read.

    Attributes:
        repo: "org/name".
        commit: what the revision stood for when the repository was opened.
        files: everything in it, by name.
    """

    def __init__(self, repo: str, where: SourceOptions) -> None:
        self.repo = repo
        self._where = where
        self._access: dict[str, Any] = {
            "cache_dir": where.cache_dir,
            "token": where.token,
            "library_name": LIBRARY,
        }
        with explained(repo):
            info = patiently(self._describe)
            self.commit = _digits(info.sha, 40)
            self.files: dict[str, RemoteFile] = {}
            for file in info.siblings or ():
                described = _described(file)
                self.files[described.name] = described

    def _describe(self) -> Any:
        """Asks once what the repository holds."""
        api = huggingface_hub.HfApi(token=self._where.token, library_name=LIBRARY)
        return api.model_info(
            self.repo, revision=self._where.revision, files_metadata=True, timeout=timeout()
        )

    def fetch(self, names: Sequence[str], *, notes_commit: bool = False) -> Path:
        """Fetches files into the cache, and checks what is new; returns the folder in which they
        now are, with others perhaps.

        With `notes_commit`, the cache notes which commit the revision stands for, without which it
        would not be found offline. Raises a SourceError if the revision has moved meanwhile.
        """
        revision = (self._where.revision or "main") if notes_commit else self.commit
        # a name that the repository lacks fetches nothing
        new = [self.files[name] for name in names if name in self.files and not self._has(name)]
        attempt = partial(
            huggingface_hub.snapshot_download,
            self.repo,
            revision=revision,
            allow_patterns=[glob.escape(name) for name in names],
            **self._access,
        )
        started = time.perf_counter()
        with explained(self.repo):
            folder = Path(patiently(attempt))
        seconds = time.perf_counter() - started
        _log.info("%d files of %s are in the cache after %.1f s", len(names), self.repo, seconds)
        if folder.name != self.commit:
            raise SourceError(f"{self.repo}: changed while it was being read; run again")
        with explained(self.repo), ThreadPoolExecutor(_CHECKED_AT_ONCE) as pool:
            list(pool.map(partial(self._check, folder), new))
        return folder

    def _has(self, name: str) -> bool:
        """Returns True if the cache has a file of the commit."""
        found = huggingface_hub.try_to_load_from_cache(
            self.repo, name, cache_dir=self._where.cache_dir, revision=self.commit
        )
        return isinstance(found, str)

    def _check(self, folder: Path, file: RemoteFile) -> None:
        """Checks a file that has been fetched into the cache; a damaged one is fetched again."""

        def fetch(again: bool) -> Path:
            if again:
                download = huggingface_hub.hf_hub_download
                access = {"revision": self.commit, "force_download": True, **self._access}
                patiently(partial(download, self.repo, file.name, **access))
            return folder / file.name

        fetch_checked(file, fetch, self.repo)

    def download(
        self, file: RemoteFile, folder: Path, go_on: Callable[[], None], *, again: bool
    ) -> Path:
        """Fetches a file into a folder of ours, and continues an earlier try that was interrupted.

        `go_on` is called now and then from the calling thread, and raises what is to end the
        download. With `again`, the whole file is fetched, whatever an earlier try left. Raises one
        of HUB_ERRORS.
        """
        path = huggingface_hub.hf_hub_download(
            self.repo,
            file.name,
            revision=self.commit,
            local_dir=folder,
            force_download=again,
            **_asking(go_on),
            **self._access,
        )
        return Path(path)

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """Returns bytes start … stop of a file, by a request for this range."""
        url = huggingface_hub.hf_hub_url(self.repo, file.name, revision=self.commit)
        headers = _utils.build_hf_headers(token=self._where.token, library_name=LIBRARY)
        with explained(f"{self.repo}/{file.name}"):
            content = patiently(partial(get_range, url, headers, start, stop))
        if content is None:
            raise SourceError(
                f"{self.repo}/{file.name}: the server gives no parts of files; run without --stream"
            )
        return content


def name_of_file(file: Any) -> str:
    """Returns the name that the Hub gives a file; raises a ValueError for what is none."""
    name = file.rfilename
    path = PurePosixPath(name if isinstance(name, str) else "/")
    if path.is_absolute() or ".." in path.parts or "\0" in name or str(path) != name:
        raise ValueError(f"{name!r:.80} is no name of a file")
    return str(name)


def _described(file: Any) -> RemoteFile:
    """Returns what the Hub says of a file; raises a ValueError for what cannot be so."""
    name = name_of_file(file)
    size = file.size or 0
    if type(size) is not int or size < 0:
        raise ValueError(f"{name}: {size!r:.80} is no size")
    sha256 = None if file.lfs is None else _digits(file.lfs.sha256, 64)
    blob = None if file.blob_id is None else _digits(file.blob_id, 40)
    return RemoteFile(name, size, sha256, blob)


def _digits(value: object, count: int) -> str:
    """Returns a hash; raises a ValueError for what is none."""
    if isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{count}}}", value):
        return value
    raise ValueError(f"{value!r:.80} is no hash")


def _asking(go_on: Callable[[], None]) -> dict[str, Any]:
    """Returns what lets a download ask whether to go on.

    Releases before 1.0 take no progress bar: there a download ends by itself.
    """
    parameters = inspect.signature(huggingface_hub.hf_hub_download).parameters
    return {"tqdm_class": _bar(go_on)} if "tqdm_class" in parameters else {}


def _bar(go_on: Callable[[], None]) -> type[Any]:
    """Returns the class of a progress bar that asks whether to go on.

    huggingface_hub knows no other way to be stopped.
    """
    caller = threading.get_ident()

    class Bar(_utils.tqdm):  # type: ignore[misc]
        def update(self, n: float | None = 1) -> bool | None:
            if threading.get_ident() == caller:
                go_on()
            return super().update(n)  # type: ignore[no-any-return]

    return Bar


def abort_transfers() -> None:
    """Ends transfers of hf_xet, which asks nobody; huggingface_hub does the same on Ctrl-C."""
    with suppress(Exception):
        from huggingface_hub.utils._xet import abort_xet_session  # not in all releases

        abort_xet_session()  # type: ignore[no-untyped-call]
