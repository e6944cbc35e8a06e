"""Small floats, and 8-bit integers, with scales: FP8, MXFP8, INT8, MXFP4, NVFP4."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from nf4conv.sources.foreign.config import Block
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
from nf4conv.sources.tensors import Encoding, Kernel, TensorInfo, cut_rows

_BYTES: Final = {"F8_E4M3": "FP8 (E4M3)", "F8_E5M2": "FP8 (E5M2)", "I8": "INT8"}

_SCALE_DTYPES: Final = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U8")

_FORMS_OF_SCALES: Final = ("F8_E4M3: out in/16", "U8 F8_E8M0: out in/32")
"""NVFP4's, and the powers of two of MXFP4."""

GROUP: Final = 32
"""Values that share a scale of MXFP4."""

POWERS_OF_TWO: Final = ("F8_E8M0", "U8")
"""Dtypes of scales that are bytes of E8M0."""

_SCALES: Final = "_scale_inv _scale ~.scale ~.qscale_weight"


@dataclass(frozen=True, slots=True)
class Fp4(Foreign):
    """Pairs of E2M1 values times scales that groups of a row share: NVFP4 and MXFP4.

    NVFP4 has scales in E4M3 for 16 values, and one more for all of them; MXFP4 has powers of two
    for 32. Bytes for 16 are E5M3, as AutoRound writes them, and are not decoded.
    """

    layout: ClassVar[Mapping[str, Part]] = {
        "values": part("", "U8 I8: out in/2"),
        "scale": part(_SCALES, *_FORMS_OF_SCALES),
        "multiplier": part("_scale_2", f"{FLOATS}:", f"{FLOATS}: 1", optional=True),
    }
    decoder: ClassVar[str] = "nf4conv.codec.decode.floats:decode_fp4"
    made_from: ClassVar[str] = "fp4 (e2m1)"

    values: TensorInfo  # [rows, columns / 2], or a stack of such matrices
    scale: TensorInfo  # [rows, groups], or a stack of such matrices
    divisor: TensorInfo | None = None  # one value that all scales are divided by
    multiplier: TensorInfo | None = None  # one value that all scales are multiplied with
    # True if the matrices are stored as [out, in] and loaded as [in, out]: the experts of gpt-oss
    is_transposed: bool = False

    @property
    def name(self) -> str:
        return "fp4 transposed" if self.is_transposed else "fp4"

    @classmethod
    def made_of(cls, parts: Mapping[str, TensorInfo], settings: Mapping[str, Any]) -> Foreign:
        [*_, second] = cls.layout.values()
        if parts["scale"].dtype == "F8_E4M3" and len(parts) < 3:
            raise lacks(parts["values"], f"weight{second.suffixes[0]}")
        return Fp4(parts["values"], parts["scale"], parts.get("divisor"), parts.get("multiplier"))

    def kernel(self, tensor: TensorInfo) -> Kernel | None:
        if len(self.values.shape) != 2:
            return None
        rows, pairs = self.values.shape
        groups = self.scale.shape[1]
        divisor = None if self.divisor is None else self.divisor.dtype
        multiplier = None if self.multiplier is None else self.multiplier.dtype
        layout = (pairs % 16 == 0, self.is_transposed)
        return Kernel(
            maker="fp4_decoder",
            details=(self.scale.dtype, pairs // groups, divisor, multiplier, *layout),
            pointers=("values", "scale", "divisor", "multiplier"),
            shape=(rows, pairs),
            numbers=(groups,),
        )

    def is_stack(self, tensor: TensorInfo) -> bool:
        return self.is_transposed

    def matrix(self, tensor: TensorInfo, index: int) -> Encoding:
        values = _matrix_of(self.values, tensor, index)
        return replace(self, values=values, scale=_matrix_of(self.scale, tensor, index))

    def transposed(self) -> Encoding | None:
        return replace(self, is_transposed=False) if self.is_transposed else None


class GptOss(Fp4):
    """The experts of gpt-oss, MXFP4: stacked, 16 bytes for each scale."""

    __slots__ = ()

    stored = "_blocks"
    ends = ("_proj_blocks", "_proj_scales")
    layout: ClassVar[Mapping[str, Part]] = {
        "values": part("", "U8: experts out groups 16"),
        "scale": part("_scales", "U8: experts out groups"),
    }

    @classmethod
    def shape_of(cls, sizes: Sizes) -> tuple[int, ...]:
        return sizes["experts"], 32 * sizes["groups"], sizes["out"]

    @classmethod
    def made_of(cls, parts: Mapping[str, TensorInfo], settings: Mapping[str, Any]) -> Foreign:
        values = parts["values"]
        experts, out, groups, _ = values.shape
        values = values._replace(shape=(experts, out, 16 * groups))
        return Fp4(values, parts["scale"], is_transposed=True)


class CompressedFp4(Fp4):
    """NVFP4 and MXFP4 of compressed-tensors, whose values are bytes, where integers are words."""

    __slots__ = ()

    stored = "_packed"
    ends = (".weight_global_scale",)
    layout: ClassVar[Mapping[str, Part]] = {
        "values": part("", "U8: out in/2"),
        "scale": part("_scale", *_FORMS_OF_SCALES),
        "divisor": part("_global_scale", f"{FLOATS}:", f"{FLOATS}: 1", optional=True),
    }


class PlainFp4(Fp4):
    """FP4 under the name of the weight.

    NVFP4 of ModelOpt has a W_scale_2, MXFP4 of Quark scales in bytes. The experts of DeepSeek-V4
    are in signed bytes.
    """

    __slots__ = ()

    ends = (".weight_scale_2",)

    @classmethod
    def holds(cls, tensor: TensorInfo, stem: str, siblings: SiblingTensors) -> bool:
        scale = siblings.part_of(tensor.name, _SCALES.split())
        if scale is None:
            return False
        known = [("U8", "F8_E4M3"), ("I8", "F8_E8M0")]
        if siblings.description.method == "quark":
            known.append(("U8", "U8"))
        return (tensor.dtype, scale.dtype) in known


@dataclass(frozen=True, slots=True)
class Scaled(Foreign):
    """8-bit values times scales that blocks of them share, or without any: FP8, MXFP8, INT8, and
    those of LLM.int8().

    Fields of torchao's tensors are named as in its prototype/safetensors/safetensors_support.py.
    """

    decoder: ClassVar[str] = "nf4conv.codec.decode.floats:decode_scaled"
    layout: ClassVar[Mapping[str, Part]] = {"values": part("", "F8_E4M3 F8_E5M2 I8:")}
    ends: ClassVar[tuple[str, ...]] = ("_scale_inv", ".weight_scale", ".qscale_weight")

    values: TensorInfo  # [..., rows, columns]
    # one for all, one for each row, one for each block, or any shape that broadcasts against the
    # values'; None for values that were only cast
    scale: TensorInfo | None = None
    block: tuple[int, int] | None = None  # (rows, columns) that share a scale; None if shapes tell
    zero: TensorInfo | None = None  # I8: what is subtracted before; as many as scales, or None
    by_127: bool = False  # True if products are divided by 127, as those of LLM.int8() are

    @property
    def name(self) -> str:
        if self.by_127:
            return "int8 rows"
        return f"{_BYTES[self.values.dtype]}, {self._sharing()}"

    def _sharing(self) -> str:
        """Returns in a few words which values share a scale."""
        if self.scale is None:
            return "without scales"
        if self.block is not None:
            rows, columns = self.block
            return f"groups of {columns}" if rows == 1 else f"blocks of {rows}×{columns}"
        if self.scale.elements == 1:
            return "one scale"
        is_by_row = len(self.scale.shape) == 1 or self.scale.shape[-1] == 1
        return "by row" if is_by_row else "by column"

    @property
    def made_from(self) -> str:
        if self.by_127:
            return "bitsandbytes int8"
        return self.name if self.values.dtype == "I8" else self.values.made_from

    def kernel(self, tensor: TensorInfo) -> Kernel | None:
        values, scale = self.values, self.scale
        tag = "F32" if scale is None else scale.dtype
        has_kernel = self.zero is None and tag in ("F32", "F16", "BF16", *POWERS_OF_TWO)
        if len(values.shape) != 2 or not has_kernel:
            return None
        rows, columns = values.shape
        # how far it is from the scale of one row, and of one column, to the next
        row_step, column_step = 0, 0
        if scale is not None and scale.elements > 1:
            height, width = scale.shape if len(scale.shape) == 2 else (scale.elements, 1)
            row_step = 0 if height == 1 else width
            column_step = 0 if width == 1 else 1
        return Kernel(
            maker="scaled_decoder",
            details=(values.dtype, tag, self.block or (1, 1), self.by_127, columns % 16 == 0),
            pointers=("values", "scale"),
            shape=(rows, columns),
            numbers=(row_step, column_step),
        )

    @classmethod
    def recognised(cls, tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
        description = siblings.description
        name = stem = tensor.name
        if description.method == "torchao":  # P.weight is in P._weight_qdata, P._weight_scale …
            stem = name.removesuffix("_qdata")
            name = ".".join(stem.rsplit("._", 1))
        scale = siblings.part_of(stem, _SCALES.split())
        zero = siblings.by_name.get(f"{stem}_zero_point")
        if scale is None and tensor.dtype == "I8":
            return None
        if scale is None and description.method is not None:
            raise lacks(tensor, "weight_scale")
        if zero is None and description.has_zeros and tensor.dtype == "I8":
            raise lacks(tensor, "weight_zero_point")
        if description.names_block and scale is not None and scale.shape == (1, 1):
            rows, columns = tensor.shape if len(tensor.shape) == 2 else (0, 0)
            if not any(rows <= height and columns <= width for height, width in description.blocks):
                raise misfit(tensor, scale)
        block = None if scale is None else _block_of(tensor, scale, description.blocks)
        if zero is not None:
            fits = tensor.dtype == zero.dtype == "I8" and len(tensor.shape) == 2
            if not fits or scale is None or zero.shape != scale.shape:
                raise misfit(tensor, zero)
        encoding = Scaled(tensor, scale, block, zero)
        return tensor._replace(name=name, dtype=siblings.dtype, encoding=encoding)

    def rows_together(self, tensor: TensorInfo) -> int:
        return 1 if self.block is None else self.block[0]

    def rows(self, tensor: TensorInfo, start: int, stop: int) -> Encoding:
        values = cut_rows(self.values, start, stop)
        scale = self._rows_of(self.scale, tensor.shape[0], start, stop)
        zero = self._rows_of(self.zero, tensor.shape[0], start, stop)
        return replace(self, values=values, scale=scale, zero=zero)

    def _rows_of(
        self, scale: TensorInfo | None, rows: int, start: int, stop: int
    ) -> TensorInfo | None:
        """Cuts scales, or as many zero points; all rows may share them."""
        if scale is None:
            return None
        if self.block is not None:
            height = self.block[0]
            return cut_rows(scale, start // height, -(-stop // height))
        has_one_per_row = scale.elements > 1 and scale.shape[0] == rows
        return cut_rows(scale, start, stop) if has_one_per_row else scale

    def is_stack(self, tensor: TensorInfo) -> bool:
        return True

    def matrix(self, tensor: TensorInfo, index: int) -> Encoding:
        scale = self.scale
        if scale is not None:
            scale = _matrix_of(scale, tensor, index)
        return replace(self, values=_matrix_of(self.values, tensor, index), scale=scale)


def _block_of(tensor: TensorInfo, scale: TensorInfo, blocks: Sequence[Block]) -> Block | None:
    """Returns the (rows, columns) that share a scale; None where the shape of the scales tells.
    Raises a SourceError if they fit neither the values nor any of the blocks.
    """
    if scale.dtype not in _SCALE_DTYPES:
        raise misfit(tensor, scale)
    if scale.elements == 1 or scale.shape == tensor.shape[:1]:
        return None
    if len(scale.shape) != len(tensor.shape) or len(tensor.shape) < 2:
        raise misfit(tensor, scale)
    *stacked, rows, columns = tensor.shape
    if scale.dtype in ("U8", "F8_E8M0"):
        blocks = (*blocks, (1, 32))  # MXFP8
    for height, width in blocks:
        if scale.shape == (*stacked, -(-rows // height), -(-columns // width)):
            return min(height, max(rows, 1)), min(width, max(columns, 1))
    if all(size in (1, whole) for size, whole in zip(scale.shape, tensor.shape, strict=True)):
        return None
    raise misfit(tensor, scale)


def _matrix_of(part: TensorInfo, stack: TensorInfo, index: int) -> TensorInfo:
    """Cuts what belongs to one matrix out of a part of a stack; all matrices may share the part."""
    if len(part.shape) > 1 and part.shape[0] == stack.shape[0]:
        part = cut_rows(part, index, index + 1)
    if len(part.shape) == 3:
        part = part._replace(shape=part.shape[1:])
    return part


class Bitsandbytes8bit(Foreign):
    """A weight of bitsandbytes' LLM.int8(): each row was scaled to a largest magnitude of 127."""

    __slots__ = ()

    stored = "weight"
    weight = "weight"
    ends = (".SCB",)
    layout: ClassVar[Mapping[str, Part]] = {
        "values": part("", "I8: out in"),
        "scale": part("SCB", f"{FLOATS}: out", f"{FLOATS}: out 1"),
    }

    @classmethod
    def holds(cls, tensor: TensorInfo, stem: str, siblings: SiblingTensors) -> bool:
        if f"{stem}SCB" not in siblings.by_name:
            return False
        order = siblings.by_name.get(f"{stem}weight_format")
        if order is not None and any(siblings.read(order)):
            raise misfit(siblings.by_name[f"{stem}SCB"], order)  # a layout for one kind of GPU
        return True

    @classmethod
    def made_of(cls, parts: Mapping[str, TensorInfo], settings: Mapping[str, Any]) -> Foreign:
        return Scaled(parts["values"], parts["scale"], by_127=True)


# --- MXFP4 that is to be stored as FP8: two tensors, each decoded as any other, but to 8 bits ---


@dataclass(frozen=True, slots=True)
class Fp8Values(Fp4):
    """The values of an MXFP4 weight as E4M3, in blocks that share a scale."""

    decoder: ClassVar[str] = "nf4conv.codec.fp8:encode_values"
    name: ClassVar[str] = "MXFP4, to be FP8"

    block: Block = (0, 0)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"block": self.block}

    def kernel(self, tensor: TensorInfo) -> Kernel | None:
        return None

    def rows_together(self, tensor: TensorInfo) -> int:
        return self.block[0]


@dataclass(frozen=True, slots=True)
class Fp8Scales(Foreign):
    """The scales of blocks, each a power of two, given those of the groups of an MXFP4 weight."""

    decoder: ClassVar[str] = "nf4conv.codec.fp8:encode_scales"
    name: ClassVar[str] = "scales of MXFP4, to be FP8"
    is_quantization: ClassVar[bool] = False

    values: TensorInfo  # [out, in/32]
    block: Block

    def rows(self, tensor: TensorInfo, start: int, stop: int) -> Encoding:
        height = self.block[0]
        last = min(stop * height, self.values.shape[0])
        return replace(self, values=cut_rows(self.values, start * height, last))


def is_mxfp4(tensor: TensorInfo) -> bool:
    """Returns True for a matrix of MXFP4 that lies as it is loaded."""
    encoding = tensor.encoding
    if type(encoding) is not Fp4 or len(tensor.shape) != 2 or encoding.is_transposed:
        return False
    has_more = encoding.divisor is not None or encoding.multiplier is not None
    return encoding.scale.dtype in POWERS_OF_TWO and not has_more


def as_fp8(tensor: TensorInfo, block: Block, dtype_of_scales: str) -> list[TensorInfo]:
    """Returns the values and the scales that a matrix of MXFP4 becomes, under their names."""
    mxfp4 = tensor.encoding
    assert isinstance(mxfp4, Fp4)
    rows, columns = tensor.shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    values = Fp8Values(mxfp4.values, mxfp4.scale, block=block)
    scales = Fp8Scales(mxfp4.scale, block)
    return [
        tensor._replace(dtype="F8_E4M3", encoding=values),
        mxfp4.scale._replace(dtype=dtype_of_scales, shape=grid, encoding=scales),
    ]
