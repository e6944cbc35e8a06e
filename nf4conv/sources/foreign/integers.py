"""Packed integers: compressed-tensors' pack-quantized, GPTQ, AWQ, and Int4Tensor of torchao.

Shapes say how many bits a code has, so that layers of one checkpoint may differ. Where they leave a
choice, the config or W_shape decides. The words of GPTQ and AWQ do not lie row by row: rows of such
a weight are columns of its tensors.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from nf4conv.format.dtypes import DTYPE_BITS
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


@dataclass(frozen=True, slots=True)
class PackedIntegers(Foreign):
    """Integers of few bits, packed into words, times scales that groups of columns share.

    value = (code - zero) * scale. codec/decode/integers.py says how the codes lie in the words.
    """

    packing: ClassVar[str]  # as in IntegerLayout
    decoder: ClassVar[str] = "nf4conv.codec.decode.integers:decode_integers"
    has_dtype_of_scales: ClassVar[bool] = True

    values: TensorInfo
    scale: TensorInfo
    codes: IntegerLayout
    zeros: TensorInfo | None = None  # None if all are 2^(bits - 1)
    group_index: TensorInfo | None = None  # the group of each column; None if in order

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

    def kernel(self, tensor: TensorInfo) -> Kernel | None:
        codes = self.codes
        zeros = None if self.zeros is None else self.zeros.dtype
        index = None if self.group_index is None else self.group_index.dtype
        layout = (codes.packing, codes.bits, zeros, codes.zeros_less_one, index)
        words = _line(self.values) * DTYPE_BITS[self.values.dtype] // WORD
        zeros_of_line = words if self.zeros is None else _line(self.zeros)
        rows, columns = tensor.shape
        return Kernel(
            maker="integer_decoder",
            details=(self.scale.dtype, *layout),
            pointers=("values", "scale", "zeros", "group_index"),
            shape=(rows, columns),
            numbers=(words, _line(self.scale), zeros_of_line, codes.group_size),
        )

    def rows_together(self, tensor: TensorInfo) -> int:
        return WORD  # rows that share whole words, if codes are packed along rows

    @classmethod
    def settings_of(
        cls, parts: Mapping[str, TensorInfo], sizes: Sizes, description: Description
    ) -> dict[str, Any]:
        codes = IntegerLayout(
            packing=cls.packing,
            bits=sizes.get("bits", 4),
            columns=sizes["in"],
            group_size=_group_size(parts, sizes, description),
            zeros_less_one=cls.packing == description.packing == "GPTQ",
        )
        return {"codes": codes}


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
    if columns % groups != 0 or (named and None not in named):
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

    configs = ("GPTQ", "GPTQ v2")
    packing = "GPTQ"
    stored = ".qweight"
    weight = ".weight"
    ends = (".qweight", ".qzeros", ".g_idx")
    layout: ClassVar[Mapping[str, Part]] = {
        "values": part("", "I32: words(in) out"),
        "scale": part(".scales", f"{FLOATS}: groups out"),
        "zeros": part(".qzeros", "I32: groups words(out)"),
        "group_index": part(".g_idx", "I32 I64: in", optional=True),
    }

    @classmethod
    def candidates(
        cls, parts: Mapping[str, TensorInfo], told: Sizes | None, description: Description
    ) -> Iterator[Sizes]:
        named = [bits for bits, _ in description.schemes]
        words = (parts["values"].shape[0], parts["zeros"].shape[1])
        for bits in dict.fromkeys([*named, 4, 8, 2, 3]):
            # codes of 3 bits cross the borders of words, and fill all of them
            if bits in (2, 4, 8) or (bits == 3 and all(number % 3 == 0 for number in words)):
                yield {"bits": bits}

    @classmethod
    def settings_of(
        cls, parts: Mapping[str, TensorInfo], sizes: Sizes, description: Description
    ) -> dict[str, Any]:
        values, index = parts["values"], parts.get("group_index")
        if index is None and description.is_reordered and sizes["groups"] > 1:
            raise lacks(values, "g_idx")
        if index is not None and sizes["in"] * sizes["bits"] != values.shape[0] * WORD:
            raise misfit(values, index)
        return super().settings_of(parts, sizes, description)


class Awq(PackedIntegers):
    """AWQ: words of codes of 8 neighbouring rows, in an order of their own, for each column."""

    __slots__ = ()

    configs = ("AWQ",)
    packing = "AWQ"
    stored = ".qweight"
    weight = ".weight"
    layout: ClassVar[Mapping[str, Part]] = {
        "values": part("", "I32: in out/8"),
        "scale": part(".scales", f"{FLOATS}: groups out"),
        "zeros": part(".qzeros", "I32: groups out/8"),
    }


class CompressedIntegers(PackedIntegers):
    """pack-quantized of compressed-tensors: a stream of codes for each row.

    Its words are I32, where those of FP4 are bytes.
    """

    __slots__ = ()

    packing = "compressed-tensors"
    stored = "_packed"
    ends = (".weight_packed", ".weight_zero_point", ".weight_shape", ".weight_g_idx")
    layout: ClassVar[Mapping[str, Part]] = {
        "values": part("", "I32: out words(in)"),
        "scale": part("_scale", f"{FLOATS}: out groups", f"{FLOATS}: out"),
        "zeros": part(
            "_zero_point", "I32: words(out) groups", "I8: out groups", "I8: out", optional=True
        ),
        "group_index": part("_g_idx", "I32 I64: in", optional=True),
    }

    @classmethod
    def told(
        cls, parts: Mapping[str, TensorInfo], stem: str, siblings: SiblingTensors
    ) -> Sizes | None:
        """Returns the columns that W_shape names, if the config and the shapes leave a choice."""
        if _groups_of(parts) > 1 and len(cls.candidates(parts, None, siblings.description)) == 1:
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
    def settings_of(
        cls, parts: Mapping[str, TensorInfo], sizes: Sizes, description: Description
    ) -> dict[str, Any]:
        values, zeros = parts["values"], parts.get("zeros")
        if zeros is None and description.has_zeros:
            raise lacks(values, "weight_zero_point")
        if zeros is not None and zeros.dtype == "I8" and zeros.elements != parts["scale"].elements:
            raise misfit(values, zeros)
        return super().settings_of(parts, sizes, description)


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
        raise misfit(tensor, shape)
    return int(columns)


class TorchaoInt4(PackedIntegers):
    """Int4Tensor of torchao: two codes a byte, and zero points that are added.

    Other classes have fields of the same names.
    """

    __slots__ = ()

    configs = ("torchao",)
    packing = "torchao"
    stored = "_weight_qdata"
    weight = "weight"
    ends = ("_qdata", "._weight_scale", "._weight_zero_point")
    layout: ClassVar[Mapping[str, Part]] = {
        "values": part("", "I8 U8: out in/2"),
        "scale": part("_weight_scale", f"{FLOATS}: groups out"),
        "zeros": part("_weight_zero_point", f"{FLOATS}: groups out"),
    }

    @classmethod
    def holds(cls, tensor: TensorInfo, stem: str, siblings: SiblingTensors) -> bool:
        zeros = siblings.by_name.get(f"{stem}_weight_zero_point")
        return zeros is not None and zeros.dtype != "I8" and bool(siblings.description.schemes)

    @classmethod
    def settings_of(
        cls, parts: Mapping[str, TensorInfo], sizes: Sizes, description: Description
    ) -> dict[str, Any]:
        settings = super().settings_of(parts, sizes, description)
        columns = sizes["in"]
        if columns % 8 != 0 or columns != sizes["groups"] * settings["codes"].group_size:
            raise misfit(parts["values"], parts["scale"])
        return settings


ENDS_OF_WORDS: Final = (Gptq.stored, CompressedIntegers.stored, "_qdata")
"""Ends of the names of values whose own shapes say little of the weights that they stand for."""
