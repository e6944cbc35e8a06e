"""Fetches what is needed of a repository of the Hugging Face Hub.

Everything goes through huggingface_hub, which knows endpoints, tokens, caches and retries, and
reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. A revision is resolved once; from then on
its commit is what is asked for. Files that are in the cache are used where they are.
"""

import glob
import json
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple, TypeVar, cast

import huggingface_hub
import huggingface_hub.utils
from huggingface_hub import constants, errors

from nf4conv.errors import SourceError
from nf4conv.options import SourceOptions
from nf4conv.sources.auxiliary import auxiliary_names
from nf4conv.sources.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MODEL_INDEX, find_weights

LIBRARY: Final = "nf4conv"

T = TypeVar("T")

# its functions are exported by name only, and differ between releases
_utils: Any = huggingface_hub.utils

HUB_ERRORS: Final[tuple[type[Exception], ...]] = (
    OSError,
    errors.EntryNotFoundError,
    errors.HFValidationError,
    cast("type[Exception]", errors.HfHubHTTPError.__bases__[0]),
)
"""huggingface_hub's own errors, and those of the HTTP library that it happens to be built on."""

_WAITS: Final = (1.0, 2.0, 4.0, 8.0)  # seconds between tries, after those of huggingface_hub itself

PATIENCE: Final = 5.0
"""Seconds that a transfer gets to notice that it is not wanted.

A transfer that stalls is left alone with its own files.
"""

_PASSING_STATUSES: Final = (408, 425, 429, 500, 502, 503, 504)

_DESCRIPTIONS: Final = ("config.json", "hf_quant_config.json", "README.md", "nf4conv.json")
"""Files that are read beside the weights but not copied."""

_LIKELY: Final = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors",
    MODEL_INDEX,
)
"""Files one of which every source has: by them it is found in the cache."""


class RemoteFile(NamedTuple):
    """A file of a repository, as the Hub describes it."""

    name: str  # its path in the repository
    size: int  # bytes
    sha256: str | None  # of its content; None for a small file that is kept in git itself
    blob: str | None  # git's name for it; None if unknown


@dataclass(frozen=True)
class Origin:
    """The place on the Hub that a source came from."""

    repo: str  # "org/name"
    commit: str  # 40 hexadecimal digits
    subfolder: str  # of the repository; empty for its root

    def __str__(self) -> str:
        place = f"{self.repo}/{self.subfolder}" if self.subfolder else self.repo
        return f"{place}@{self.commit}"


class Repository:
    """A model repository at the commit that a revision stands for.

    Args:
        repo: "org/name".
        where: the revision, and how to reach the Hub.

    Attributes:
        repo: "org/name".
        commit: what the revision stood for when the repository was opened.
        files: everything in it, by name.

    Raises:
        SourceError: the repository does not exist or may not be read; the message is the Hub's own.
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
            api = huggingface_hub.HfApi(token=where.token, library_name=LIBRARY)
            info = api.model_info(repo, revision=where.revision, files_metadata=True)
        self.commit = str(info.sha)
        self.files: dict[str, RemoteFile] = {}
        for file in info.siblings or ():
            sha256 = None if file.lfs is None else file.lfs.sha256
            name = file.rfilename
            self.files[name] = RemoteFile(name, file.size or 0, sha256, file.blob_id)

    def fetch_first(self, names: Sequence[str]) -> Path:
        """Fetches files and lets the cache note which commit the revision stands for.

        Without that note the revision would not be found offline.

        Returns:
            The folder in the cache in which these files now are, with others perhaps.

        Raises:
            SourceError: the Hub does not give the files, or the revision has moved meanwhile.
        """
        folder = self.fetch(names, self._where.revision or "main")
        if folder.name != self.commit:
            raise SourceError(f"{self.repo}: changed while it was being read; run again")
        return folder

    def fetch(self, names: Sequence[str], revision: str | None = None) -> Path:
        """Fetches files into the cache.

        Args:
            names: the files.
            revision: of the repository; None for its commit.

        Returns:
            The folder in the cache in which these files now are, with others perhaps.

        Raises:
            SourceError: the Hub does not give the files.
        """
        with explained(self.repo):
            folder = huggingface_hub.snapshot_download(
                self.repo,
                revision=revision or self.commit,
                allow_patterns=[glob.escape(name) for name in names],
                **self._access,
            )
        return Path(folder)

    def download(
        self, file: RemoteFile, folder: Path, go_on: Callable[[], None], *, again: bool
    ) -> Path:
        """Fetches a file into a folder of ours, and continues an earlier try that was interrupted.

        Args:
            file: the file.
            folder: where to put it.
            go_on: called now and then from the calling thread; raises what is to end the download.
            again: True to fetch the whole file, whatever an earlier try left.

        Returns:
            The path of the file.

        Raises:
            One of HUB_ERRORS: the Hub did not give the file.
        """
        path = huggingface_hub.hf_hub_download(
            self.repo,
            file.name,
            revision=self.commit,
            local_dir=folder,
            force_download=again,
            tqdm_class=_bar(go_on),
            **self._access,
        )
        return Path(path)

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """Returns bytes start … stop of a file, by a request for this range.

        Raises:
            SourceError: the Hub does not give them.
        """
        url = huggingface_hub.hf_hub_url(self.repo, file.name, revision=self.commit)
        headers = _utils.build_hf_headers(token=self._where.token, library_name=LIBRARY)
        headers["Range"] = f"bytes={start}-{stop - 1}"
        content = bytearray()
        with explained(f"{self.repo}/{file.name}"), _streamed(url, headers) as (response, chunks):
            _utils.hf_raise_for_status(response)
            if response.status_code != 206:
                raise SourceError(
                    f"{self.repo}/{file.name}: the server gives no parts of files; run without "
                    f"--stream"
                )
            for chunk in chunks:
                content += chunk
        if len(content) != stop - start:
            raise SourceError(
                f"{self.repo}/{file.name}: got {len(content):,} of {stop - start:,} bytes; run "
                f"again"
            )
        return bytes(content)


@contextmanager
def _streamed(url: str, headers: Mapping[str, str]) -> Iterator[tuple[Any, Iterator[bytes]]]:
    """Asks for a URL; busy servers and failing connections are tried again.

    huggingface_hub is built on requests before 1.0, and on httpx or its successor from then on.

    Yields:
        response: the response, whose body has not been read.
        chunks: the body.
    """
    if hasattr(_utils, "http_stream_backoff"):
        with _utils.http_stream_backoff(
            "GET", url, headers=headers, follow_redirects=True
        ) as response:
            yield response, response.iter_bytes()
    else:
        busy = tuple(status for status in _PASSING_STATUSES if status >= 429)
        with _utils.http_backoff(
            "GET", url, headers=headers, stream=True, retry_on_status_codes=busy
        ) as response:
            yield response, response.iter_content(2**16)


def is_offline() -> bool:
    """Returns True if the environment forbids to ask the Hub."""
    if hasattr(constants, "is_offline_mode"):
        return bool(constants.is_offline_mode())
    return bool(constants.HF_HUB_OFFLINE)


@dataclass(frozen=True)
class Fetched:
    """A source that came from the Hub.

    Attributes:
        folder: the folder in the cache with its files.
        origin: the place on the Hub that they came from.
        repository: where to get more files; None offline.
        absent: weight files that are to be streamed and were not fetched, by the path that they
            would have.
    """

    folder: Path
    origin: Origin
    repository: Repository | None
    absent: Mapping[Path, RemoteFile]


def fetch_source(repo: str, where: SourceOptions) -> Fetched:
    """Fetches what is needed of a repository: weights of one kind, config, files to be copied.

    Args:
        repo: "org/name".
        where: what to take of the repository, and how to reach the Hub.

    Raises:
        SourceError: the repository does not exist, may not be read, is not in the cache when
            offline, or holds no weights.
    """
    if where.local_files_only or is_offline():
        return _from_cache(repo, where)
    repository = Repository(repo, where)
    prefix = _prefix_of(where)
    names = _names_below(repository, prefix)
    place = f"{repo}/{prefix}".rstrip("/")
    at_top = {name for name in names if "/" not in name}
    weights = find_weights(at_top, where.variant, place)
    small = _small_files(repository, prefix, names)
    if weights.is_index:
        small.add(weights.name)
    root = repository.fetch_first([f"{prefix}{name}" for name in sorted(small)])
    folder = root / prefix
    shards = _shards(folder / weights.name) if weights.is_index else [weights.name]
    absent = {}
    for name in shards:
        if name not in names:
            raise SourceError(f"{repo}: {weights.name} names {name}, which the repository lacks")
        absent[folder / name] = repository.files[f"{prefix}{name}"]
    if where.stream:
        absent = {path: file for path, file in absent.items() if not path.is_file()}
    else:
        repository.fetch([file.name for file in absent.values()])
        absent = {}
    origin = Origin(repo, repository.commit, prefix.rstrip("/"))
    return Fetched(folder, origin, repository, absent)


def _prefix_of(where: SourceOptions) -> str:
    """Returns what the names of files begin with that are in the subfolder."""
    return f"{where.subfolder.strip('/')}/" if where.subfolder else ""


def _names_below(repository: Repository, prefix: str) -> list[str]:
    """Returns the names of files that begin with a prefix, without it."""
    names = repository.files
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _small_files(repository: Repository, prefix: str, names: Collection[str]) -> set[str]:
    """Returns the files that are read beside the weights, or copied.

    Args:
        repository: the repository; its modules.json is fetched if it has one.
        prefix: of the names of files in the subfolder.
        names: the files in the subfolder, without the prefix.
    """
    modules = None
    if "modules.json" in names:
        root = repository.fetch_first([f"{prefix}modules.json"])
        modules = (root / prefix / "modules.json").read_bytes()
    small = {str(path) for path in auxiliary_names(names, modules)}
    small.update(name for name in _DESCRIPTIONS if name in names)
    return small


def fetch_adapter(repo: str, where: SourceOptions) -> tuple[Path, Origin]:
    """Fetches an adapter of PEFT.

    Args:
        repo: "org/name".
        where: the revision, and how to reach the Hub.

    Returns:
        folder: the folder in the cache that holds it.
        origin: the place on the Hub that it came from.

    Raises:
        SourceError: the repository does not exist, may not be read, is not in the cache when
            offline, or holds no adapter.
    """
    if where.local_files_only or is_offline():
        fetched = _from_cache(repo, where, (ADAPTER_CONFIG,))
        return fetched.folder, fetched.origin
    repository = Repository(repo, where)
    names = []
    if ADAPTER_CONFIG in repository.files:
        names.append(ADAPTER_CONFIG)
    for name in ADAPTER_WEIGHTS:
        if name in repository.files:
            names.append(name)
            break
    if not names:
        raise SourceError(f"{repo}: neither {ADAPTER_CONFIG} nor weights of an adapter in it")
    return repository.fetch_first(names), Origin(repo, repository.commit, "")


def list_diffusers(repo: str, where: SourceOptions) -> tuple[Fetched, tuple[str, ...]]:
    """Fetches the model_index.json of a diffusers pipeline, and lists its other files.

    Args:
        repo: "org/name".
        where: the revision and the subfolder, and how to reach the Hub.

    Returns:
        fetched: the folder in the cache, and where it came from.
        names: all files of the pipeline, relative to the folder.

    Raises:
        SourceError: the repository does not exist, may not be read, or is not in the cache when
            offline.
    """
    if where.local_files_only or is_offline():
        fetched = _from_cache(repo, where)
        files = [path for path in fetched.folder.rglob("*") if path.is_file()]
        return fetched, tuple(path.relative_to(fetched.folder).as_posix() for path in files)
    repository = Repository(repo, where)
    prefix = _prefix_of(where)
    folder = repository.fetch_first([f"{prefix}{MODEL_INDEX}"]) / prefix
    origin = Origin(repo, repository.commit, prefix.rstrip("/"))
    return Fetched(folder, origin, repository, {}), tuple(_names_below(repository, prefix))


def _shards(index: Path) -> list[str]:
    """Returns the names of the files that an index lists."""
    try:
        listed = json.loads(index.read_bytes())["weight_map"].values()
        return sorted({str(PurePosixPath(name)) for name in listed})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SourceError(f"{index}: has no weight_map") from error


def _from_cache(repo: str, where: SourceOptions, likely: Sequence[str] = _LIKELY) -> Fetched:
    """Finds a repository in the cache by files that it is likely to have."""
    subfolder = (where.subfolder or "").strip("/")
    for name in likely:
        with explained(repo):
            found = huggingface_hub.try_to_load_from_cache(
                repo,
                f"{subfolder}/{name}".lstrip("/"),
                cache_dir=where.cache_dir,
                revision=where.revision,
            )
        if isinstance(found, str):
            folder = Path(found).parent
            # a snapshot's folder in the cache is called by its commit
            snapshot = folder
            for _ in PurePosixPath(subfolder).parts:
                snapshot = snapshot.parent
            return Fetched(folder, Origin(repo, snapshot.name, subfolder), None, {})
    revision = f" at {where.revision}" if where.revision else ""
    raise SourceError(f"{repo}{revision}: not in the cache, and the hub may not be asked")


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns the errors of huggingface_hub into a SourceError: one line, with what the Hub says.

    Args:
        what: what is asked for; it begins the line.
    """
    try:
        yield
    except HUB_ERRORS as error:
        raise SourceError(f"{what}: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """Returns what an error says on one line, without the number of the request."""
    text = re.sub(r"\(Request ID: [^)]*\)", "", str(error))
    return " ".join(text.split()) or type(error).__name__


def patiently(attempt: Callable[[], T], stopped: threading.Event) -> T | None:
    """Makes an attempt, and repeats it as long as that may help.

    Args:
        attempt: what to try.
        stopped: set when the result is no longer wanted.

    Returns:
        What the attempt returns; None if it is no longer wanted.

    Raises:
        One of HUB_ERRORS: trying again does not help, or has not helped.
    """
    for wait in _WAITS:
        try:
            return attempt()
        except HUB_ERRORS as error:
            if not _may_pass(error):
                raise
        if stopped.wait(wait):
            return None
    return attempt()


def _may_pass(error: Exception) -> bool:
    """Returns True if trying again may help: the server is busy, or the connection failed."""
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return status in _PASSING_STATUSES
        cause = cause.__cause__
    return not isinstance(error, OSError) or error.errno is None


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
