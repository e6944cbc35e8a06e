"""Describes MXFP4 weights that are to be stored as FP8: the E4M3 values, and the blocks' scales.

Both are tensors that are decoded from the parts of the source, as any other, but to 8 bits.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from nf4conv.sources.foreign.config import Block
from nf4conv.sources.foreign.floats import Fp4
from nf4conv.sources.foreign.formats import Foreign
from nf4conv.sources.tensors import Encoding, Kernel, TensorInfo, cut_rows

GROUP: Final = 32
"""Values that share a scale of MXFP4."""

POWERS_OF_TWO: Final = ("F8_E8M0", "U8")
"""Dtypes of scales that are bytes of E8M0."""


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
