"""Finds the tensors of a torch pickle and where their bytes are.

Since torch 1.6 a file is an uncompressed zip archive: NAME/data.pkl describes the tensors as views
of storages, and NAME/data/KEY holds the bytes of each storage. torch itself reads the description,
with `weights_only`, and allocates nothing; each storage then tells where its bytes are.
"""

import warnings
import zipfile
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nf4conv.errors import SourceError, first_line
from nf4conv.format.dtypes import DTYPE_BITS, FLOAT_TAGS, TORCH_NAMES
from nf4conv.sources.arranged import Strided
from nf4conv.sources.header import check_name
from nf4conv.sources.tensors import TensorInfo

if TYPE_CHECKING:
    import torch

_TAGS: Final = {f"torch.{name}": tag for tag, name in TORCH_NAMES.items()}
"""safetensors' dtype tag by torch's dtype."""


def read_pickle_header(path: Path) -> tuple[TensorInfo, ...]:
    """Returns the tensors of a file that `torch.save` wrote from a state dict, in the order of
    their bytes.

    Nothing in the file is executed. Tensors that share memory are each read from there. A tensor
    whose elements are not in order gets an encoding.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise SourceError(
                f"{path}: no zip archive, so saved by torch before 1.6, or no file of torch; load "
                f"it with torch and save it again, or download it again",
                path=path,
            )
        stored = _stored_bytes(path)
        tensors = []
        for name, tensor in _load_state(path).items():
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


def _stored_bytes(path: Path) -> dict[int, int]:
    """Returns where the entries of a zip archive begin in the file, with their sizes in bytes."""
    stored = {}
    size = path.stat().st_size
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
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


def _load_state(path: Path) -> dict[Any, Any]:
    """Returns the state dict of a file, or the "state_dict" in a training checkpoint; its tensors
    have no memory.
    """
    import torch  # importing it takes a second
    from torch._subclasses.fake_tensor import FakeTensorMode

    with warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("ignore")  # torch warns of the pickle protocols 3 and newer
        state = torch.load(path, weights_only=True, mmap=False)
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
            path, name, "reaches beyond the end of its storage; the download is incomplete"
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
    text = str(error).rpartition("WeightsUnpickler error:")[2].partition(" Please use ")[0]
    return first_line(ValueError(text)) if text.strip() else type(error).__name__
