"""Fetches what is needed of a repository of the Hugging Face Hub.

Everything goes through huggingface_hub, which knows endpoints, tokens, caches and retries, and
reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. A revision is resolved once; from then on
its commit is what is asked for. Files that are in the cache are used where they are.
"""

import glob
import inspect
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

import huggingface_hub
import huggingface_hub.utils
from huggingface_hub import constants

from nf4conv.errors import SourceError
from nf4conv.options import SourceOptions
from nf4conv.sources.auxiliary import auxiliary_names
from nf4conv.sources.reader import read_small
from nf4conv.sources.remote.asking import asked, explained, get_range, timeout
from nf4conv.sources.remote.contents import RemoteFile, damaged_files
from nf4conv.sources.weight_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LARGEST_INDEX,
    MODEL_INDEX,
    find_weights,
)

_log: Final = logging.getLogger(__name__)

LIBRARY: Final = "nf4conv"

# its functions are exported by name only, and differ between releases
_utils: Any = huggingface_hub.utils

PATIENCE: Final = 5.0
"""Seconds that a transfer gets to notice that it is not wanted.

A transfer that stalls is left alone with its own files.
"""

_DESCRIPTIONS: Final = (
    "config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "README.md",
    "nf4conv.json",
)
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
            info = asked(self._describe)
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

    def fetch_first(self, names: Sequence[str]) -> Path:
        """Fetches files and lets the cache note which commit the revision stands for.

        Without that note the revision would not be found offline.

        Returns:
            The folder in the cache in which these files now are, with others perhaps.

        Raises:
            SourceError: the Hub does not give the files, gives other bytes than it states, or the
                revision has moved meanwhile.
        """
        return self._fetch(names, self._where.revision or "main")

    def fetch(self, names: Sequence[str]) -> Path:
        """Fetches files into the cache, and checks that they are what the Hub describes.

        Args:
            names: the files.

        Returns:
            The folder in the cache in which these files now are, with others perhaps.

        Raises:
            SourceError: the Hub does not give the files, or gives other bytes than it states.
        """
        return self._fetch(names, self.commit)

    def _fetch(self, names: Sequence[str], revision: str) -> Path:
        """Fetches files of a revision, which must stand for the commit, and checks them."""
        attempt = partial(
            huggingface_hub.snapshot_download,
            self.repo,
            revision=revision,
            allow_patterns=[glob.escape(name) for name in names],
            **self._access,
        )
        started = time.perf_counter()
        with explained(self.repo):
            folder = Path(asked(attempt))
        seconds = time.perf_counter() - started
        _log.info("%d files of %s are in the cache after %.1f s", len(names), self.repo, seconds)
        if folder.name != self.commit:
            raise SourceError(f"{self.repo}: changed while it was being read; run again")
        # a name that the repository lacks has fetched nothing
        there = [self.files[name] for name in names if name in self.files]
        self._require_right({folder / file.name: file for file in there})
        return folder

    def _require_right(self, files: Mapping[Path, RemoteFile]) -> None:
        """Checks that files in the cache are what the Hub describes.

        Those that are not are fetched once more.

        Args:
            files: what the Hub says of each file, by its path in the cache.

        Raises:
            SourceError: a file is damaged again, or the Hub does not give it.
        """
        damaged = damaged_files(files.items())
        if not damaged:
            return
        with explained(self.repo):
            for file in damaged:
                asked(partial(self._fetch_again, file))
        again = {path: file for path, file in files.items() if file in damaged}
        for file, problem in damaged_files(again.items()).items():
            raise SourceError(
                f"{self.repo}/{file.name}: {problem}, twice; what the hub delivers is damaged"
            )

    def _fetch_again(self, file: RemoteFile) -> None:
        """Fetches a file into the cache, which has it already."""
        huggingface_hub.hf_hub_download(
            self.repo, file.name, revision=self.commit, force_download=True, **self._access
        )

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
            **_asking(go_on),
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
        with explained(f"{self.repo}/{file.name}"):
            content = asked(partial(get_range, url, headers, start, stop))
        if content is None:
            raise SourceError(
                f"{self.repo}/{file.name}: the server gives no parts of files; run without --stream"
            )
        return content


def _described(file: Any) -> RemoteFile:
    """Returns what the Hub says of a file.

    Raises:
        ValueError: it cannot be so.
    """
    name = file.rfilename
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or str(path) != name:
        raise ValueError(f"{name!r:.80} is no name of a file")
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
        modules = read_small(root / prefix / "modules.json")
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


def fetch_gguf(repo: str, name: str, where: SourceOptions) -> tuple[Path, Origin]:
    """Fetches a GGUF file, or all files of a split one.

    Args:
        repo: "org/name".
        name: of the file.
        where: revision and subfolder, and how to reach the Hub.

    Returns:
        file: the file in the cache, beside which the others of a split one are.
        origin: the place on the Hub that it came from.

    Raises:
        SourceError: the repository or the file does not exist, may not be read, or is not in the
            cache when offline.
    """
    if where.local_files_only or is_offline():
        fetched = _from_cache(repo, where, (name,))
        return fetched.folder / name, fetched.origin
    repository = Repository(repo, where)
    wanted = f"{_prefix_of(where)}{name}"
    if wanted not in repository.files:
        others = sorted(file for file in repository.files if file.endswith(".gguf"))
        raise SourceError(f"{repo}: has no {wanted}; its GGUF files: {', '.join(others) or 'none'}")
    stem = re.sub(r"-\d{5}-of-\d{5}\.gguf$", "-", wanted)
    names = [file for file in repository.files if stem.endswith("-") and file.startswith(stem)]
    root = repository.fetch_first(sorted({wanted, *names}))
    return root / wanted, Origin(repo, repository.commit, (where.subfolder or "").strip("/"))


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
        listed = json.loads(read_small(index, LARGEST_INDEX))["weight_map"].values()
        return sorted({str(PurePosixPath(name)) for name in listed})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SourceError(f"{index}: has no weight_map", path=index) from error


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
    why = "HF_HUB_OFFLINE is set" if is_offline() else "--local-files-only"
    raise SourceError(
        f"{repo}{revision}: not in the cache, and the hub may not be asked ({why}); run once "
        f"without that, to download it"
    )


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
