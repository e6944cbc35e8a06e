"""Recognises packed integers: compressed-tensors' pack-quantized, GPTQ, AWQ, torchao, Quark.

    W_packed   I32          W_scale [, W_zero_point, W_g_idx, W_shape]   compressed-tensors
    P.qweight  I32          P.scales, P.qzeros [, P.g_idx]               GPTQ, AWQ
    P._weight_qdata I8, I32 P._weight_scale, P._weight_zero_point        torchao
    W          I32          W_scale, W_zero_point                        Quark

The weight of GPTQ, AWQ and torchao is P.weight.
Shapes say how many bits a code has, so that layers of one checkpoint may differ. Where they leave a
choice, the config or W_shape decides.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from nf4conv.errors import SourceError
from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.models.families import is_transposed
from nf4conv.models.module_names import module_of
from nf4conv.sources.encodings.description import Scheme
from nf4conv.sources.encodings.siblings import SiblingTensors, misfit
from nf4conv.sources.encodings.types.integers import WORD, PackedIntegers, words_of
from nf4conv.sources.tensors import TensorInfo

_BITS_OF_GPTQ: Final = (4, 8, 2, 3, 5, 6, 7)
"""Bits of a code that are decoded, the most usual first; AutoRound alone has those from 5 to 7."""

_BITS_OF_AWQ: Final = (4, 5, 6, 7)

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
    packing = _packing_of(tensor, stem, groups, siblings)
    zeros = siblings.find(f"{stem}_zero_point")
    if zeros is not None:
        lines = words_of(rows, packing.bits, is_padded=packing.is_padded)
        is_packed = zeros.dtype == "I32" and zeros.shape == (lines, groups)
        is_plain = zeros.dtype == "I8" and zeros.shape in ((rows, groups), scale.shape)
        if not is_packed and not is_plain:
            raise misfit(tensor, zeros)
    index = _group_index(tensor, siblings.find(f"{stem}_g_idx"), packing.columns)
    encoding = PackedIntegers(
        values=tensor,
        scale=scale,
        zeros=zeros,
        group_index=index,
        packing="compressed-tensors",
        bits=packing.bits,
        columns=packing.columns,
        group_size=packing.group_size,
        is_padded=packing.is_padded,
    )
    return _presented(tensor, stem, rows, encoding, siblings)


class _Packing(NamedTuple):
    """Tells how a weight of compressed-tensors is packed."""

    bits: int
    columns: int
    group_size: int
    is_padded: bool


def _packing_of(tensor: TensorInfo, stem: str, groups: int, siblings: SiblingTensors) -> _Packing:
    """Returns how a weight of compressed-tensors is packed.

    Raises:
        SourceError: what is stored fits none of the schemes that the config describes.
    """
    schemes = [scheme for scheme in siblings.description.schemes if 1 <= scheme[0] <= 8]
    if not siblings.description.schemes:
        schemes = [(4, None), (8, None), (2, None)]
    fitting = _fitting_any(tensor.shape[1], groups, schemes)
    shape = siblings.find(f"{stem}_shape")
    if len(fitting) == 1 and (groups > 1 or shape is None):
        return fitting.pop()
    if shape is None:
        raise _unknown(tensor, "compressed-tensors", siblings)
    columns = _stored_columns(tensor, shape, siblings)
    found: list[_Packing] = []
    for bits in sorted({bits for bits, _ in schemes}):
        found += _fitting(tensor.shape[1], columns, bits, columns // groups)
    # words of whole codes of 7 bits are as many as those of 8 bits
    if columns % groups != 0 or len({packing.bits for packing in found}) != 1:
        raise _unknown(tensor, "compressed-tensors", siblings)
    return found[0]


def _fitting_any(words: int, groups: int, schemes: Iterable[Scheme]) -> set[_Packing]:
    """Returns how words may be packed by what the config describes, if groups tell the columns."""
    fitting: set[_Packing] = set()
    for bits, size in schemes:
        if size is not None:
            fitting.update(_fitting(words, groups * size, bits, size))
        elif groups == 1 and WORD % bits == 0:
            columns = words * WORD // bits
            fitting.add(_Packing(bits, columns, columns, is_padded=False))
    return fitting


def _fitting(words: int, columns: int, bits: int, group_size: int) -> Iterator[_Packing]:
    """Yields how so many columns may be packed into so many words.

    Releases from 0.18 on pack all bits of words. Earlier ones let no code cross the border of two.
    """
    for is_padded in (False, True):
        differs = WORD % bits != 0
        if words_of(columns, bits, is_padded=is_padded) == words and (differs or not is_padded):
            yield _Packing(bits, columns, group_size, is_padded)


def _stored_columns(tensor: TensorInfo, shape: TensorInfo, siblings: SiblingTensors) -> int:
    """Returns the columns that W_shape names."""
    if shape.dtype not in _INDEX_DTYPES or shape.shape != (2,):
        raise misfit(tensor, shape)
    kind = "<2q" if shape.dtype == "I64" else "<2i"
    rows, columns = struct.unpack(kind, siblings.read(shape))
    if rows != tensor.shape[0] or columns <= 0:
        raise SourceError.about(
            shape.file,
            shape.name,
            f"says {[rows, columns]}, which does not go with "
            f"{tensor.name}, {tensor.dtype} {list(tensor.shape)}",
        )
    return int(columns)


def packed_by_gptq(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises a weight of GPTQ: qweight [words, out], qzeros [groups, words]."""
    module = tensor.name.removesuffix(".qweight")
    if module == tensor.name or siblings.description.packing not in ("GPTQ", "GPTQ v2"):
        return None
    scale, zeros = _scales_and_zeros(tensor, module, siblings)
    words, rows = tensor.shape
    groups = scale.shape[0]
    index = siblings.find(f"{module}.g_idx")
    columns = None
    if index is None and groups > 1 and siblings.description.is_reordered:
        raise SourceError.about(
            tensor.file,
            tensor.name,
            "lacks its g_idx, and desc_act in the config says that its columns are not in order",
        )
    if index is not None and len(index.shape) == 1:
        columns = index.shape[0]
    for bits in _likely_bits(siblings):
        width = words * WORD // bits if columns is None else columns
        if zeros.shape[1] != words_of(rows, bits) or words != words_of(width, bits):
            continue
        if WORD % bits != 0 and (words % bits != 0 or zeros.shape[1] % bits != 0):
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
            zeros_less_one=siblings.description.packing == "GPTQ",
        )
        return _presented(tensor, f"{module}.weight", rows, encoding, siblings)
    raise _unknown(tensor, "GPTQ", siblings)


def packed_by_awq(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises a weight of AWQ: qweight [in, words], qzeros [groups, words]."""
    module = tensor.name.removesuffix(".qweight")
    if module == tensor.name or siblings.description.packing != "AWQ":
        return None
    scale, zeros = _scales_and_zeros(tensor, module, siblings)
    columns, words = tensor.shape
    groups, rows = scale.shape
    bits = words * WORD // rows
    if rows * bits != words * WORD or bits not in _BITS_OF_AWQ or rows % 8 != 0:
        raise _unknown(tensor, "AWQ", siblings)
    if zeros.shape != (groups, words):
        raise misfit(tensor, zeros)
    group_size = _group_size(tensor, scale, columns, groups, siblings)
    encoding = _in_words_of_awq(tensor, scale, zeros, bits, group_size)
    return _presented(tensor, f"{module}.weight", rows, encoding, siblings)


def packed_by_quark(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises a weight of Quark in 4 bits: [in, words], scale and zero points [groups, …]."""
    packing = siblings.description.packing
    scale = siblings.find(f"{tensor.name}_scale")
    zeros = siblings.find(f"{tensor.name}_zero_point")
    if packing not in ("int4", "uint4") or tensor.dtype != "I32":
        return None
    if scale is None or zeros is None:
        return None
    if len(tensor.shape) != 2 or len(scale.shape) != 2 or 0 in (*tensor.shape, *scale.shape):
        raise misfit(tensor, scale)
    columns, words = tensor.shape
    groups, rows = scale.shape
    if rows != 8 * words or columns % groups != 0 or scale.dtype not in _SCALE_DTYPES:
        raise misfit(tensor, scale)
    if zeros.dtype != "I32" or zeros.shape != (groups, words):
        raise misfit(tensor, zeros)
    if groups == rows and not siblings.description.names_release:
        raise SourceError.about(
            tensor.file,
            tensor.name,
            f"of Quark, has as many groups as rows, {rows:,}, and the config names no version: "
            "releases before 0.6 stored scales the other way round; give the checkpoint that it "
            "was made from",
        )
    encoding = _in_words_of_awq(tensor, scale, zeros, bits=4, group_size=columns // groups)
    encoding = replace(encoding, is_signed=packing == "int4")
    return _presented(tensor, tensor.name, rows, encoding, siblings)


def _in_words_of_awq(
    values: TensorInfo, scale: TensorInfo, zeros: TensorInfo, bits: int, group_size: int
) -> PackedIntegers:
    """Returns the encoding of words [in, words], with zero points [groups, words]."""
    return PackedIntegers(
        values=values,
        scale=scale,
        zeros=zeros,
        group_index=None,
        packing="AWQ",
        bits=bits,
        columns=values.shape[0],
        group_size=group_size,
    )


def packed_by_torchao(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises a weight of Int4Tensor, or of Int4PlainInt32Tensor, of torchao.

    The former has two codes a byte, qdata I8 [out, in / 2], and zero points in the dtype of the
    scales, [groups, out]. The latter, for GPUs of Intel, has qdata I32 [out, in / 8] and zero
    points I8. Other classes have fields of the same names, and other shapes; for NPUs, the latter
    has zero points in floats.
    """
    stored = tensor.name.removesuffix("_qdata")
    module, is_field, weight = stored.rpartition("._")
    sizes = [size for _, size in siblings.description.schemes if size is not None]
    is_of_torchao = siblings.description.method == "torchao" and stored != tensor.name
    if not is_of_torchao or not is_field or not sizes:
        return None
    scale = siblings.find(f"{stored}_scale")
    zeros = siblings.find(f"{stored}_zero_point")
    if scale is None or zeros is None or len(tensor.shape) != 2 or len(scale.shape) != 2:
        return None
    if tensor.dtype != "I32" and zeros.dtype not in _SCALE_DTYPES:
        return None  # of 8 bits
    rows, width = tensor.shape
    groups = scale.shape[0]
    columns = width * DTYPE_BITS[tensor.dtype] // 4
    kinds = (tensor.dtype, zeros.dtype)
    if kinds not in (("I8", scale.dtype), ("U8", scale.dtype), ("I32", "I8")):
        raise misfit(tensor, zeros)
    if scale.dtype not in _SCALE_DTYPES or not scale.shape == zeros.shape == (groups, rows):
        raise misfit(tensor, scale)
    if columns % 8 != 0 or columns == 0 or columns not in [groups * size for size in sizes]:
        raise misfit(tensor, scale)
    encoding = PackedIntegers(
        values=tensor._replace(dtype="I32", shape=(rows, columns // 8)),
        scale=scale,
        zeros=zeros,
        group_index=None,
        packing="torchao",
        bits=4,
        columns=columns,
        group_size=columns // groups,
        is_signed=tensor.dtype != "I32",
    )
    return _presented(tensor, f"{module}.{weight}", rows, encoding, siblings)


def _scales_and_zeros(
    tensor: TensorInfo, module: str, siblings: SiblingTensors
) -> tuple[TensorInfo, TensorInfo]:
    """Returns the scales and the zero points of a weight of GPTQ or AWQ, [groups, …] both."""
    scale = siblings.find(f"{module}.scales")
    zeros = siblings.find(f"{module}.qzeros")
    if scale is None or zeros is None:
        lost = "scales" if scale is None else "qzeros"
        raise SourceError.about(
            tensor.file, tensor.name, f"lacks its {lost}, without which it cannot be decoded"
        )
    if tensor.dtype != "I32" or len(tensor.shape) != 2 or 0 in tensor.shape:
        raise misfit(tensor, scale)
    is_matrix = len(scale.shape) == 2 and 0 not in scale.shape
    if not is_matrix or scale.dtype not in _SCALE_DTYPES:
        raise misfit(tensor, scale)
    if siblings.description.packing != "AWQ" and scale.shape[1] != tensor.shape[1]:
        raise misfit(tensor, scale)
    if zeros.dtype != "I32" or len(zeros.shape) != 2 or zeros.shape[0] != scale.shape[0]:
        raise misfit(tensor, zeros)
    return scale, zeros


def _likely_bits(siblings: SiblingTensors) -> Iterator[int]:
    """Yields the bits that codes may have, those that the config names first."""
    for bits, _ in siblings.description.schemes:
        if bits in _BITS_OF_GPTQ:
            yield bits
    yield from _BITS_OF_GPTQ


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


def _unknown(tensor: TensorInfo, packing: str, siblings: SiblingTensors) -> SourceError:
    """Returns the error of a weight whose shape fits none of the numbers of bits."""
    named = ", ".join(str(bits) for bits, _ in siblings.description.schemes) or "none"
    decoded = {"compressed-tensors": "1 to 8", "GPTQ": "2 to 8", "AWQ": "4 to 7"}[packing]
    return SourceError.about(
        tensor.file,
        tensor.name,
        f"{tensor.dtype} {list(tensor.shape)} and its other tensors "
        f"fit no {packing} in {decoded} bits, which nf4conv decodes (bits in the config: {named})",
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
