"""A packed weight as it lies on disk."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from nf4conv.checkpoint.header import TensorInfo


@dataclass(frozen=True, slots=True)
class QuantStateFields:
    """The content of a JSON blob.

    Attributes:
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one absmax.
        dtype: "float32", "float16" or "bfloat16": of the weight before it was quantized.
        shape: of that weight.
        nested_offset: added to the decoded absmax; None without double quantization.
    """

    quant_type: str
    blocksize: int
    dtype: str
    shape: tuple[int, ...]
    nested_offset: float | None


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A packed weight whose tensors fit together.

    Attributes:
        values: the packed codes.
        components: the tensors beside them, by suffix.
        state: what the JSON blob says.
        blob: its bytes, where it is not on disk yet; then it is not among the components.
    """

    values: TensorInfo
    components: Mapping[str, TensorInfo]
    state: QuantStateFields
    blob: bytes | None = None

    @property
    def name(self) -> str:
        return self.values.name

    @property
    def elements(self) -> int:
        return math.prod(self.state.shape)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + sum(part.nbytes for part in self.components.values())

    @property
    def is_nested(self) -> bool:
        return "nested_absmax" in self.components

    def parts(self) -> dict[str, TensorInfo]:
        """All its tensors by role: "values", and the suffixes of the components."""
        return {"values": self.values, **self.components}
