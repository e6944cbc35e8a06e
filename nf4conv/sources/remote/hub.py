"""A repository of the Hugging Face Hub as a source: what of it is needed, and how to get that.

Everything goes through huggingface_hub, which knows endpoints, tokens, caches and retries, and
reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. A revision is resolved once; from then on
its commit is what is asked for. Files that are in the cache are used where they are.
"""

import glob
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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

_utils: Any = (
    huggingface_hub.utils
)  # its functions are exported by name only, and differ between releases

HUB_ERRORS: Final[tuple[type[Exception], ...]] = (
    OSError,
    errors.EntryNotFoundError,
    errors.HFValidationError,
    cast("type[Exception]", errors.HfHubHTTPError.__bases__[0]),
)
"""huggingface_hub's own errors, and those of the HTTP library that it happens to be built on."""

_WAITS: Final = (1.0, 2.0, 4.0, 8.0)  # seconds between tries, after those of huggingface_hub itself

PATIENCE: Final = 5.0
"""Seconds that a transfer gets to notice that it is not wanted; one that stalls is left alone with
its own files.
"""

_PASSING_STATUSES: Final = (408, 425, 429, 500, 502, 503, 504)

_DESCRIPTIONS: Final = ("config.json", "hf_quant_config.json", "README.md", "nf4conv.json")
"""What is read beside the weights but not copied."""
_LIKELY: Final = (
    *("config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"),
    *("pytorch_model.bin.index.json", "diffusion_pytorch_model.safetensors", MODEL_INDEX),
)


class RemoteFile(NamedTuple):
    """A file of a repository, as the hub describes it."""

    name: str  # its path in the repository
    size: int  # bytes
    sha256: str | None  # of its content; None for a small file that is kept in git itself
    blob: str | None  # git's name for it; None if unknown


@dataclass(frozen=True)
class Origin:
    """Where a source came from."""

    repo: str  # "org/name"
    commit: str  # 40 hexadecimal digits
    subfolder: str  # of the repository; empty for its root

    def __str__(self) -> str:
        return f"{self.repo}{'/' if self.subfolder else ''}{self.subfolder}@{self.commit}"


class Repository:
    """A model repository, "org/name", at the commit that a revision stands for.

    A SourceError with the hub's own explanation if it does not exist or may not be read.
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
        self.commit = str(info.sha)  # what the revision stood for
        files = (
            RemoteFile(
                file.rfilename,
                file.size or 0,
                None if file.lfs is None else file.lfs.sha256,
                file.blob_id,
            )
            for file in info.siblings or ()
        )
        self.files = {file.name: file for file in files}  # everything in it, by name

    def fetch_first(self, names: Sequence[str]) -> Path:
        """As `fetch`; the cache also notes which commit the revision stands for, so that it is
        found when offline.
        """
        folder = self.fetch(names, self._where.revision or "main")
        if folder.name != self.commit:
            raise SourceError(f"{self.repo}: changed while it was being read; run again")
        return folder

    def fetch(self, names: Sequence[str], revision: str | None = None) -> Path:
        """The folder, in the cache, in which these files now are, with others perhaps."""
        with explained(self.repo):
            how = {"allow_patterns": [glob.escape(name) for name in names], **self._access}
            return Path(
                huggingface_hub.snapshot_download(
                    self.repo, revision=revision or self.commit, **how
                )
            )

    def download(
        self, file: RemoteFile, folder: Path, go_on: Callable[[], None], *, again: bool
    ) -> Path:
        """Fetch a file into a folder of ours, where an earlier, interrupted try is continued;
        `again` starts anew.

        `go_on` is asked now and then, from the calling thread; it raises what is to end the
        download. One of HUB_ERRORS if the hub did not give the file.
        """
        how = {
            "local_dir": folder,
            "force_download": again,
            "tqdm_class": _bar(go_on),
            **self._access,
        }
        return Path(
            huggingface_hub.hf_hub_download(self.repo, file.name, revision=self.commit, **how)
        )

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """Some bytes of a file, by a request for this range; a SourceError if the hub does not give
        them.
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
    """A response and its body in chunks; busy servers and failing connections are tried again.

    huggingface_hub is built on requests before 1.0, and on httpx or its successor from then on.
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
    """Whether the environment forbids to ask the hub."""
    return bool(
        constants.is_offline_mode()
        if hasattr(constants, "is_offline_mode")
        else constants.HF_HUB_OFFLINE
    )


@dataclass(frozen=True)
class Fetched:
    """A source that came from the hub."""

    folder: Path  # in the cache, where its files are
    origin: Origin  # what they are
    repository: Repository | None  # to get more from; None when offline
    # weight files that were not fetched because they are to be streamed, by the path they would
    # have
    absent: Mapping[Path, RemoteFile]


def fetch_source(repo: str, where: SourceOptions) -> Fetched:
    """Get what is needed of a repository, "org/name": weights of one kind, config, and what is
    copied beside them.

    A SourceError if it does not exist, may not be read, is not in the cache when offline, or holds
    no weights.
    """
    if where.local_files_only or is_offline():
        return _from_cache(repo, where)
    repository = Repository(repo, where)
    prefix = f"{where.subfolder.strip('/')}/" if where.subfolder else ""
    names = {name.removeprefix(prefix) for name in repository.files if name.startswith(prefix)}
    weights = find_weights(
        {name for name in names if "/" not in name}, where.variant, f"{repo}/{prefix}".rstrip("/")
    )
    modules = None
    if "modules.json" in names:
        modules = (
            repository.fetch_first([f"{prefix}modules.json"]) / prefix / "modules.json"
        ).read_bytes()
    small = {
        *(name for name in _DESCRIPTIONS if name in names),
        *map(str, auxiliary_names(names, modules)),
    }
    small |= {weights.name} if weights.is_index else set()
    root = repository.fetch_first([f"{prefix}{name}" for name in sorted(small)])
    folder = root / prefix
    shards = _shards(folder / weights.name) if weights.is_index else [weights.name]
    missing = [name for name in shards if name not in names]
    if missing:
        raise SourceError(f"{repo}: {weights.name} names {missing[0]}, which the repository lacks")
    absent = {folder / name: repository.files[f"{prefix}{name}"] for name in shards}
    if where.stream:
        absent = {path: file for path, file in absent.items() if not path.is_file()}
    else:
        repository.fetch([file.name for file in absent.values()])
        absent = {}
    return Fetched(folder, Origin(repo, repository.commit, prefix.rstrip("/")), repository, absent)


def fetch_adapter(repo: str, where: SourceOptions) -> tuple[Path, Origin]:
    """The folder, in the cache, that holds an adapter of PEFT, and what it is; errors as
    `fetch_source`.
    """
    if where.local_files_only or is_offline():
        fetched = _from_cache(repo, where, (ADAPTER_CONFIG,))
        return fetched.folder, fetched.origin
    repository = Repository(repo, where)
    weights = next((name for name in ADAPTER_WEIGHTS if name in repository.files), None)
    names = [name for name in (ADAPTER_CONFIG, weights) if name in repository.files]
    if not names:
        raise SourceError(f"{repo}: neither {ADAPTER_CONFIG} nor weights of an adapter in it")
    return repository.fetch_first(names), Origin(repo, repository.commit, "")


def list_diffusers(repo: str, where: SourceOptions) -> tuple[Fetched, tuple[str, ...]]:
    """A repository that holds a diffusers pipeline, of which only model_index.json is fetched, and
    all its files.

    They are named relative to the folder. Errors as `fetch_source`.
    """
    if where.local_files_only or is_offline():
        fetched = _from_cache(repo, where)
        files = (
            path.relative_to(fetched.folder) for path in fetched.folder.rglob("*") if path.is_file()
        )
        return fetched, tuple(file.as_posix() for file in files)
    repository = Repository(repo, where)
    prefix = f"{where.subfolder.strip('/')}/" if where.subfolder else ""
    folder = repository.fetch_first([f"{prefix}{MODEL_INDEX}"]) / prefix
    inside = (name.removeprefix(prefix) for name in repository.files if name.startswith(prefix))
    return Fetched(
        folder, Origin(repo, repository.commit, prefix.rstrip("/")), repository, {}
    ), tuple(inside)


def _shards(index: Path) -> list[str]:
    try:
        return sorted(
            {
                str(PurePosixPath(name))
                for name in json.loads(index.read_bytes())["weight_map"].values()
            }
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SourceError(f"{index}: has no weight_map") from error


def _from_cache(repo: str, where: SourceOptions, likely: Sequence[str] = _LIKELY) -> Fetched:
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
            commit = (
                folder.parents[len(PurePosixPath(subfolder).parts) - 1].name
                if subfolder
                else folder.name
            )
            return Fetched(folder, Origin(repo, commit, subfolder), None, {})
    revision = f" at {where.revision}" if where.revision else ""
    raise SourceError(f"{repo}{revision}: not in the cache, and the hub may not be asked")


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn the errors of huggingface_hub into one line with the hub's own explanation."""
    try:
        yield
    except HUB_ERRORS as error:
        raise SourceError(f"{what}: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    text = re.sub(r"\(Request ID: [^)]*\)", "", str(error))
    return " ".join(text.split()) or type(error).__name__


def patiently(attempt: Callable[[], T], stopped: threading.Event) -> T | None:
    """What an attempt gives, which is repeated as long as that may help; None if it is no longer
    wanted.

    One of HUB_ERRORS if trying again does not help, or has not helped.
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
    """Whether trying again may help: the server is busy, or the connection failed."""
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return status in _PASSING_STATUSES
        cause = cause.__cause__
    return not isinstance(error, OSError) or error.errno is None


def _bar(go_on: Callable[[], None]) -> type[Any]:
    """A progress bar that asks whether to go on: huggingface_hub knows no other way to be stopped."""
    caller = threading.get_ident()

    class Bar(_utils.tqdm):  # type: ignore[misc]
        def update(self, n: float | None = 1) -> bool | None:
            if threading.get_ident() == caller:
                go_on()
            return super().update(n)  # type: ignore[no-any-return]

    return Bar


def abort_transfers() -> None:
    """End what goes on by way of hf_xet, which asks nobody; huggingface_hub does so itself on
    Ctrl-C.
    """
    with suppress(Exception):
        from huggingface_hub.utils._xet import abort_xet_session  # not in all releases

        abort_xet_session()  # type: ignore[no-untyped-call]
