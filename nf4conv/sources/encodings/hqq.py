"""Recognises weights of HQQ, as hqq's state dicts and transformers 4 store them.

    P.W_q   U8, I32 or viewed as floats   P.scale, P.zero   and P.nbits, P.shape, P.axis …

Everything about a weight is a tensor beside it: numbers, flags, and text as a byte for each letter.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Final

from nf4conv.errors import SourceError
from nf4conv.sources.encodings.siblings import SiblingTensors, misfit
from nf4conv.sources.encodings.types.integers import HalfQuadratic
from nf4conv.sources.header import LARGEST_SIZE
from nf4conv.sources.tensors import TensorInfo

FIELDS: Final = (
    "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float",
    "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict",
    "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
"""Tensors beside a weight that only describe it."""

_PACKINGS: Final = {"8bit_u8": 8, "4bit_u8": 4, "3bit_32": 3, "2bit_u8": 2, "1bit_u8": 1}
"""Bits of a code by the name of its packing. Codes of 5 and 6 bits are packed as those of 8."""

_LARGEST: Final = 64  # bytes of a tensor that describes a weight; hqq writes 16 at most

_SCALE_DTYPES: Final = ("F16", "BF16", "F32")


def read_by_hqq(tensors: Iterable[TensorInfo]) -> Iterator[TensorInfo]:
    """Yields the tensors that are read to recognise weights of HQQ: they are best read together."""
    for tensor in tensors:
        _, _, field = tensor.name.rpartition(".")
        if field in ("packing", "shape", "axis", "group_size") and tensor.nbytes <= _LARGEST:
            yield tensor


def packed_by_hqq(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises a weight of HQQ by its W_q, scale and zero."""
    module = tensor.name.removesuffix(".W_q")
    scale = siblings.find(f"{module}.scale")
    zero = siblings.find(f"{module}.zero")
    if module == tensor.name or scale is None or zero is None:
        return None
    if scale.dtype not in _SCALE_DTYPES or zero.dtype != scale.dtype or zero.shape != scale.shape:
        raise misfit(scale, zero)
    packing = _read(tensor, module, "packing", siblings).decode("ascii", "replace")
    if packing not in _PACKINGS:
        raise SourceError.about(
            tensor.file,
            tensor.name,
            f"packed as {packing!r:.40}; nf4conv decodes {', '.join(_PACKINGS)} of HQQ",
        )
    shape = _shape(tensor, module, siblings)
    axis = _number(tensor, module, "axis", siblings)
    group_size = _number(tensor, module, "group_size", siblings)
    weight = tensor._replace(name=f"{module}.weight", dtype=scale.dtype, shape=shape)
    bits = _PACKINGS[packing]
    if weight.elements != scale.elements * group_size or axis not in (0, 1):
        raise misfit(tensor, scale)
    if tensor.nbytes != _bytes(weight.elements, bits, axis, group_size):
        raise misfit(tensor, scale)
    if bits == 3:  # whatever floats they are stored as
        words = tensor._replace(dtype="I32", shape=(tensor.nbytes // 4,))
    else:
        words = tensor._replace(dtype="U8", shape=(tensor.nbytes,))
    encoding = HalfQuadratic(words, scale, zero, bits, axis, group_size, weight.elements)
    return weight._replace(encoding=encoding)


def _bytes(elements: int, bits: int, axis: int, group_size: int) -> int:
    """Returns how many bytes the words of a weight take."""
    if bits != 3:
        return -(-elements * bits // 8)
    rows = group_size if axis == 0 else elements // group_size
    return -(-rows // 10) * (elements // rows) * 4


def _shape(tensor: TensorInfo, module: str, siblings: SiblingTensors) -> tuple[int, ...]:
    raw = _read(tensor, module, "shape", siblings)
    if len(raw) != 16:
        raise _described_wrong(tensor, module, "shape")
    rows, columns = struct.unpack("<2q", raw)
    if not 0 < rows < LARGEST_SIZE or not 0 < columns < LARGEST_SIZE:
        raise _described_wrong(tensor, module, "shape")
    return rows, columns


def _number(tensor: TensorInfo, module: str, field: str, siblings: SiblingTensors) -> int:
    raw = _read(tensor, module, field, siblings)
    if len(raw) != 4:
        raise _described_wrong(tensor, module, field)
    [number] = struct.unpack("<i", raw)
    if number < 0:
        raise _described_wrong(tensor, module, field)
    return int(number)


def _read(tensor: TensorInfo, module: str, field: str, siblings: SiblingTensors) -> bytes:
    """Reads a tensor that describes a weight."""
    found = siblings.find(f"{module}.{field}")
    if found is None or found.nbytes > _LARGEST:
        raise _described_wrong(tensor, module, field)
    return siblings.read(found)


def _described_wrong(tensor: TensorInfo, module: str, field: str) -> SourceError:
    return SourceError.about(
        tensor.file, tensor.name, f"{module}.{field} is missing, or nothing that HQQ writes"
    )
