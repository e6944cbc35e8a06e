"""Describes what becomes of each tensor: the rows of --dry-run, and what they add up to.

Field names are the keys of --json, in their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

_FATES: Final = {
    "pack": "packed",
    "decode": "decoded",
    "copy": "kept",
    "cast": "kept, cast",
    "stay": "as it is",
    "merge": "merged",
}
"""Each action in the words that a user reads."""


@dataclass(frozen=True)
class PlanRow:
    """Describes what becomes of one tensor, which is packed, decoded or kept.

    Attributes:
        name: the name of the tensor.
        action: "pack", "decode", "copy", "cast", "stay" (a weight that is in 4 bits already) or
            "merge" (a weight that an adapter is merged into).
        reason: why this becomes of it.
        dtype: the dtype as safetensors spells it: of the source when packing, of the output when
            decoding.
        shape: the shape of the tensor.
        parameters: the number of elements.
        bytes_before: the size in the source.
        bytes_after: the size in the output.
        file: the name of the output file that holds it.
    """

    name: str
    action: str
    reason: str
    dtype: str
    shape: tuple[int, ...]
    parameters: int
    bytes_before: int
    bytes_after: int
    file: str

    @property
    def fate(self) -> str:
        """Says in a few words what becomes of it."""
        return _fate(self.action, self.reason)


@dataclass(frozen=True)
class PlanKind:
    """Sums up the tensors of one kind in one stack of layers of which the same becomes.

    Attributes:
        stack: the path of the stack of layers, such as "model.layers". Empty outside of a stack.
        kind: the path of the module inside a layer, such as "mlp.down_proj".
        action: what becomes of the tensors, as in PlanRow.
        reason: why this becomes of them.
        tensors: the number of tensors.
        parameters: the number of elements of all of them.
        bytes_before: their size in the source.
        bytes_after: their size in the output.
    """

    stack: str
    kind: str
    action: str
    reason: str
    tensors: int
    parameters: int
    bytes_before: int
    bytes_after: int

    @property
    def fate(self) -> str:
        """Says in a few words what becomes of them."""
        return _fate(self.action, self.reason)


def _fate(action: str, reason: str) -> str:
    return f"{_FATES[action]}: {reason}"


@dataclass(frozen=True)
class DequantizationTotals:
    """Sums up the rows of a dequantization.

    Attributes:
        decoded: the number of weights that are decoded.
        copied: the number of tensors that are kept.
        shards: the number of output files.
        parameters: the number of elements of all tensors.
        bytes_before: the size of all tensors of the source.
        bytes_after: the exact size of the output files.
    """

    decoded: int
    copied: int
    shards: int
    parameters: int
    bytes_before: int
    bytes_after: int

    def __add__(self, other: "DequantizationTotals") -> "DequantizationTotals":
        return DequantizationTotals(
            decoded=self.decoded + other.decoded,
            copied=self.copied + other.copied,
            shards=self.shards + other.shards,
            parameters=self.parameters + other.parameters,
            bytes_before=self.bytes_before + other.bytes_before,
            bytes_after=self.bytes_after + other.bytes_after,
        )


@dataclass(frozen=True)
class QuantizationTotals:
    """Sums up the rows of a quantization.

    Attributes:
        packed: the number of weights in 4 bits of the output.
        stay: how many of them were in 4 bits already, and stay bit for bit.
        copied: the number of tensors that are kept.
        shards: the number of output files.
        parameters: the number of elements of all tensors.
        bytes_before: the size of all tensors of the source.
        bytes_after: the most that the output files take. They can be a few bytes smaller for each
            weight with double quantization: the digits of its nested offset are not known before.
        compression: `bytes_before` / `bytes_after`; computed from the other fields.
        bits_per_parameter: bits per parameter of the output; computed from the other fields.
    """

    packed: int
    stay: int
    copied: int
    shards: int
    parameters: int
    bytes_before: int
    bytes_after: int
    compression: float = field(init=False)
    bits_per_parameter: float = field(init=False)

    def __post_init__(self) -> None:
        compression = self.bytes_before / max(self.bytes_after, 1)
        bits_per_parameter = 8 * self.bytes_after / max(self.parameters, 1)
        object.__setattr__(self, "compression", compression)
        object.__setattr__(self, "bits_per_parameter", bits_per_parameter)

    def __add__(self, other: "QuantizationTotals") -> "QuantizationTotals":
        return QuantizationTotals(
            packed=self.packed + other.packed,
            stay=self.stay + other.stay,
            copied=self.copied + other.copied,
            shards=self.shards + other.shards,
            parameters=self.parameters + other.parameters,
            bytes_before=self.bytes_before + other.bytes_before,
            bytes_after=self.bytes_after + other.bytes_after,
        )


TotalsT = TypeVar("TotalsT", QuantizationTotals, DequantizationTotals)


def add_totals(parts: Sequence[TotalsT]) -> TotalsT:
    """Adds up the totals of several plans of one kind. There is at least one."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
