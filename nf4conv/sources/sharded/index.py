"""Reads the index of a sharded checkpoint, and checks it against the headers of the shards."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath

from nf4conv.errors import SourceError
from nf4conv.sources.own_files import is_file
from nf4conv.sources.reader import read_json
from nf4conv.sources.tensors import TensorInfo
from nf4conv.sources.weight_files import LARGEST_INDEX


def read_weight_map(index: Path, absent: Collection[Path]) -> Mapping[str, str]:
    """Reads which file holds each tensor.

    Args:
        index: the index of a sharded checkpoint.
        absent: shards that need not be there.

    Returns:
        The name of a file by the name of a tensor.

    Raises:
        SourceError: the index is malformed, or a shard is missing.
    """
    weight_map = read_json(index, LARGEST_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index}: has no weight_map", path=index)
    first_of_file: dict[str, str] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise SourceError.about(index, name, f"{file!r} is outside the folder")
        first_of_file.setdefault(file, name)
    for file, name in first_of_file.items():
        relative = PurePosixPath(file)
        if relative.is_absolute() or ".." in relative.parts or "\\" in file:
            raise SourceError.about(index, name, f"{file!r} is outside the folder")
        path = index.parent / relative
        if not is_file(path) and path not in absent:
            raise SourceError.about(
                index, name, f"the shard {file} is missing; the download is incomplete"
            )
    return weight_map


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
            raise SourceError(
                f"{folder / file}: {name}: the index places this tensor here, but the file lacks it"
            )
