"""Reads the headers of all weight files, on disk or on the Hub, and the index that lists them."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nf4conv.errors import SourceError
from nf4conv.sources.header import MOST_TENSORS, header_json, parse_header
from nf4conv.sources.pickle_header import read_pickle_header
from nf4conv.sources.reader import FileBytes, bytes_of, each
from nf4conv.sources.source import stamp_of
from nf4conv.sources.tensors import TensorInfo

if TYPE_CHECKING:
    from nf4conv.sources.remote.hub import Fetched


def check_index(
    folder: Path,
    weight_map: Mapping[str, str],
    files: Mapping[str, Path],
    tensors: Iterable[TensorInfo],
) -> None:
    """Raises a SourceError if a file lacks a tensor that the index places there."""
    held_in = {tensor.name: tensor.file for tensor in tensors}
    for name, file in weight_map.items():
        if held_in.get(name) is not files[file]:
            raise SourceError.about(
                folder / file, name, "the index places this tensor here, but the file lacks it"
            )


def read_headers(
    files: tuple[Path, ...], fetched: "Fetched | None" = None
) -> tuple[tuple[TensorInfo, ...], dict[Path, list[int]]]:
    """Reads the headers of all weight files.

    Returns the tensors, in the order of files and of bytes within a file, and what the files were
    then: of a commit nothing, for it cannot change. Raises a SourceError if two files have the same
    tensor.
    """
    seen: dict[str, TensorInfo] = {}
    stamps: dict[Path, list[int]] = {}
    # threads wait for files, but would hinder each other in looking at what they have read
    heads = each(partial(_read_head, fetched), files)
    for file, (head, size, stamp) in zip(files, heads, strict=True):
        if stamp is not None:
            stamps[file] = stamp
        if file.suffix == ".safetensors":
            tensors = parse_header(head, file, size)
        else:
            tensors = read_pickle_header(file)
        if len(seen) + len(tensors) > MOST_TENSORS:
            raise SourceError(
                f"{file}: more than {MOST_TENSORS:,} tensors in all files up to it, as no model "
                f"has",
                path=file,
            )
        for tensor in tensors:
            if tensor.name in seen:
                raise SourceError.about(file, tensor.name, f"also in {seen[tensor.name].file.name}")
            seen[tensor.name] = tensor
    if not seen:
        raise SourceError(f"{', '.join(str(file) for file in files)}: no tensors")
    return tuple(seen.values()), stamps


def _read_head(fetched: "Fetched | None", path: Path) -> tuple[bytes, int, list[int] | None]:
    """Reads the header of a weight file, on disk or on the Hub: its JSON; of a pickle nothing.

    Returns it with the size of the file, and what the file is now.
    """
    is_plain = path.suffix == ".safetensors"
    if fetched is None or fetched.repository is None or path not in fetched.absent:
        stamp = stamp_of(path)
        head = b""
        if is_plain:
            with bytes_of(path) as file:
                head = header_json(path, file)
        return head, stamp[0], stamp if fetched is None else None
    if not is_plain:
        raise SourceError(
            f"{path}: only safetensors can be streamed; run without --stream", path=path
        )
    remote = fetched.absent[path]
    read = partial(fetched.repository.read, remote)
    return header_json(path, FileBytes(remote.size, read)), remote.size, None
