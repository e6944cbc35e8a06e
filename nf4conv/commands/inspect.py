"""`nf4conv inspect`: what is in a checkpoint or diffusers pipeline, by its headers.

From the Hub only the headers are fetched, and the few bytes of each quant state.

sources ▸ check (quant states and config) ▸ report
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nf4conv.check.config_check import check_config
from nf4conv.check.structure import look_at
from nf4conv.errors import DiffusersFolderError
from nf4conv.format.layout import (
    DTYPE_NAMES,
    LARGEST_QUANT_STATE,
    QUANT_STATE_PREFIX,
    STORAGE_DTYPES,
)
from nf4conv.options import SourceOptions
from nf4conv.report.loading import gpu_bytes
from nf4conv.report.places import by_kind, place_of, unusual
from nf4conv.report.results import Inspection
from nf4conv.report.rows import (
    InspectedKind,
    InspectedRow,
    InspectionTotals,
    StoredQuantization,
    format_name,
)
from nf4conv.sources.diffusers_folder import open_diffusers
from nf4conv.sources.encodings.description import quantization_of
from nf4conv.sources.header import LARGEST_SIZE
from nf4conv.sources.record import read_record, recorded_scales
from nf4conv.sources.source import Source, open_stored, read_together
from nf4conv.sources.stored_weights import Finding, Structure, split_component
from nf4conv.sources.tensors import TensorInfo


def inspect_checkpoint(path: str | Path, where: SourceOptions | None = None) -> Inspection:
    """Describes a checkpoint, or a diffusers pipeline, without reading its weights.

    Does not import torch.

    Args:
        path: a folder, a weight file, or "org/name" on the Hugging Face Hub.
        where: revision, subfolder, token and the like of a model on the Hub.

    Returns:
        One result. For a diffusers pipeline, names begin with the submodel and a slash.

    Raises:
        SourceError: the checkpoint cannot be read.

    Example:
        >>> found = nf4conv.inspect_checkpoint("Qwen/Qwen3-0.6B")
        >>> found.totals.bits_per_parameter
        16.0
    """
    sources = _open(path, replace(where or SourceOptions(), stream=True))
    files: list[str] = []
    tensors: list[InspectedRow] = []
    kinds: list[InspectedKind] = []
    notes: list[str] = []
    findings: list[Finding] = []
    for submodel, source in sources.items():
        part = _inspect_one(source)
        if submodel:
            part = part.inside(submodel)
        files.extend(part.files)
        tensors.extend(part.tensors)
        kinds.extend(part.kinds)
        notes.extend(part.notes)
        findings.extend(part.findings)
    totals = InspectionTotals.of(tensors)
    return Inspection(
        path=str(path),
        files=tuple(files),
        config=_first_quantization(sources.values()),
        model_type=_model_type(sources),
        made=_first_record(sources.values()),
        notes=tuple(notes),
        gpu_bytes=gpu_bytes(totals.bytes),
        tensors=tuple(tensors),
        kinds=tuple(kinds),
        totals=totals,
        findings=tuple(findings),
    )


def _open(path: str | Path, where: SourceOptions) -> dict[str, Source]:
    """Opens the submodels of a diffusers pipeline by name, or a checkpoint by an empty name."""
    try:
        return {"": open_stored(path, where)}
    except DiffusersFolderError:
        folder = open_diffusers(path, where)
    submodels = {}
    for name, place in folder.submodels.items():
        submodels[name] = open_stored(folder.place, place)
    return submodels


def _first_quantization(sources: Iterable[Source]) -> Mapping[str, Any] | None:
    """Returns what the first config that mentions a quantization says about it."""
    for source in sources:
        found = quantization_of(source.config or {})
        if found is not None:
            return found
    return None


def _model_type(sources: Mapping[str, Source]) -> str | None:
    if "" not in sources:  # the submodels of a pipeline have several
        return None
    return (sources[""].config or {}).get("model_type")


def _first_record(sources: Iterable[Source]) -> Mapping[str, Any] | None:
    for source in sources:
        record = read_record(source.folder)
        if record:
            return record
    return None


@dataclass(frozen=True)
class _Part:
    """What is found in one checkpoint, or in one submodel of a pipeline."""

    files: Sequence[str]
    tensors: Sequence[InspectedRow]
    kinds: Sequence[InspectedKind]
    notes: Sequence[str]
    findings: Sequence[Finding]

    def inside(self, submodel: str) -> "_Part":
        """Puts the name of a submodel before all names."""
        findings = [
            replace(finding, file=f"{submodel}/{finding.file}") for finding in self.findings
        ]
        return _Part(
            files=[f"{submodel}/{file}" for file in self.files],
            tensors=[row.inside(submodel) for row in self.tensors],
            kinds=[kind.inside(submodel) for kind in self.kinds],
            notes=[f"{submodel}/{note}" for note in self.notes],
            findings=findings,
        )


def _inspect_one(source: Source) -> _Part:
    small = [tensor for tensor in source.tensors if _describes_a_weight(tensor)]
    contents = read_together(source, small)
    rows = list(_rows(source, contents))
    return _Part(
        files=[file.name for file in source.files],
        tensors=rows,
        kinds=list(_kinds(rows)),
        notes=unusual((row.name, row.format) for row in rows),
        findings=_findings(source, contents) if contents else (),
    )


def _describes_a_weight(tensor: TensorInfo) -> bool:
    """Tells whether a tensor is a quant state, or a code map, of a packed weight."""
    if tensor.nbytes > LARGEST_QUANT_STATE:
        return False
    _, suffix = split_component(tensor.name)
    return suffix.startswith(QUANT_STATE_PREFIX) or suffix.endswith("_map")


def _findings(source: Source, contents: Mapping[str, bytes]) -> Sequence[Finding]:
    """Checks a 4-bit checkpoint as far as headers, quant states, code maps and config tell.

    Returns:
        What is wrong or worth knowing, faults first.
    """
    tensors = {tensor.name: tensor for tensor in source.tensors}
    structure = Structure(
        source.folder,
        tensors,
        scales=recorded_scales(source.folder),
        read=lambda tensor: contents[tensor.name],
    )
    check_config(look_at(structure))
    return sorted(structure.findings, key=lambda finding: not finding.is_fault)


def _rows(source: Source, contents: Mapping[str, bytes]) -> Iterator[InspectedRow]:
    """Yields a row for each tensor, the components of a packed weight being one.

    `contents` are the bytes of quant states and code maps, by name.
    """
    names = {tensor.name for tensor in source.tensors}
    components: defaultdict[str, dict[str, TensorInfo]] = defaultdict(dict)
    alone: list[TensorInfo] = []
    for tensor in source.tensors:
        owner, suffix = split_component(tensor.name)
        if suffix and owner in names:
            components[owner][suffix] = tensor
        else:
            alone.append(tensor)
    for tensor in alone:
        yield _row(tensor, components.get(tensor.name, {}), contents)


def _row(
    tensor: TensorInfo, components: Mapping[str, TensorInfo], contents: Mapping[str, bytes]
) -> InspectedRow:
    size = tensor.nbytes + sum(part.nbytes for part in components.values())
    shape = tensor.shape
    dtype = DTYPE_NAMES.get(tensor.dtype, tensor.dtype)
    format = dtype
    quantization = None
    state = _state_of(components, contents)
    if state is not None:
        shape = state.shape
        dtype = state.dtype
        quantization = _quantization(state, tensor, components)
        format = format_name(state.quant_type, quantization.double_quant, state.blocksize)
    parameters = math.prod(shape)
    return InspectedRow(
        name=tensor.name,
        file=tensor.file.name,
        dtype=dtype,
        shape=shape,
        parameters=parameters,
        bytes=size,
        bits_per_parameter=8 * size / max(parameters, 1),
        format=format,
        quantization=quantization,
    )


@dataclass(frozen=True)
class _QuantState:
    """The fields of a quant state, as far as they can be told."""

    quant_type: str
    blocksize: int
    dtype: str  # of the weight
    shape: tuple[int, ...]  # of the weight
    nested_offset: Any  # whatever the file says; None if it says nothing


def _quantization(
    state: _QuantState, values: TensorInfo, components: Mapping[str, TensorInfo]
) -> StoredQuantization:
    tensors = {"": _dtype_and_shape(values)}
    for suffix, part in components.items():
        tensors[suffix] = _dtype_and_shape(part)
    return StoredQuantization(
        quant_type=state.quant_type,
        blocksize=state.blocksize,
        double_quant="nested_absmax" in components,
        nested_offset=state.nested_offset,
        storage=STORAGE_DTYPES.get(values.dtype, values.dtype),
        tensors=tensors,
    )


def _dtype_and_shape(tensor: TensorInfo) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _state_of(
    components: Mapping[str, TensorInfo], contents: Mapping[str, bytes]
) -> _QuantState | None:
    """Reads the quant state of a weight; None if it has none, or one that says too little."""
    for suffix, part in components.items():
        if suffix.startswith(QUANT_STATE_PREFIX):
            return _read_state(contents.get(part.name, b""))
    return None


def _read_state(blob: bytes) -> _QuantState | None:
    """Reads a quant state; None if it is none. `verify` says what is wrong with it."""
    try:
        fields = json.loads(blob)
        shape = tuple(int(size) for size in fields["shape"])
        if min(shape, default=0) < 0 or math.prod(shape) >= LARGEST_SIZE:
            return None
        return _QuantState(
            quant_type=str(fields["quant_type"]),
            blocksize=int(fields["blocksize"]),
            dtype=str(fields["dtype"]),
            shape=shape,
            nested_offset=fields.get("nested_offset"),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _kinds(rows: Sequence[InspectedRow]) -> Iterator[InspectedKind]:
    """Sums up the rows of each kind of module in each stack of layers."""
    for stack, kind, members in by_kind(rows, lambda row: place_of(row.name.removesuffix(".bias"))):
        totals = InspectionTotals.of(members)
        yield InspectedKind(
            stack=stack,
            kind=kind,
            tensors=totals.tensors,
            formats=tuple(sorted({row.format for row in members})),
            parameters=totals.parameters,
            bytes=totals.bytes,
            bits_per_parameter=totals.bits_per_parameter,
        )
