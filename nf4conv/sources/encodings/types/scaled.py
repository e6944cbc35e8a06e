"""Describes weights of small values times scales that many of them share: FP8, INT8, FP4."""

from dataclasses import dataclass
from typing import Final

from nf4conv.sources.tensors import Encoding, Parts, TensorInfo

_KINDS: Final = {"F8_E4M3": "FP8 (E4M3)", "F8_E5M2": "FP8 (E5M2)"}


@dataclass(frozen=True, slots=True)
class Scaled(Encoding):
    """8-bit values times scales that blocks of them share: FP8, MXFP8, INT8."""

    values: TensorInfo  # [..., rows, columns]
    # one for all, one for each row, one for each block, or any shape that broadcasts against the
    # values'; None for values that were only cast
    scale: TensorInfo | None = None
    block: tuple[int, int] | None = None  # (rows, columns) that share a scale; None if shapes tell
    zero: TensorInfo | None = None  # I8: what is subtracted before; as many as scales, or None
    bits: int = 8  # fewer for integers that could be told apart in fewer, as torchao stores them

    @property
    def name(self) -> str:
        dtype = _KINDS.get(self.values.dtype, self.values.dtype)
        if self.values.dtype == "I8":
            dtype = f"INT{self.bits}"
        return f"{dtype}, {self._sharing()}"

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
    def parts(self) -> Parts:
        parts = [("values", self.values)]
        if self.scale is not None:
            parts.append(("scale", self.scale))
        if self.zero is not None:
            parts.append(("zero", self.zero))
        return tuple(parts)

    def decodes_like(self, other: "Encoding") -> bool:
        return isinstance(other, Scaled) and self.block == other.block


@dataclass(frozen=True, slots=True)
class Bitsandbytes8bit(Encoding):
    """A weight of bitsandbytes' LLM.int8(): each row was scaled to a largest magnitude of 127."""

    values: TensorInfo  # [rows, columns] I8
    scale: TensorInfo  # [rows] or [rows, 1] F32: the largest magnitudes, bitsandbytes' SCB
    # True if the weight was quantized as [out, in] for a family that stores its weights as [in,
    # out]
    is_transposed: bool = False

    @property
    def name(self) -> str:
        return "int8 rows transposed" if self.is_transposed else "int8 rows"

    @property
    def parts(self) -> Parts:
        return ("values", self.values), ("scale", self.scale)

    def decodes_like(self, other: "Encoding") -> bool:
        if not isinstance(other, Bitsandbytes8bit):
            return False
        return self.is_transposed == other.is_transposed


@dataclass(frozen=True, slots=True)
class Fp4(Encoding):
    """Pairs of E2M1 values times scales that groups of a row share: MXFP4 and NVFP4."""

    values: TensorInfo  # [rows, columns / 2], or a stack of such matrices
    scale: TensorInfo  # [rows, groups], or a stack of such matrices
    divisor: TensorInfo | None = None  # one value that all scales are divided by
    multiplier: TensorInfo | None = None  # one value that all scales are multiplied with
    # True if the matrices are stored as [out, in] and loaded as [in, out]: the experts of gpt-oss
    is_transposed: bool = False

    @property
    def name(self) -> str:
        return "fp4 transposed" if self.is_transposed else "fp4"

    @property
    def parts(self) -> Parts:
        parts = [("values", self.values), ("scale", self.scale)]
        if self.divisor is not None:
            parts.append(("divisor", self.divisor))
        if self.multiplier is not None:
            parts.append(("multiplier", self.multiplier))
        return tuple(parts)

    def decodes_like(self, other: "Encoding") -> bool:
        return isinstance(other, Fp4) and self.is_transposed == other.is_transposed
