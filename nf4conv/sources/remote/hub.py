"""Fetches what a source needs of a repository of the Hugging Face Hub, or finds it in the cache."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from nf4conv.errors import SourceError
from nf4conv.options import SourceOptions
from nf4conv.sources.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MODEL_INDEX,
    auxiliary_names,
    find_weights,
    read_index,
    split_names,
)
from nf4conv.sources.places import prefix_of
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
        repository: where to get more files.
        absent: weight files that are to be streamed and were not fetched, by the path that they
            would have.
    """

    folder: Path
    origin: Origin
    repository: Repository
    absent: Mapping[Path, RemoteFile]


def _fetched(
    repository: Repository, root: Path, where: SourceOptions, weights: Collection[str] = ()
) -> Fetched:
    """Describes what was fetched: `root` is the folder of the whole repository, `weights` names the
    files whose content is needed. Without --stream they are fetched now.
    """
    prefix = prefix_of(where)
    absent = {}
    if weights and where.stream and not repository.is_offline:
        for name in sorted(weights):
            if not (root / name).is_file():
                absent[root / name] = repository.files[name]
    elif weights:
        repository.fetch(sorted(weights))
    origin = Origin(repository.repo, repository.commit, prefix.rstrip("/"))
    return Fetched(root / prefix, origin, repository, absent)


def fetch_source(repo: str, where: SourceOptions) -> Fetched:
    """Fetches what is needed of a repository: weights of one kind, config, files to be copied."""
    repository = Repository(repo, where)
    prefix = prefix_of(where)
    names = _names_below(repository, prefix)
    at_top = {name for name in names if "/" not in name}
    weights = find_weights(at_top, where.variant, f"{repo}/{prefix}".rstrip("/"))
    small = {str(path) for path in auxiliary_names(names)}
    small.update(name for name in _DESCRIPTIONS if name in names)
    if weights.is_index:
        small.add(weights.name)
    root = repository.fetch([f"{prefix}{name}" for name in sorted(small)], notes_commit=True)
    shards = {weights.name}
    if weights.is_index:
        listed = read_index(root / prefix / weights.name)["weight_map"].values()
        shards = {str(PurePosixPath(name)) for name in listed}
    missing = sorted(shards - set(names))
    if missing:
        place = "cache" if repository.is_offline else "repository"
        raise SourceError(f"{repo}: {weights.name} names {missing[0]}, which the {place} lacks")
    return _fetched(repository, root, where, [f"{prefix}{name}" for name in shards])


def _names_below(repository: Repository, prefix: str) -> list[str]:
    """Returns the names of files that begin with a prefix, without it."""
    names = repository.files
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def fetch_adapter(repo: str, where: SourceOptions) -> tuple[Path, Origin]:
    """Fetches an adapter of PEFT; returns the folder in the cache that holds it, and where it came
    from.
    """
    repository = Repository(repo, where)
    names = [name for name in (ADAPTER_CONFIG, *ADAPTER_WEIGHTS) if name in repository.files]
    if not names:
        raise SourceError(f"{repo}: neither {ADAPTER_CONFIG} nor weights of an adapter in it")
    return repository.fetch(names, notes_commit=True), Origin(repo, repository.commit, "")


def fetch_gguf(repo: str, name: str, where: SourceOptions) -> tuple[Path, Fetched]:
    """Fetches a GGUF file, all files of a split one; with --stream, nothing of them.

    Returns the file in the cache, beside which the others are, and what is still on the Hub.
    """
    repository = Repository(repo, where)
    wanted = f"{prefix_of(where)}{name}"
    if wanted not in repository.files:
        others = sorted(file for file in repository.files if file.endswith(".gguf"))
        raise SourceError(f"{repo}: has no {wanted}; its GGUF files: {', '.join(others) or 'none'}")
    needed = repository.files.keys() & set(split_names(wanted))
    described = [file for file in ("README.md", ".gitattributes") if file in repository.files]
    root = repository.fetch(described, notes_commit=True)
    return root / wanted, _fetched(repository, root, where, needed)


def list_diffusers(repo: str, where: SourceOptions) -> tuple[Fetched, tuple[str, ...]]:
    """Fetches the model_index.json of a diffusers pipeline; returns where it is, and all files of
    the pipeline, relative to the folder.
    """
    repository = Repository(repo, where)
    prefix = prefix_of(where)
    root = repository.fetch([f"{prefix}{MODEL_INDEX}"], notes_commit=True)
    return _fetched(repository, root, where), tuple(_names_below(repository, prefix))
