"""Recognises packed integers: pack-quantized of compressed-tensors, GPTQ and AWQ.

    W_packed   I32   W_scale [, W_zero_point, W_g_idx, W_shape]   compressed-tensors
    P.qweight  I32   P.scales, P.qzeros [, P.g_idx]               GPTQ, AWQ; the weight is P.weight

Shapes say how many bits a code has, so that layers of one checkpoint may differ. Where they leave a
choice, the config or W_shape decides.
"""

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from nf4conv.errors import SourceError
from nf4conv.models.families import is_transposed
from nf4conv.models.module_names import module_of
from nf4conv.sources.encodings.siblings import SiblingTensors, misfit
from nf4conv.sources.encodings.types.integers import PackedIntegers
from nf4conv.sources.tensors import TensorInfo

_BITS: Final = (4, 8, 2, 3)
"""Bits of a code that are decoded, the most usual first."""

_WORD: Final = 32

_SCALE_DTYPES: Final = ("F16", "BF16", "F32")

_INDEX_DTYPES: Final = ("I32", "I64")


def packed_by_compressed_tensors(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises a weight of pack-quantized: its words are I32, where those of FP4 are bytes."""
    stem = tensor.name.removesuffix("_packed")
    scale = siblings.find(f"{stem}_scale")
    if stem == tensor.name or scale is None or tensor.dtype != "I32":
        return None
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise misfit(tensor, scale)
    rows = tensor.shape[0]
    groups = scale.elements // rows
    if scale.shape not in ((rows,), (rows, groups)) or scale.dtype not in _SCALE_DTYPES:
        raise misfit(tensor, scale)
    bits, columns, group_size = _scheme(tensor, stem, groups, siblings)
    zeros = siblings.find(f"{stem}_zero_point")
    if zeros is not None:
        is_packed = zeros.dtype == "I32" and zeros.shape == (_words(rows, bits), groups)
        is_plain = zeros.dtype == "I8" and zeros.shape in ((rows, groups), scale.shape)
        if not is_packed and not is_plain:
            raise misfit(tensor, zeros)
    index = _group_index(tensor, siblings.find(f"{stem}_g_idx"), columns)
    encoding = PackedIntegers(
        values=tensor,
        scale=scale,
        zeros=zeros,
        group_index=index,
        packing="compressed-tensors",
        bits=bits,
        columns=columns,
        group_size=group_size,
    )
    return _presented(tensor, stem, rows, encoding, siblings)


def _scheme(
    tensor: TensorInfo, stem: str, groups: int, siblings: SiblingTensors
) -> tuple[int, int, int]:
    """Returns bits of a code, columns, and columns of a group of a weight of compressed-tensors.

    Raises:
        SourceError: what is stored fits none of the schemes that the config describes.
    """
    words = tensor.shape[1]
    fitting = []
    # releases disagree about how codes of other bits are packed
    schemes = [scheme for scheme in siblings.description.schemes if scheme[0] in (2, 4, 8)]
    if not siblings.description.schemes:
        schemes = [(4, None), (8, None), (2, None)]
    for bits, size in schemes:
        columns = words * _WORD // bits
        if size is None and groups == 1:
            fitting.append((bits, columns, columns))
        elif size is not None and _words(groups * size, bits) == words:
            fitting.append((bits, groups * size, size))
    if len(set(fitting)) == 1 and groups > 1:
        return fitting[0]
    shape = siblings.find(f"{stem}_shape")
    if shape is None:
        if len(set(fitting)) == 1:
            return fitting[0]
        raise _unknown(tensor, "compressed-tensors", siblings)
    columns = _stored_columns(tensor, shape, siblings)
    for bits, _ in schemes:
        if _words(columns, bits) == words and columns % groups == 0:
            return bits, columns, columns // groups
    raise _unknown(tensor, "compressed-tensors", siblings)


def _stored_columns(tensor: TensorInfo, shape: TensorInfo, siblings: SiblingTensors) -> int:
    """Returns the columns that W_shape names."""
    if shape.dtype not in _INDEX_DTYPES or shape.shape != (2,):
        raise misfit(tensor, shape)
    kind = "<2q" if shape.dtype == "I64" else "<2i"
    rows, columns = struct.unpack(kind, siblings.read(shape))
    if rows != tensor.shape[0] or columns <= 0:
        raise SourceError(
            f"{shape.file}: {shape.name}: says {[rows, columns]}, which does not go with "
            f"{tensor.name}, {tensor.dtype} {list(tensor.shape)}",
            path=shape.file,
            tensor=shape.name,
        )
    return int(columns)


def packed_by_gptq(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises a weight of GPTQ: qweight [words, out], qzeros [groups, words]."""
    module = tensor.name.removesuffix(".qweight")
    if module == tensor.name or siblings.description.method != "gptq":
        return None
    scale, zeros = _scales_and_zeros(tensor, module, siblings)
    words, rows = tensor.shape
    groups = scale.shape[0]
    index = siblings.find(f"{module}.g_idx")
    columns = None
    if index is not None and len(index.shape) == 1:
        columns = index.shape[0]
    for bits in _likely_bits(siblings):
        width = words * _WORD // bits if columns is None else columns
        if zeros.shape[1] != _words(rows, bits) or words != _words(width, bits):
            continue
        if bits == 3 and (words % 3 != 0 or zeros.shape[1] % 3 != 0):
            raise misfit(tensor, zeros)
        encoding = PackedIntegers(
            values=tensor,
            scale=scale,
            zeros=zeros,
            group_index=_group_index(tensor, index, width),
            packing="GPTQ",
            bits=bits,
            columns=width,
            group_size=_group_size(tensor, scale, width, groups, siblings),
            zeros_less_one=siblings.description.layout != "gptq_v2",
        )
        return _presented(tensor, f"{module}.weight", rows, encoding, siblings)
    raise _unknown(tensor, "GPTQ", siblings)


def packed_by_awq(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises a weight of AWQ: qweight [in, words], qzeros [groups, words]."""
    module = tensor.name.removesuffix(".qweight")
    if module == tensor.name or siblings.description.method != "awq":
        return None
    scale, zeros = _scales_and_zeros(tensor, module, siblings)
    columns, words = tensor.shape
    groups, rows = scale.shape
    if rows * 4 != words * _WORD:
        raise _unknown(tensor, "AWQ", siblings)
    if zeros.shape != (groups, words):
        raise misfit(tensor, zeros)
    encoding = PackedIntegers(
        values=tensor,
        scale=scale,
        zeros=zeros,
        group_index=None,
        packing="AWQ",
        bits=4,
        columns=columns,
        group_size=_group_size(tensor, scale, columns, groups, siblings),
    )
    return _presented(tensor, f"{module}.weight", rows, encoding, siblings)


def _scales_and_zeros(
    tensor: TensorInfo, module: str, siblings: SiblingTensors
) -> tuple[TensorInfo, TensorInfo]:
    """Returns the scales and the zero points of a weight of GPTQ or AWQ, [groups, …] both."""
    scale = siblings.find(f"{module}.scales")
    zeros = siblings.find(f"{module}.qzeros")
    if scale is None or zeros is None:
        lost = "scales" if scale is None else "qzeros"
        raise SourceError(
            f"{tensor.file}: {tensor.name}: lacks its {lost}, without which it cannot be decoded",
            path=tensor.file,
            tensor=tensor.name,
        )
    if tensor.dtype != "I32" or len(tensor.shape) != 2 or 0 in tensor.shape:
        raise misfit(tensor, scale)
    is_matrix = len(scale.shape) == 2 and 0 not in scale.shape
    if not is_matrix or scale.dtype not in _SCALE_DTYPES:
        raise misfit(tensor, scale)
    if siblings.description.method == "gptq" and scale.shape[1] != tensor.shape[1]:
        raise misfit(tensor, scale)
    if zeros.dtype != "I32" or len(zeros.shape) != 2 or zeros.shape[0] != scale.shape[0]:
        raise misfit(tensor, zeros)
    return scale, zeros


def _likely_bits(siblings: SiblingTensors) -> Iterator[int]:
    """Yields the bits that codes may have, those that the config names first."""
    for bits, _ in siblings.description.schemes:
        if bits in _BITS:
            yield bits
    yield from _BITS


def _group_size(
    tensor: TensorInfo, scale: TensorInfo, columns: int, groups: int, siblings: SiblingTensors
) -> int:
    """Returns the columns of a group; the last group may have fewer."""
    for _, size in siblings.description.schemes:
        if size is not None and -(-columns // size) == groups:
            return size
    if columns % groups != 0:
        raise misfit(tensor, scale)
    return columns // groups


def _group_index(tensor: TensorInfo, index: TensorInfo | None, columns: int) -> TensorInfo | None:
    """Returns the group index of a weight once its shape is checked; its values are not."""
    if index is None:
        return None
    if index.dtype not in _INDEX_DTYPES or index.shape != (columns,):
        raise misfit(tensor, index)
    return index


def _words(codes: int, bits: int) -> int:
    """Returns how many words codes take."""
    return -(-codes * bits // _WORD)


def _unknown(tensor: TensorInfo, packing: str, siblings: SiblingTensors) -> SourceError:
    """Returns the error of a weight whose shape fits none of the numbers of bits."""
    named = ", ".join(str(bits) for bits, _ in siblings.description.schemes) or "none"
    decoded = {"compressed-tensors": "2, 4 and 8", "GPTQ": "2, 3, 4 and 8", "AWQ": "4"}[packing]
    return SourceError(
        f"{tensor.file}: {tensor.name}: {tensor.dtype} {list(tensor.shape)} and its other tensors "
        f"fit no {packing} in {decoded} bits, which nf4conv decodes (bits in the config: {named})",
        path=tensor.file,
        tensor=tensor.name,
    )


def _presented(
    tensor: TensorInfo,
    name: str,
    rows: int,
    encoding: PackedIntegers,
    siblings: SiblingTensors,
) -> TensorInfo:
    """Returns the weight that words stand for, in the dtype of its scales."""
    dtype = encoding.scale.dtype
    if dtype == "F32":
        dtype = siblings.dtype
    shape = (rows, encoding.columns)
    if is_transposed(module_of(name), siblings.families):
        shape = shape[::-1]
        encoding = replace(encoding, is_transposed=True)
    return tensor._replace(name=name, dtype=dtype, shape=shape, encoding=encoding)
