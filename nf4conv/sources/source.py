"""Describes a checkpoint that has been opened, and reads its small tensors.

opening.py opens it. Its tensors are described by their headers; a conversion reads their data.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from nf4conv.errors import SourceError, named
from nf4conv.sources.files import auxiliary_names, files_below, require_own
from nf4conv.sources.reader import each, read_bytes
from nf4conv.sources.tensors import TensorInfo

if TYPE_CHECKING:
    from nf4conv.sources.adapters.adapter import Adapter
    from nf4conv.sources.remote.hub import Fetched
    from nf4conv.sources.remote.repository import RemoteFile

_LARGEST_GAP: Final = 2**16
"""Bytes between two small tensors that are still read at once: a request to the Hub costs more."""

_LONGEST_READ: Final = 2**22  # bytes that are read at once for several small tensors


@dataclass(frozen=True)
class Source:
    """A checkpoint that can be read.

    Attributes:
        folder: the folder with its files. A GGUF file without --config-from has none: its path,
            with the model's name behind it, which cannot exist.
        root: the folder that the user named, which holds `folder`; links may not lead out of it.
        files: the weight files, in order of name.
        tensors: every tensor, in the order of files and of bytes within a file.
        config: the content of config.json; None if there is none.
        stem: the base name of the weight files: "model", or what the source calls them.
        card: where the model card is, if there is one.
        notes: what the user should know about the source.
        stamps: what each weight file was when its header was read; empty for a commit of the Hub,
            which cannot change.
        fetched: where it came from on the Hub, and which weight files are still there; None for a
            local source.
        adapters: the adapters that have been merged into it.
        place: the GGUF file that the user named; None for any other source.
        made: what makes each file beside the weights, in pieces, by its name; None if these are in
            `folder`, and not made of a header.
    """

    folder: Path
    root: Path
    files: tuple[Path, ...]
    tensors: tuple[TensorInfo, ...]
    config: Mapping[str, Any] | None
    stem: str
    card: Path
    notes: tuple[str, ...] = ()
    stamps: Mapping[Path, list[int]] = field(default_factory=dict)
    fetched: "Fetched | None" = None
    adapters: "tuple[Adapter, ...]" = ()
    place: str | None = None
    made: Mapping[str, Callable[[], Iterable[bytes]]] | None = None

    @cached_property
    def by_name(self) -> dict[str, TensorInfo]:
        """The tensors by their names."""
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def absent(self) -> "Mapping[Path, RemoteFile]":
        """Returns the weight files that are on the Hub only, by the paths that they would have."""
        return {} if self.fetched is None else self.fetched.absent

    @property
    def is_gguf(self) -> bool:
        """Returns True if the tensors are those of a GGUF file."""
        return self.place is not None

    @cached_property
    def auxiliary(self) -> tuple[PurePosixPath, ...]:
        """Lists the files that are copied beside the weights, relative to `folder`; raises a
        SourceError for a link out of `root`.
        """
        if self.config is None:
            return ()
        if self.made is not None:
            return tuple(map(PurePosixPath, sorted(self.made)))
        chosen = auxiliary_names(files_below(self.folder))
        for name in chosen:
            require_own(self.folder / name, self.root)
        return chosen

    @contextmanager
    def whole_folder(self) -> Iterator[Path]:
        """Gives a folder in which all files beside the weights are; those made are removed."""
        if self.made is None:
            yield self.folder
            return
        with TemporaryDirectory(prefix="nf4conv-") as folder:
            for name, make in self.made.items():
                with Path(folder, name).open("wb") as file:
                    file.writelines(make())
            yield Path(folder)

    def __str__(self) -> str:
        if self.place is not None:
            return self.place
        return str(self.folder if self.fetched is None else self.fetched.origin)


def stamps_of(files: Collection[Path]) -> dict[Path, list[int]]:
    """Returns what files are now: [bytes, time of the last change that can be set at will, time of
    the last change that the kernel saw], times in ns. Raises a SourceError if one cannot be read.
    """
    return dict(zip(files, each(_stamp_of, files), strict=True))


def _stamp_of(path: Path) -> list[int]:
    with named(path, SourceError):
        status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def source_stamps(source: Source) -> dict[str, list[int]]:
    """Returns what tells a changed source from the one that was opened: the stamp of each weight
    file; for a source from the Hub its name with the commit, and an empty list.
    """
    stamps: dict[str, list[int]] = {}
    if source.fetched is not None:
        stamps[str(source)] = []
    for file, stamp in source.stamps.items():
        is_inside = file.is_relative_to(source.folder)
        stamps[file.relative_to(source.folder).as_posix() if is_inside else str(file)] = stamp
    return stamps


def read_together(source: Source, tensors: Sequence[TensorInfo]) -> dict[str, bytes]:
    """Reads many small tensors, of which those that are near each other are read at once; returns
    the bytes of each by its name.
    """
    groups: list[list[TensorInfo]] = []
    for tensor in sorted(tensors, key=lambda tensor: (str(tensor.file), tensor.start)):
        if groups:
            first, last = groups[-1][0], groups[-1][-1]
            is_near = tensor.file == first.file and tensor.start - last.stop <= _LARGEST_GAP
            if is_near and tensor.stop - first.start <= _LONGEST_READ:
                groups[-1].append(tensor)
                continue
        groups.append([tensor])
    spans = [group[0]._replace(stop=group[-1].stop) for group in groups]
    contents = each(partial(read_bytes, absent=source.absent), spans)
    found = {}
    for group, span, content in zip(groups, spans, contents, strict=True):
        for tensor in group:
            found[tensor.name] = content[tensor.start - span.start : tensor.stop - span.start]
    return found
