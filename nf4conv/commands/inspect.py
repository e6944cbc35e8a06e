"""`nf4conv inspect`: what is in a checkpoint or diffusers pipeline, by its headers.

Of a model on the Hugging Face Hub only the headers are fetched, and the few bytes of each quant
state.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
    inside,
)
from nf4conv.sources.diffusers_folder import open_diffusers
from nf4conv.sources.encodings.description import quantization_of
from nf4conv.sources.header import LARGEST_SIZE
from nf4conv.sources.record import read_record, recorded_scales
from nf4conv.sources.source import Source, open_stored, read_together
from nf4conv.sources.stored_weights import Finding, Structure, split_component
from nf4conv.sources.tensors import TensorInfo


def inspect_checkpoint(path: str | Path, where: SourceOptions | None = None) -> Inspection:
    """Describe a checkpoint, or a diffusers pipeline, without reading its weights; torch is not
    imported.

    Args:
        path: a folder, a weight file, or "org/name" on the Hugging Face Hub.
        where: of a model on the Hub.

    Returns:
        One result; of a diffusers pipeline, names have the submodel in front.

    Raises:
        SourceError: it cannot be read.
    """
    where = replace(where or SourceOptions(), stream=True)
    try:
        sources = {"": open_stored(path, where)}
    except DiffusersFolderError:
        folder = open_diffusers(path, where)
        sources = {
            name: open_stored(folder.place, place) for name, place in folder.submodels.items()
        }
    rows, kinds, findings = list[InspectedRow](), list[InspectedKind](), list[Finding]()
    files, notes = list[str](), list[str]()
    for name, source in sources.items():
        small = read_together(source, [tensor for tensor in source.tensors if _describes(tensor)])
        mine, prefix = [*_rows(source, small)], name and f"{name}/"
        files += (f"{prefix}{file.name}" for file in source.files)
        rows += (inside(name, row) for row in mine)
        kinds += (inside(name, kind) for kind in _kinds(mine))
        notes += (f"{prefix}{note}" for note in unusual((row.name, row.format) for row in mine))
        found = _findings(source, small) if small else ()
        findings += (replace(finding, file=f"{prefix}{finding.file}") for finding in found)
    configs = [source.config or {} for source in sources.values()]
    return Inspection(
        path=str(path),
        files=tuple(files),
        config=next((found for found in map(quantization_of, configs) if found is not None), None),
        model_type=configs[0].get("model_type") if "" in sources else None,
        made=next(filter(None, (read_record(source.folder) for source in sources.values())), None),
        notes=tuple(notes),
        gpu_bytes=gpu_bytes(sum(row.bytes for row in rows)),
        tensors=tuple(rows),
        kinds=tuple(kinds),
        totals=InspectionTotals.of(rows),
        findings=tuple(findings),
    )


def _describes(tensor: TensorInfo) -> bool:
    """Whether a tensor is a quant state, or a map, of a packed weight."""
    suffix = split_component(tensor.name)[1]
    return tensor.nbytes <= LARGEST_QUANT_STATE and (
        suffix.startswith(QUANT_STATE_PREFIX) or suffix.endswith("_map")
    )


def _findings(source: Source, small: Mapping[str, bytes]) -> Sequence[Finding]:
    """What is wrong with a 4-bit checkpoint, as far as headers, small tensors and config tell."""
    tensors = {tensor.name: tensor for tensor in source.tensors}
    structure = Structure(source.folder, tensors, scales=recorded_scales(source.folder))
    structure.read = lambda part: small[part.name]
    check_config(look_at(structure))
    return sorted(structure.findings, key=lambda finding: not finding.is_fault)


def _rows(source: Source, states: Mapping[str, bytes]) -> Iterator[InspectedRow]:
    components: defaultdict[str, dict[str, TensorInfo]] = defaultdict(dict)
    names = {tensor.name for tensor in source.tensors}
    for tensor in source.tensors:
        owner, suffix = split_component(tensor.name)
        if suffix and owner in names:
            components[owner][suffix] = tensor
    for tensor in source.tensors:
        owner, suffix = split_component(tensor.name)
        if not suffix or owner not in names:
            yield _row(tensor, components.get(tensor.name, {}), states)


def _row(
    tensor: TensorInfo, components: Mapping[str, TensorInfo], states: Mapping[str, bytes]
) -> InspectedRow:
    size = tensor.nbytes + sum(part.nbytes for part in components.values())
    shape, quantization = tensor.shape, None
    dtype = format = DTYPE_NAMES.get(tensor.dtype, tensor.dtype)
    blob = next(
        (part for suffix, part in components.items() if suffix.startswith(QUANT_STATE_PREFIX)), None
    )
    fields = {} if blob is None else _fields(states.get(blob.name, b""))
    if fields:
        shape, dtype = tuple(fields["shape"]), fields["dtype"]
        quantization = StoredQuantization(
            quant_type=fields["quant_type"],
            blocksize=fields["blocksize"],
            double_quant="nested_absmax" in components,
            nested_offset=fields.get("nested_offset"),
            storage=STORAGE_DTYPES.get(tensor.dtype, tensor.dtype),
            tensors={"": _described(tensor)}
            | {suffix: _described(part) for suffix, part in components.items()},
        )
        format = format_name(
            quantization.quant_type, quantization.double_quant, quantization.blocksize
        )
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


def _described(tensor: TensorInfo) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _fields(blob: bytes) -> dict[str, Any]:
    """The content of a quant state; empty if it is none. What is wrong with it is `verify`'s to
    say.
    """
    try:
        fields = json.loads(blob)
        sizes = [int(size) for size in fields["shape"]]
        known = {
            "shape": sizes,
            "dtype": str(fields["dtype"]),
            "blocksize": int(fields["blocksize"]),
        }
        is_possible = min(sizes, default=0) >= 0 and math.prod(sizes) < LARGEST_SIZE
        return {**fields, **known, "quant_type": str(fields["quant_type"])} if is_possible else {}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return {}


def _kinds(rows: Sequence[InspectedRow]) -> Iterator[InspectedKind]:
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
