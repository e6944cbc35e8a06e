"""Describes each tensor of a checkpoint, and each kind of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class StoredQuantization:
    """Describes how a packed weight is stored, as its quant state says.

    Attributes:
        quant_type: "nf4" or "fp4".
        blocksize: the number of elements that share an absmax.
        double_quant: True if its absmax is quantized.
        nested_offset: the number that is added to the decoded absmax, as the quant state spells it.
            None without double quantization.
        storage: the dtype of the packed codes (bitsandbytes' quant_storage).
        tensors: dtype and shape of each component, by its suffix; the packed codes have none.
    """

    quant_type: str
    blocksize: int
    double_quant: bool
    nested_offset: Any
    storage: str
    tensors: dict[str, str]


@dataclass(frozen=True)
class InspectedRow:
    """Describes one tensor, or one packed weight with all its components.

    Attributes:
        name: the name of the tensor.
        file: the name of the file that holds it.
        dtype: the dtype of the tensor. For a packed weight, the dtype that it decodes to.
        shape: the shape of the tensor. For a packed weight, the shape that it decodes to.
        parameters: the number of elements.
        bytes: the size of the tensor, or of all components.
        bits_per_parameter: bits per element.
        format: how the tensor is stored, in one word: "nf4/64", or a dtype.
        quantization: how a packed weight is stored. None for other tensors.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    parameters: int
    bytes: int
    bits_per_parameter: float
    format: str
    quantization: StoredQuantization | None

    def inside(self, submodel: str) -> "InspectedRow":
        """Puts the submodel of a diffusers pipeline before the names of tensor and file."""
        name = f"{submodel}/{self.name}"
        return replace(self, name=name, file=f"{submodel}/{self.file}")


@dataclass(frozen=True)
class InspectedKind:
    """Sums up the tensors of one kind in one stack of layers.

    Attributes:
        stack: the path of the stack of layers, such as "model.layers". Empty outside of a stack.
        kind: the path of the module inside a layer, such as "mlp.down_proj".
        tensors: the number of tensors; the components of a packed weight count as one.
        formats: how they are stored; every format that occurs.
        parameters: the number of elements of all of them.
        bytes: the size of all of them.
        bits_per_parameter: bits per element.
    """

    stack: str
    kind: str
    tensors: int
    formats: tuple[str, ...]
    parameters: int
    bytes: int
    bits_per_parameter: float

    def inside(self, submodel: str) -> "InspectedKind":
        """Puts the submodel of a diffusers pipeline before the stack, or else the kind."""
        if self.stack:
            return replace(self, stack=f"{submodel}/{self.stack}")
        return replace(self, kind=f"{submodel}/{self.kind}")


@dataclass(frozen=True)
class InspectionTotals:
    """Sums up what a checkpoint holds.

    Attributes:
        tensors: the number of tensors; the components of a packed weight count as one.
        packed: the number of weights in 4 bits.
        parameters: the number of elements of all tensors.
        bytes: the size of all tensors.
        bits_per_parameter: bits per element.
    """

    tensors: int
    packed: int
    parameters: int
    bytes: int
    bits_per_parameter: float

    @classmethod
    def of(cls, rows: Sequence[InspectedRow]) -> "InspectionTotals":
        """Sums up rows."""
        packed = 0
        parameters = 0
        size = 0
        for row in rows:
            if row.quantization is not None:
                packed += 1
            parameters += row.parameters
            size += row.bytes
        return cls(
            tensors=len(rows),
            packed=packed,
            parameters=parameters,
            bytes=size,
            bits_per_parameter=8 * size / max(parameters, 1),
        )
