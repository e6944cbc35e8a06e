"""Describes packed 4-bit weights as they lie on disk, and what is wrong with them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nf4conv.format import layout
from nf4conv.format.layout import QUANT_STATE_PREFIX, Format
from nf4conv.sources.reader import read_bytes
from nf4conv.sources.tensors import TensorInfo


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or worth knowing.

    Attributes:
        check: which of CHECKS found it.
        file: the name of the file, relative to the checkpoint.
        tensor: the name of the tensor; empty if it concerns the file.
        text: what was found, and what was expected.
        is_fault: True if verification fails for it.
    """

    check: str
    file: str
    tensor: str
    text: str
    is_fault: bool = True

    def line(self) -> str:
        """Returns the finding as one line."""
        return ": ".join(part for part in (self.file, self.tensor, self.text) if part)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A packed weight whose tensors fit together.

    Attributes:
        values: the packed codes.
        components: the tensors beside them, by suffix.
        format: how it is packed. Its scales are what the record says of them.
        shape: the shape of the weight before it was quantized.
        nested_offset: the number that is added to the decoded absmax; None without double
            quantization.
        blob: the quant state if it is not on disk yet; then it is not among the components.
    """

    values: TensorInfo
    components: Mapping[str, TensorInfo]
    format: Format
    shape: tuple[int, ...]
    nested_offset: float | None = None
    blob: bytes | None = None

    @property
    def name(self) -> str:
        return self.values.name

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + sum(part.nbytes for part in self.components.values())

    def parts(self) -> dict[str, TensorInfo]:
        """Returns all its tensors by role: "values", and the suffixes of the components."""
        return {"values": self.values, **self.components}


@dataclass
class Structure:
    """A checkpoint as it lies on disk.

    Attributes:
        folder: the folder with its files.
        tensors: all tensors of the weight files that could be read, by name.
        weights: the packed weights that can be decoded, by name.
        plain: the tensors that belong to no packed weight, by name.
        findings: what is wrong so far.
        read: reads a small tensor.
        scales: tells how a weight was scaled according to the record, given its name.
        record: the content of its nf4conv.json; None if it has none that can be read.
    """

    folder: Path
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    weights: dict[str, StoredWeight] = field(default_factory=dict)
    plain: dict[str, TensorInfo] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    read: Callable[[TensorInfo], bytes] = read_bytes
    scales: Callable[[str], str] = lambda _: "absmax"
    record: Mapping[str, Any] | None = None

    def note(
        self, check: str, file: Path | str, tensor: str, text: str, *, is_fault: bool = True
    ) -> None:
        """Adds a finding; arguments as the attributes of `Finding`."""
        name = file if isinstance(file, str) else file.name
        self.findings.append(Finding(check, name, tensor, text, is_fault))


def split_component(name: str) -> tuple[str, str]:
    """Divides the name of a tensor into that of a weight and a suffix.

    Returns:
        owner: the weight that the tensor belongs to; the name itself if it is no component.
        suffix: the component's suffix; empty if the tensor is no component.
    """
    for suffix in layout.COMPONENT_SUFFIXES:
        if name.endswith(f".{suffix}"):
            return name[: -len(suffix) - 1], suffix
    head, found, tail = name.partition(f".{QUANT_STATE_PREFIX}")
    return (head, f"{QUANT_STATE_PREFIX}{tail}") if found else (name, "")
