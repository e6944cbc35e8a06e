"""Finds the tensors of a torch pickle and where their bytes are.

Since torch 1.6 a file is an uncompressed zip archive: NAME/data.pkl describes the tensors as views
of storages, and NAME/data/KEY holds the bytes of each storage. Older files are pickles one after
the other: a magic number, a version, the sizes of C types, the description, and the keys of all
storages; then follow their bytes, each with a count of elements before it.

torch itself reads the description, with `weights_only`, and allocates nothing; each storage then
tells where its bytes are.
"""

import os
import warnings
import zipfile
from operator import attrgetter
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from nf4conv.errors import SourceError, first_line
from nf4conv.format.dtypes import DTYPE_BITS, FLOAT_TAGS, TORCH_NAMES
from nf4conv.sources.arranged import Strided
from nf4conv.sources.header import check_name
from nf4conv.sources.tensors import TensorInfo

if TYPE_CHECKING:
    import torch

_TAGS: Final = {f"torch.{name}": tag for tag, name in TORCH_NAMES.items()}
"""safetensors' dtype tag by torch's dtype."""

_ARCHIVE: Final = b"PK\3\4"  # how a zip archive begins
_MAGIC: Final = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How an older file begins, behind two bytes that tell the pickle protocol."""


def read_pickle_header(path: Path) -> tuple[TensorInfo, ...]:
    """Returns the tensors of a file that `torch.save` wrote from a state dict, in the order of
    their bytes.

    Nothing in the file is executed. Tensors that share memory are each read from there. A tensor
    whose elements are not in order gets an encoding.
    """
    try:
        state, stored = _load(path)
        tensors = []
        for name, tensor in _named_tensors(state).items():
            tensors.append(_describe(path, name, tensor, stored))
    except SourceError:
        raise
    except Exception as error:  # torch and zipfile raise anything for what is damaged
        raise SourceError(
            f"{path}: {_reason(error)}; only pickles of tensors are read, convert it to "
            f"safetensors",
            path=path,
        ) from error
    tensors.sort(key=attrgetter("start", "stop", "name"))
    return tuple(tensors)


def _load(path: Path) -> tuple[Any, dict[int, int]]:
    """Returns what a file holds, whose tensors have no memory, and where the bytes of storages
    begin in the file, with their number.
    """
    import torch  # importing it takes a second
    from torch._subclasses.fake_tensor import FakeTensorMode

    with path.open("rb") as file, warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("ignore")  # torch warns of the pickle protocols 3 and newer
        head = file.read(2 + len(_MAGIC))
        if head.startswith(_ARCHIVE):
            stored = _stored_bytes(file)  # refuses big-endian data, at which torch crashes
            return torch.load(path, weights_only=True, mmap=False), stored
        if head[2:] == _MAGIC:
            return _load_older(file)
    raise SourceError(f"{path}: no file of torch; download it again", path=path)


def _stored_bytes(file: BinaryIO) -> dict[int, int]:
    """Returns where the entries of a zip archive begin in the file, with their sizes in bytes."""
    stored = {}
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename} is compressed, as torch never does")
            if entry.filename.endswith("/byteorder") and archive.read(entry) != b"little":
                raise ValueError("big-endian data")
            file.seek(entry.header_offset + 26)  # the local header tells two lengths there
            name_length = int.from_bytes(file.read(2), "little")
            extra_length = int.from_bytes(file.read(2), "little")
            start = entry.header_offset + 30 + name_length + extra_length
            if start + entry.file_size > size:
                raise ValueError(f"{entry.filename} reaches beyond the end of the file")
            stored[start] = entry.file_size
    return stored


def _load_older(file: BinaryIO) -> tuple[Any, dict[int, int]]:
    """Does what `_load` does for a file from before torch 1.6, of which the magic number has been
    read (torch/serialization.py: _legacy_load).
    """
    import torch
    from torch._weights_only_unpickler import Unpickler

    storages: dict[str, Any] = {}

    def storage_of(saved: tuple[Any, ...]) -> Any:
        _, kind, key, _, _, view = saved
        if view is not None:
            raise ValueError("a view of a storage, as torch before 0.4 saved")
        if key not in storages:
            empty = torch.UntypedStorage(0, device="meta")  # type: ignore[no-untyped-call]
            typed: Any = torch.TypedStorage
            storages[key] = typed(wrap_storage=empty, dtype=kind.dtype, _internal=True)
        return storages[key]

    def load() -> Any:
        unpickler: Any = Unpickler(file, encoding="utf-8")
        unpickler.persistent_load = storage_of
        return unpickler.load()

    load(), load()  # version and sizes, which were always the same
    state, keys = load(), load()
    stored = {}
    for key in keys:
        count = int.from_bytes(file.read(8), "little")
        start = file.tell()
        storages[key].untyped()._checkpoint_offset = start
        stored[start] = count * storages[key].dtype.itemsize
        file.seek(stored[start], os.SEEK_CUR)
    if file.tell() > file.seek(0, os.SEEK_END):
        raise ValueError("storages reach beyond the end of the file")
    return state, stored


def _named_tensors(state: Any) -> dict[str, "torch.Tensor"]:
    """Returns a state dict, or the "state_dict" in a training checkpoint."""
    import torch

    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict):
        raise TypeError(f"holds a {type(state).__name__}, not a state dict")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise TypeError(f"{str(name)[:100]}: a {type(value).__name__}, not a named tensor")
    return state


def _describe(path: Path, name: str, tensor: "torch.Tensor", stored: dict[int, int]) -> TensorInfo:
    """Returns where a tensor's bytes are; raises an error unless they are all in one entry of the
    archive, of which `stored` has the places and sizes.
    """
    check_name(path, name)
    dtype = _TAGS.get(str(tensor.dtype))
    if dtype is None:
        raise TypeError(f"{name}: a tensor of {tensor.dtype}")
    # torch tells it of fake tensors (torch/storage.py); torch 2.9 exaggerates a storage's size
    place: int = tensor.untyped_storage()._checkpoint_offset  # type: ignore[assignment]
    shape, strides = tuple(tensor.shape), tensor.stride()
    is_in_order = tensor.is_contiguous()
    span = tensor.numel()  # elements from the first to the last
    if not is_in_order:
        span = 1 + sum((count - 1) * step for count, step in zip(shape, strides, strict=True))
    itemsize = DTYPE_BITS[dtype] // 8
    first = int(tensor.storage_offset()) * itemsize
    if first + span * itemsize > stored.get(place, 0):
        raise SourceError.about(
            path, name, "reaches beyond its storage; the download is incomplete"
        )
    start = place + first
    info = TensorInfo(name, dtype, shape, path, start, start + span * itemsize)
    if is_in_order:
        return info
    if tensor.numel() * itemsize > path.stat().st_size:
        raise ValueError(f"{name}: {list(shape)} of {span:,} values, more than the file holds")
    if dtype not in FLOAT_TAGS:
        raise TypeError(f"{name}: {dtype} whose elements are not in order")
    return info._replace(encoding=Strided(info._replace(shape=(span,)), strides))


def _reason(error: Exception) -> str:
    """Returns what an error of torch or zipfile says, on one line and without torch's advice."""
    if isinstance(error.__context__, UnpicklingError):  # torch puts advice around what it says
        error = error.__context__
    text = str(error).partition(" Please use ")[0]
    return first_line(ValueError(text)) if text.strip() else type(error).__name__
