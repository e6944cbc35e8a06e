"""Holds a repository of the Hugging Face Hub at one commit: fetches its files, whole or in ranges.

Everything goes through huggingface_hub, which knows endpoints, tokens, caches and retries, and
reads HF_HOME, HF_TOKEN and HF_ENDPOINT. A revision is resolved once; from then on its commit is
what is asked for. Files that are in the cache are used where they are. What is fetched is compared
with the size and hash that the Hub states for it.
"""

import glob
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import huggingface_hub
import huggingface_hub.utils
from huggingface_hub import constants, errors

from nf4conv.errors import SourceError
from nf4conv.options import SourceOptions
from nf4conv.sources.reader import FileBytes, digest_of, each
from nf4conv.sources.remote.asking import explained, patiently, timeout

_log: Final = logging.getLogger(__name__)

LIBRARY: Final = "nf4conv"

# its functions are exported by name only, and differ between releases
_utils: Any = huggingface_hub.utils

PATIENCE: Final = 5.0
"""Seconds that a transfer that is not wanted any more gets to end.

Then it is left alone with its own files.
"""


@dataclass(frozen=True)
class RemoteFile(FileBytes):
    """A file of a repository, as the Hub describes it; ranges of it are asked for."""

    name: str  # its path in the repository
    digest: str | None  # SHA-256 of a large file, git's name of a small one; None if unknown


def check_content(path: Path, file: RemoteFile) -> str | None:
    """Returns what is wrong with a downloaded file; None if it is what the Hub describes."""
    size = path.stat().st_size
    if size != file.size:
        return f"has {size:,} bytes, not the {file.size:,} that the hub says"
    if file.digest is None:
        return None
    digest = hashlib.sha256()
    if len(file.digest) == 40:
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)  # as git computes it
    if digest_of(path, digest) != file.digest:
        return f"its hash is not {file.digest}, which the hub says"
    return None


class Repository:
    """A model repository at the commit that a revision stands for; offline, what the cache has.

    Making it raises a SourceError with the Hub's own message if it does not exist or may not be
    read.

    Attributes:
        repo: "org/name".
        is_offline: True if the Hub may not be asked.
        commit: what the revision stood for when the repository was opened.
        files: everything in it, by name; offline no sizes are known.
    """

    def __init__(self, repo: str, where: SourceOptions) -> None:
        self.repo = repo
        self.is_offline = where.local_files_only or bool(constants.HF_HUB_OFFLINE)
        self._where = where
        self._access: dict[str, Any] = {
            "cache_dir": where.cache_dir,
            "token": where.token,
            "library_name": LIBRARY,
        }
        self.files: dict[str, RemoteFile] = {}
        with explained(repo):
            if self.is_offline:
                self._look_into_the_cache()
            else:
                api = huggingface_hub.HfApi(token=where.token, library_name=LIBRARY)
                describe: Any = partial(api.model_info, files_metadata=True, timeout=timeout())
                info = patiently(partial(describe, repo, revision=where.revision))
                self.commit = str(info.sha)
                for file in info.siblings or ():
                    name = str(file.rfilename)
                    digest = file.blob_id if file.lfs is None else file.lfs.sha256
                    self._note(name, file.size or 0, digest)

    def _look_into_the_cache(self) -> None:
        """Lists the files of the snapshot in the cache, whether their content is there or not."""
        where = self._where
        try:
            found = huggingface_hub.snapshot_download(
                self.repo,
                revision=where.revision,
                cache_dir=where.cache_dir,
                local_files_only=True,
                allow_patterns=[],  # no file must be there
            )
        except errors.LocalEntryNotFoundError as error:
            revision = f" at {where.revision}" if where.revision else ""
            raise self._not_there(f"{self.repo}{revision}: not in the cache") from error
        folder = Path(found)
        self.commit = folder.name
        for path in folder.rglob("*"):
            if path.is_symlink() or path.is_file():
                self._note(path.relative_to(folder).as_posix(), 0, None)
        self._snapshot = folder

    def _note(self, name: str, size: int, digest: str | None) -> None:
        self.files[name] = RemoteFile(size, partial(self._read, name), name, digest)

    def _not_there(self, what: str) -> SourceError:
        """Returns the error of what is not in the cache."""
        why = "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "--local-files-only"
        return SourceError(f"{what}; run once without {why}, to download it")

    def fetch(self, names: Sequence[str], *, notes_commit: bool = False) -> Path:
        """Fetches files into the cache, and checks what is new; returns the folder in which they
        now are, with others perhaps.

        With `notes_commit`, the cache notes which commit the revision stands for, without which it
        would not be found offline. Raises a SourceError if the revision has moved meanwhile.
        """
        if self.is_offline:
            for name in sorted(names):
                path = self._snapshot / name
                # it would pass for one that the repository lacks, and the result would lack it, too
                if path.is_symlink() and not path.exists():
                    raise self._not_there(f"{path}: its content is not in the cache any more")
            return self._snapshot
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
        with explained(self.repo):
            each(self.download, new)  # checks what is there, and fetches what is damaged
        return folder

    def _has(self, name: str) -> bool:
        """Returns True if the cache has a file of the commit."""
        found = huggingface_hub.try_to_load_from_cache(
            self.repo, name, cache_dir=self._where.cache_dir, revision=self.commit
        )
        return isinstance(found, str)

    def download(
        self,
        file: RemoteFile,
        pause: Callable[[float], object] | None = None,
        **options: Any,
    ) -> Path:
        """Fetches a file, continues an earlier try that was interrupted, and returns where it is;
        one whose content is not what the Hub describes is fetched again, once.

        `options` are those of hf_hub_download, `pause` is that of `patiently`. Raises one of
        HUB_ERRORS.
        """
        for again in (False, True):
            attempt = partial(
                huggingface_hub.hf_hub_download,
                self.repo,
                file.name,
                revision=self.commit,
                force_download=again,
                **options,
                **self._access,
            )
            path = Path(patiently(attempt, pause))
            problem = check_content(path, file)
            if problem is None:
                return path
        raise SourceError(
            f"{self.repo}/{file.name}: {problem}, twice; what the hub delivers is damaged"
        )

    def _read(self, name: str, start: int, stop: int) -> bytes:
        """Returns bytes start … stop of a file, by a request for this range."""
        with explained(f"{self.repo}/{name}"):
            return patiently(partial(self._ask_for_range, name, start, stop))

    def _ask_for_range(self, name: str, start: int, stop: int) -> bytes:
        """Asks once; raises one of HUB_ERRORS if the server refuses, is silent, or gives too few
        bytes.
        """
        url = huggingface_hub.hf_hub_url(self.repo, name, revision=self.commit)
        headers = _utils.build_hf_headers(token=self._where.token, library_name=LIBRARY)
        headers["Range"] = f"bytes={start}-{stop - 1}"
        response = _utils.get_session().get(url, headers=headers, timeout=timeout())
        _utils.hf_raise_for_status(response)
        if response.status_code != 206:
            raise SourceError(
                f"{self.repo}/{name}: the server gives no parts of files; run without --stream"
            )
        content: bytes = response.content
        if len(content) != stop - start:
            raise OSError(f"got {len(content):,} of {stop - start:,} bytes")
        return content


def abort_transfers() -> None:
    """Ends transfers of hf_xet, which asks nobody; huggingface_hub does the same on Ctrl-C."""
    with suppress(Exception):
        from huggingface_hub.utils._xet import abort_xet_session  # not in all releases

        abort_xet_session()  # type: ignore[no-untyped-call]
