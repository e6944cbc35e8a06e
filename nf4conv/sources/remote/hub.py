"""Fetches what a source needs of a repository of the Hugging Face Hub, or finds it in the cache.

HF_HUB_OFFLINE forbids to ask the Hub.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import huggingface_hub
import huggingface_hub.utils
from huggingface_hub import constants

from nf4conv.errors import SourceError
from nf4conv.options import SourceOptions
from nf4conv.sources.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MODEL_INDEX,
    auxiliary_names,
    find_weights,
    read_index,
)
from nf4conv.sources.places import prefix_of
from nf4conv.sources.remote.asking import explained
from nf4conv.sources.remote.repository import RemoteFile, Repository

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
"""Files of which every source has at least one. By them a source is found in the cache."""


@dataclass(frozen=True)
class Origin:
    """The place on the Hub that a source came from."""

    repo: str  # "org/name"
    commit: str  # 40 hexadecimal digits
    subfolder: str  # of the repository; empty for its root

    def __str__(self) -> str:
        place = f"{self.repo}/{self.subfolder}" if self.subfolder else self.repo
        return f"{place}@{self.commit}"


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
    """Fetches what is needed of a repository: weights of one kind, config, files to be copied."""
    if _is_offline(where):
        found = _from_cache(repo, where)
        require_content(found.folder, _small_files(_names_in(found.folder)))
        return found
    repository = Repository(repo, where)
    prefix = prefix_of(where)
    names = _names_below(repository, prefix)
    place = f"{repo}/{prefix}".rstrip("/")
    at_top = {name for name in names if "/" not in name}
    weights = find_weights(at_top, where.variant, place)
    small = _small_files(names)
    if weights.is_index:
        small.add(weights.name)
    root = repository.fetch([f"{prefix}{name}" for name in sorted(small)], notes_commit=True)
    folder = root / prefix
    shards = [weights.name]
    if weights.is_index:
        listed = read_index(folder / weights.name).values()
        shards = sorted({str(PurePosixPath(name)) for name in listed})
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


def _names_below(repository: Repository, prefix: str) -> list[str]:
    """Returns the names of files that begin with a prefix, without it."""
    names = repository.files
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _small_files(names: Collection[str]) -> set[str]:
    """Returns the files that are read beside the weights, or copied."""
    small = {str(path) for path in auxiliary_names(names)}
    small.update(name for name in _DESCRIPTIONS if name in names)
    return small


def _names_in(folder: Path) -> list[str]:
    """Returns the names of all files of a snapshot, whether their content is there or not."""
    files = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return [path.relative_to(folder).as_posix() for path in files]


def require_content(folder: Path, names: Iterable[str]) -> None:
    """Raises a SourceError if a file of a snapshot in the cache is no more than a name.

    Files are links to blobs. One whose blob was removed would pass for one that the repository
    lacks, and the result would lack it, too.
    """
    for name in sorted(names):
        path = folder / name
        if path.is_symlink() and not path.exists():
            raise SourceError(
                f"{path}: its content is not in the cache any more; run once without "
                f"{_why_offline()}, to download it",
                path=path,
            )


def _is_offline(where: SourceOptions) -> bool:
    """Returns True if the Hub may not be asked."""
    return where.local_files_only or bool(constants.HF_HUB_OFFLINE)


def _why_offline() -> str:
    """Returns what forbids to ask the Hub."""
    return "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "--local-files-only"


def fetch_adapter(repo: str, where: SourceOptions) -> tuple[Path, Origin]:
    """Fetches an adapter of PEFT; returns the folder in the cache that holds it, and where it came
    from.
    """
    if _is_offline(where):
        fetched = _from_cache(repo, where, (ADAPTER_CONFIG,))
        return fetched.folder, fetched.origin
    repository = Repository(repo, where)
    names = [name for name in (ADAPTER_CONFIG, *ADAPTER_WEIGHTS) if name in repository.files]
    if not names:
        raise SourceError(f"{repo}: neither {ADAPTER_CONFIG} nor weights of an adapter in it")
    return repository.fetch(names, notes_commit=True), Origin(repo, repository.commit, "")


def fetch_gguf(repo: str, name: str, where: SourceOptions) -> tuple[Path, Fetched]:
    """Fetches a GGUF file, all files of a split one; with --stream, nothing of them.

    Returns the file in the cache, beside which the others are, and what is still on the Hub.
    """
    if _is_offline(where):
        found = _from_cache(repo, where, (name,))
        require_content(found.folder, ("README.md",))
        return found.folder / Path(name).name, found
    repository = Repository(repo, where)
    wanted = f"{prefix_of(where)}{name}"
    needed = _files_of_gguf(repository, repo, wanted)
    described = [file for file in ("README.md", ".gitattributes") if file in repository.files]
    fetched = described if where.stream else sorted({*needed, *described})
    root = repository.fetch(fetched, notes_commit=True)
    absent = {root / file: repository.files[file] for file in sorted(needed)}
    absent = {path: file for path, file in absent.items() if not path.is_file()}
    origin = Origin(repo, repository.commit, (where.subfolder or "").strip("/"))
    file = root / wanted
    return file, Fetched(file.parent, origin, repository, absent)


def _files_of_gguf(repository: Repository, repo: str, wanted: str) -> set[str]:
    """Returns a GGUF file of a repository, or all files of a split one."""
    if wanted not in repository.files:
        others = sorted(file for file in repository.files if file.endswith(".gguf"))
        raise SourceError(f"{repo}: has no {wanted}; its GGUF files: {', '.join(others) or 'none'}")
    part = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.gguf", wanted)
    if part is None:
        return {wanted}
    # other quantizations may stand beside it, under names that begin alike
    alike = re.compile(rf"{re.escape(part[1])}-\d{{5}}-of-{part[2]}\.gguf")
    return {file for file in repository.files if alike.fullmatch(file)}


def list_diffusers(repo: str, where: SourceOptions) -> tuple[Fetched, tuple[str, ...]]:
    """Fetches the model_index.json of a diffusers pipeline; returns where it is, and all files of
    the pipeline, relative to the folder.
    """
    if _is_offline(where):
        fetched = _from_cache(repo, where)
        return fetched, tuple(_names_in(fetched.folder))
    repository = Repository(repo, where)
    prefix = prefix_of(where)
    folder = repository.fetch([f"{prefix}{MODEL_INDEX}"], notes_commit=True) / prefix
    origin = Origin(repo, repository.commit, prefix.rstrip("/"))
    return Fetched(folder, origin, repository, {}), tuple(_names_below(repository, prefix))


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
    raise SourceError(
        f"{repo}{revision}: not in the cache, and the hub may not be asked ({_why_offline()}); run "
        f"once without that, to download it"
    )
