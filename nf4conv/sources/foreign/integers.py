"""Packed integers: compressed-tensors' pack-quantized, GPTQ, AWQ, and Int4Tensor of torchao.

Shapes say how many bits a code has, so that layers of one checkpoint may differ. Where they leave a
choice, the config or W_shape decides. The words of GPTQ and AWQ do not lie row by row: rows of such
a weight are columns of its tensors.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from nf4conv.errors import SourceError
from nf4conv.format.integers import WORD, IntegerLayout, words_of
from nf4conv.sources.arranged import Columns
from nf4conv.sources.foreign.config import Description
from nf4conv.sources.foreign.formats import (
    FLOATS,
    Foreign,
    Part,
    SiblingTensors,
    Sizes,
    lacks,
    misfit,
    part,
)
from nf4conv.sources.tensors import Kernel, TensorInfo

_INDEX: Final = part(".g_idx", "I32 I64: in", optional=True)


@dataclass(frozen=True, slots=True)
class PackedIntegers(Foreign):
    """Integers of few bits, packed into words, times scales that groups of columns share.

    value = (code - zero) * scale. codec/decode/integers.py says how the codes lie in the words.
    """

    decoder: ClassVar[str] = "nf4conv.codec.decode.integers:decode_integers"
    has_dtype_of_scales: ClassVar[bool] = True
    may_be_transposed: ClassVar[bool] = True
    range_of_bits: ClassVar[str] = ""  # the bits that are decoded, for an error

    values: TensorInfo
    scale: TensorInfo
    zeros: TensorInfo | None  # None if all are 2^(bits - 1)
    group_index: TensorInfo | None  # the group of each column; None if in order
    codes: IntegerLayout
    is_transposed: bool = False  # True if the weight is [out, in] here and [in, out] in its family

    @property
    def name(self) -> str:
        codes = self.codes
        by_row = codes.group_size >= codes.columns
        groups = "by row" if by_row else f"groups of {codes.group_size}"
        return f"{codes.packing} {codes.bits}-bit, {groups}"

    @property
    def has_few_bits(self) -> bool:
        return self.codes.bits < 8

    @property
    def sizes(self) -> Sizes:
        return {"bits": self.codes.bits}

    @property
    def arguments(self) -> dict[str, Any]:
        return {"layout": self.codes}

    def kernel(self, tensor: TensorInfo) -> Kernel | None:
        codes = self.codes
        if self.is_transposed or not codes.has_kernel:
            return None
        zeros = None if self.zeros is None else self.zeros.dtype
        index = None if self.group_index is None else self.group_index.dtype
        layout = (codes.packing, codes.bits, zeros, codes.zeros_less_one, index, codes.is_signed)
        lines = [_line(part) for part in (self.values, self.scale, self.zeros or self.values)]
        rows, columns = tensor.shape
        return Kernel(
            maker="integer_decoder",
            details=(self.scale.dtype, *layout),
            pointers=("values", "scale", "zeros", "group_index"),
            shape=(rows, columns),
            numbers=(*lines, codes.group_size),
        )

    def rows_together(self, tensor: TensorInfo) -> int | None:
        if self.is_transposed:
            return None
        return WORD  # rows that share whole words, if codes are packed along rows

    @classmethod
    def made_of(
        cls, parts: Mapping[str, TensorInfo], sizes: Sizes, siblings: SiblingTensors
    ) -> "PackedIntegers":
        sizes = {**sizes, "group_size": _group_size(parts, sizes, siblings.description)}
        return cls(
            values=parts["values"],
            scale=parts["scale"],
            zeros=parts.get("zeros"),
            group_index=parts.get("group_index"),
            codes=cls.codes_of(parts, sizes, siblings.description),
        )

    @classmethod
    def codes_of(
        cls, parts: Mapping[str, TensorInfo], sizes: Sizes, description: Description
    ) -> IntegerLayout:
        """Returns how codes lie in the words of a weight of these sizes."""
        raise NotImplementedError

    @classmethod
    def unknown(cls, tensor: TensorInfo, siblings: SiblingTensors) -> SourceError:
        named = ", ".join(str(bits) for bits, _ in siblings.description.schemes) or "none"
        return SourceError.about(
            tensor.file,
            tensor.name,
            f"{tensor.dtype} {list(tensor.shape)} and its other tensors fit no "
            f"{cls.range_of_bits} bits, which nf4conv decodes (bits in the config: {named})",
        )


def _group_size(parts: Mapping[str, TensorInfo], sizes: Sizes, description: Description) -> int:
    """Returns the columns of a group, of which the last may have fewer; raises a SourceError if the
    config names groups, and those of the weight are none of them.
    """
    values, scale = parts["values"], parts["scale"]
    columns, groups = sizes["in"], sizes["groups"]
    named = [size for _, size in description.schemes]
    for size in named:
        if size is not None and -(-columns // size) == groups:
            return size
    if named and None not in named:
        raise SourceError.about(
            values.file,
            values.name,
            f"has {columns:,} columns, and {scale.name} has {groups:,} groups of them; "
            f"the config says groups of {' or '.join(sorted(map(str, set(named))))}",
        )
    if columns % groups != 0:
        raise misfit(values, scale)
    return columns // groups


def _line(part: TensorInfo) -> int:
    """Returns how many elements it is from one line of a part to the next."""
    if isinstance(part.encoding, Columns):
        part = part.encoding.values
    return part.shape[1] if len(part.shape) == 2 else 1


class Gptq(PackedIntegers):
    """GPTQ, GPTQModel and AutoRound: streams of codes down each column of words."""

    __slots__ = ()

    stored = ".qweight"
    weight = ".weight"
    layout: ClassVar[Mapping[str, Part]] = {
        "values": part("", "I32: words(in) out"),
        "scale": part(".scales", f"{FLOATS}: groups out"),
        "zeros": part(".qzeros", "I32: groups words(out)"),
        "group_index": _INDEX,
    }
    range_of_bits = "GPTQ in 2 to 8"

    @classmethod
    def holds(cls, tensor: TensorInfo, stem: str, siblings: SiblingTensors) -> bool:
        return siblings.description.packing in ("GPTQ", "GPTQ v2")

    @classmethod
    def candidates(
        cls, parts: Mapping[str, TensorInfo], told: Sizes | None, description: Description
    ) -> Iterator[Sizes]:
        # the most usual first; AutoRound alone has those from 5 to 7
        likely = [bits for bits, _ in description.schemes if 2 <= bits <= 8]
        for bits in dict.fromkeys([*likely, 4, 8, 2, 3, 5, 6, 7]):
            words = (parts["values"].shape[0], parts["zeros"].shape[1])
            # codes that cross the borders of words fill all of them
            if WORD % bits == 0 or all(number % bits == 0 for number in words):
                yield {"bits": bits}

    @classmethod
    def codes_of(
        cls, parts: Mapping[str, TensorInfo], sizes: Sizes, description: Description
    ) -> IntegerLayout:
        if description.is_reordered and sizes["groups"] > 1 and "group_index" not in parts:
            values = parts["values"]
            raise SourceError.about(
                values.file,
                values.name,
                "lacks its g_idx, and desc_act in the config says that its columns are not in "
                "order",
            )
        if sizes["in"] * sizes["bits"] != parts["values"].shape[0] * WORD:
            raise misfit(parts["values"], parts["group_index"])
        return IntegerLayout(
            packing="GPTQ",
            bits=sizes["bits"],
            columns=sizes["in"],
            group_size=sizes["group_size"],
            zeros_less_one=description.packing == "GPTQ",
        )


class Awq(PackedIntegers):
    """AWQ: words of codes of 8 neighbouring rows, in an order of their own, for each column."""

    __slots__ = ()

    stored = ".qweight"
    weight = ".weight"
    layout: ClassVar[Mapping[str, Part]] = {
        "values": part("", "I32: in words(out)"),
        "scale": part(".scales", f"{FLOATS}: groups out"),
        "zeros": part(".qzeros", "I32: groups words(out)"),
    }
    range_of_bits = "AWQ in 4 to 7"

    @classmethod
    def holds(cls, tensor: TensorInfo, stem: str, siblings: SiblingTensors) -> bool:
        return siblings.description.packing == "AWQ"

    @classmethod
    def candidates(
        cls, parts: Mapping[str, TensorInfo], told: Sizes | None, description: Description
    ) -> Iterator[Sizes]:
        words, rows = parts["values"].shape[1], parts["scale"].shape[1]
        for bits in (4, 5, 6, 7):
            if rows % 8 == 0 and rows * bits == words * WORD:
                yield {"bits": bits}

    @classmethod
    def codes_of(
        cls, parts: Mapping[str, TensorInfo], sizes: Sizes, description: Description
    ) -> IntegerLayout:
        if sizes["in"] % sizes["groups"] != 0:
            raise misfit(parts["values"], parts["scale"])
        return IntegerLayout("AWQ", sizes["bits"], sizes["in"], sizes["group_size"])


class CompressedIntegers(PackedIntegers):
    """pack-quantized of compressed-tensors: a stream of codes for each row.

    Its words are I32, where those of FP4 are bytes.
    """

    __slots__ = ()

    stored = "_packed"
    layout: ClassVar[Mapping[str, Part]] = {
        "values": part("", "I32: out words(in)"),
        "scale": part("_scale", f"{FLOATS}: out groups", f"{FLOATS}: out"),
        "zeros": part(
            "_zero_point", "I32: words(out) groups", "I8: out groups", "I8: out", optional=True
        ),
        "group_index": part("_g_idx", "I32 I64: in", optional=True),
    }
    range_of_bits = "compressed-tensors in 1 to 8"

    @classmethod
    def holds(cls, tensor: TensorInfo, stem: str, siblings: SiblingTensors) -> bool:
        return tensor.dtype == "I32"

    @classmethod
    def told(
        cls, parts: Mapping[str, TensorInfo], stem: str, siblings: SiblingTensors
    ) -> Sizes | None:
        """Returns the columns that W_shape names, if the config and the shapes leave a choice."""
        groups = _groups_of(parts)
        if groups > 1 and len(cls.candidates(parts, None, siblings.description)) == 1:
            return None
        shape = siblings.by_name.get(f"{stem}_shape")
        return {} if shape is None else {"in": _stored_columns(parts["values"], shape, siblings)}

    @classmethod
    def candidates(
        cls, parts: Mapping[str, TensorInfo], told: Sizes | None, description: Description
    ) -> list[Sizes]:
        """Returns how the words are packed by the config, or by W_shape if it leaves a choice."""
        words, groups = parts["values"].shape[1], _groups_of(parts)
        found: list[Sizes] = []
        for bits, size in description.schemes or ((4, None), (8, None), (2, None)):
            if not 1 <= bits <= 8:
                continue
            columns = 0
            if told:
                columns = told["in"]
            elif size is not None:
                columns = groups * size
            elif groups == 1 and WORD % bits == 0:
                columns = words * WORD // bits
            sizes = {"bits": bits, "in": columns, "groups": groups}
            fits = columns % groups == 0 and words_of(columns, bits) == words
            if fits and sizes not in found:
                found.append(sizes)
        return found if len(found) == 1 else []

    @classmethod
    def codes_of(
        cls, parts: Mapping[str, TensorInfo], sizes: Sizes, description: Description
    ) -> IntegerLayout:
        zeros = parts.get("zeros")
        if zeros is None and description.has_zeros:
            name = parts["values"].name.removesuffix(cls.stored)
            raise lacks(parts["values"], f"{name}_zero_point")
        if zeros is not None and zeros.dtype == "I8" and zeros.elements != parts["scale"].elements:
            raise misfit(parts["values"], zeros)
        return IntegerLayout(
            packing="compressed-tensors",
            bits=sizes["bits"],
            columns=sizes["in"],
            group_size=sizes["group_size"],
        )


def _groups_of(parts: Mapping[str, TensorInfo]) -> int:
    """Returns how many groups of a row of compressed-tensors have scales of their own."""
    scale = parts["scale"]
    return scale.shape[1] if len(scale.shape) == 2 else 1


def _stored_columns(tensor: TensorInfo, shape: TensorInfo, siblings: SiblingTensors) -> int:
    """Returns the columns that W_shape names."""
    if shape.dtype not in ("I32", "I64") or shape.shape != (2,):
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


class TorchaoInt4(PackedIntegers):
    """Int4Tensor, and Int4PlainInt32Tensor for GPUs of Intel, of torchao.

    The former has two codes a byte and zero points in the dtype of the scales, which are added. The
    latter has words, and zero points in bytes. Other classes have fields of the same names.
    """

    __slots__ = ()

    method = "torchao"
    stored = "_weight_qdata"
    weight = "weight"
    layout: ClassVar[Mapping[str, Part]] = {
        "values": part("", "I32: out words(in)", "I8 U8: out in/2"),
        "scale": part("_weight_scale", f"{FLOATS}: groups out"),
        "zeros": part("_weight_zero_point", f"I8 {FLOATS}: groups out"),
    }
    range_of_bits = "torchao in 4"

    @classmethod
    def holds(cls, tensor: TensorInfo, stem: str, siblings: SiblingTensors) -> bool:
        zeros = siblings.by_name.get(f"{stem}_weight_zero_point")
        is_of_4_bits = tensor.dtype == "I32" or (zeros is not None and zeros.dtype != "I8")
        return is_of_4_bits and bool(siblings.description.schemes)

    @classmethod
    def candidates(
        cls, parts: Mapping[str, TensorInfo], told: Sizes | None, description: Description
    ) -> list[Sizes]:
        return [{"bits": 4}]

    @classmethod
    def codes_of(
        cls, parts: Mapping[str, TensorInfo], sizes: Sizes, description: Description
    ) -> IntegerLayout:
        values, scale, zeros = parts["values"], parts["scale"], parts["zeros"]
        is_signed = values.dtype != "I32"
        if zeros.dtype != (scale.dtype if is_signed else "I8"):
            raise misfit(values, zeros)
        columns, size = sizes["in"], sizes["group_size"]
        named = [size for _, size in description.schemes]
        if columns % 8 != 0 or columns != sizes["groups"] * size or size not in named:
            raise misfit(values, scale)
        return IntegerLayout("torchao", 4, columns, size, is_signed=is_signed)

    @classmethod
    def made_of(
        cls, parts: Mapping[str, TensorInfo], sizes: Sizes, siblings: SiblingTensors
    ) -> PackedIntegers:
        made = super().made_of(parts, sizes, siblings)
        words = made.values._replace(dtype="I32", shape=(sizes["out"], sizes["in"] // 8))
        return replace(made, values=words)


ENDS_OF_WORDS: Final = (Gptq.stored, CompressedIntegers.stored, "_qdata")
"""Ends of the names of values whose own shapes say little of the weights that they stand for."""
