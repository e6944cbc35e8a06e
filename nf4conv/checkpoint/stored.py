"""A packed weight as it lies on disk."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from nf4conv.checkpoint.header import TensorInfo


@dataclass(frozen=True, slots=True)
class QuantStateFields:
    """The content of a JSON blob."""

    quant_type: str  # "nf4" or "fp4"
    blocksize: int  # elements that share one absmax
    dtype: str  # "float32", "float16" or "bfloat16": of the weight before it was quantized
    shape: tuple[int, ...]  # of that weight
    nested_offset: float | None  # added to the decoded absmax; None without double quantization


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A packed weight whose tensors fit together."""

    values: TensorInfo  # the packed codes
    components: Mapping[str, TensorInfo]  # the tensors beside them, by suffix
    state: QuantStateFields  # what the JSON blob says
    blob: bytes | None = None  # its bytes, where it is not on disk yet; then it is not among the components
    scales: str = "absmax"  # what its blocks were scaled by, as far as that is recorded, of codebook.SCALES

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
