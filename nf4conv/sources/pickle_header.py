"""Finds the tensors of a torch pickle and where their bytes are, without torch.

Nothing in the file is run.

Since torch 1.6 a file is an uncompressed zip archive: NAME/data.pkl describes the tensors as views
of storages, and NAME/data/KEY holds the bytes of each storage. Before, it was a row of pickles — a
magic number, a version, facts of the writing machine, the description, the keys of the storages —
and then for each key the number of elements and the bytes (torch/serialization.py: _save,
_legacy_save).
"""

import io
import mmap
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from io import BytesIO
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, Final, TypeAlias, cast

from nf4conv.errors import SourceError, named
from nf4conv.format.dtypes import DTYPE_BITS, FLOAT_TAGS
from nf4conv.sources.arranged import Strided
from nf4conv.sources.header import check_name
from nf4conv.sources.pickle_program import PickleError, StoredTensor, run_pickle
from nf4conv.sources.tensors import TensorInfo

_LARGEST_PICKLE: Final = 2**26
_LARGEST_READ: Final = 2**26  # bytes: zipfile reads a directory of half a million storages at once
_LOCAL_HEADER: Final = 30
_STRANGE_FLAGS: Final = 0x61  # encrypted, patched, strongly encrypted
_DAMAGES: Final = (
    zipfile.BadZipFile, zlib.error, RuntimeError, ValueError, EOFError, OverflowError, LookupError
)  # fmt: skip
"""Errors that zipfile raises about damaged archives."""

_LEGACY_MAGIC: Final = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL: Final = 1001


_Content: TypeAlias = tuple[Any, Mapping[str, range]]
"""The value of a pickle, and by the key of each storage the place of its bytes in the file."""


def read_pickle_header(path: Path) -> tuple[TensorInfo, ...]:
    """Returns the tensors of a file that `torch.save` wrote from a state dict, in the order of
    their bytes.

    Nothing in the file is executed. Tensors that share memory are each read from there. A tensor
    whose elements are not in order gets an encoding.
    """
    try:
        with named(path, SourceError), _BoundedFile(io.FileIO(path)) as file:
            size = file.seek(0, 2)
            read = _read_zip if zipfile.is_zipfile(file) else _read_legacy
            state, storages = read(file, size)
        tensors = []
        for name, tensor in _tensors(state):
            tensors.append(_describe(path, size, name, tensor, storages))
    except _DAMAGES as error:
        raise SourceError(
            f"{path}: a damaged zip archive: {error}; download it again", path=path
        ) from error
    except PickleError as error:
        raise SourceError(
            f"{path}: {error}; only pickles of tensors are read, convert it to safetensors",
            path=path,
        ) from error
    tensors.sort(key=attrgetter("start", "stop", "name"))
    return tuple(tensors)


class _BoundedFile(io.BufferedReader):
    """A file of which nothing absurd is read at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            return super().read(_LARGEST_READ)
        if size > _LARGEST_READ:
            raise PickleError(f"a zip archive with a directory of {size:,} bytes")
        return super().read(size)


def _read_zip(file: IO[bytes], _size: int) -> _Content:
    """Reads a file of torch 1.6 or newer."""
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        pickles = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise PickleError("a zip archive without a data.pkl, so not a file of torch")
        folder = pickles[0].removesuffix("data.pkl")
        _check_plain(entries[pickles[0]])
        state = run_pickle(BytesIO(archive.read(pickles[0])))
        order = entries.get(f"{folder}byteorder")
        if order is not None:
            _check_plain(order)
            if order.file_size > 8 or archive.read(order) != b"little":
                raise PickleError("big-endian data")
    prefix = f"{folder}data/"
    storages = {}
    for name, entry in entries.items():
        if name.startswith(prefix):
            storages[name.removeprefix(prefix)] = _locate(file, entry)
    return state, storages


def _check_plain(entry: zipfile.ZipInfo) -> None:
    """Raises a PickleError unless an entry is stored as it is, and no larger than it may be."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _STRANGE_FLAGS:
        raise PickleError(f"{entry.filename} is compressed or encrypted, as torch never does")
    if entry.filename.endswith(".pkl") and entry.file_size > _LARGEST_PICKLE:
        raise PickleError(
            f"{entry.filename} has {entry.file_size:,} bytes, more than a state dict needs"
        )


def _locate(file: IO[bytes], entry: zipfile.ZipInfo) -> range:
    """Returns where an entry's bytes are.

    Its local header has a name and an extra field whose lengths only that header tells.
    """
    _check_plain(entry)
    file.seek(entry.header_offset)
    header = file.read(_LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or not header.startswith(b"PK\x03\x04"):
        raise zipfile.BadZipFile(f"{entry.filename} is not where the archive says")
    name_length = int.from_bytes(header[26:28], "little")
    extra_length = int.from_bytes(header[28:30], "little")
    start = entry.header_offset + _LOCAL_HEADER + name_length + extra_length
    return range(start, start + entry.file_size)


def _read_legacy(file: IO[bytes], size: int) -> _Content:
    """Reads a file of torch before 1.6."""
    if size == 0:
        raise PickleError("an empty file")
    with mmap.mmap(file.fileno(), min(size, _LARGEST_PICKLE), access=mmap.ACCESS_READ) as mapped:
        head = cast("IO[bytes]", mapped)  # it reads like a file, and never more than there is
        if run_pickle(head) != _LEGACY_MAGIC or run_pickle(head) != _LEGACY_PROTOCOL:
            raise PickleError("neither a zip archive nor a legacy file of torch")
        machine = run_pickle(head)
        state = run_pickle(head)
        keys = run_pickle(head)
        position = mapped.tell()
    if not isinstance(machine, dict) or not isinstance(keys, list):
        raise PickleError("not a legacy file of torch")
    if not machine.get("little_endian", True):
        raise PickleError("big-endian data")
    known = {tensor.storage.key: tensor.storage for _, tensor in _tensors(state)}
    storages = {}
    for key in keys:  # in the order of their bytes
        if not isinstance(key, str) or position > size:
            raise PickleError(
                "a storage without a name, or beyond the end of the file; the download may be "
                "incomplete"
            )
        file.seek(position)
        elements = int.from_bytes(file.read(8), "little")
        if key not in known or known[key].elements != elements:
            raise PickleError(f"a storage of {elements:,} elements that no tensor describes")
        start = position + 8
        position = start + known[key].nbytes
        storages[key] = range(start, position)
    return state, storages


def _tensors(state: Any) -> Iterator[tuple[str, StoredTensor]]:
    """Yields names and tensors of a state dict, or of the "state_dict" in a training checkpoint."""
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict):
        raise PickleError(f"holds a {type(state).__name__}, not a state dict")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, StoredTensor):
            raise PickleError(f"{str(name)[:100]}: a {type(value).__name__}, not a tensor")
        yield name, value


def _describe(
    path: Path, size: int, name: str, tensor: StoredTensor, storages: Mapping[str, range]
) -> TensorInfo:
    """Returns where a tensor's bytes are; raises an error unless they are all in the file, which
    has `size` bytes.
    """
    check_name(path, name)
    shape, stride = tensor.shape, tensor.stride
    if len(shape) != len(stride):
        raise PickleError(f"{name}: shape {shape} and strides {stride} make no tensor")
    itemsize = DTYPE_BITS[tensor.dtype] // 8
    storage = storages.get(tensor.storage.key)
    if storage is None or len(storage) < tensor.storage.nbytes:
        raise PickleError(f"{name}: the bytes of its storage are missing")
    is_empty = 0 in shape
    length = 0 if is_empty else 1  # elements from the tensor's first to its last
    in_order = 1  # the stride of a dimension if elements stand one after the other
    is_in_order = True
    for count, step in zip(reversed(shape), reversed(stride), strict=True):
        if not is_empty:
            length += (count - 1) * step
            is_in_order &= count == 1 or step == in_order
        in_order *= count
    start = storage.start + tensor.offset * itemsize
    stop = start + length * itemsize
    if stop - storage.start > tensor.storage.nbytes or stop > size:
        raise SourceError.about(
            path, name, "reaches beyond the end of its storage; the download is incomplete"
        )
    info = TensorInfo(name, tensor.dtype, shape, path, start, stop)
    if is_in_order:
        return info
    if info.elements * itemsize > size:
        raise PickleError(
            f"{name}: {list(shape)} {tensor.dtype} of {length:,} values, more than the file holds"
        )
    if tensor.dtype not in FLOAT_TAGS:
        raise PickleError(f"{name}: {tensor.dtype} whose elements are not in order")
    return info._replace(encoding=Strided(info._replace(shape=(length,)), stride))
