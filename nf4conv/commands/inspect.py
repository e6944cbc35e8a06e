"""`nf4conv inspect`: what is in a checkpoint or diffusers pipeline, by its headers.

From the Hub only the headers are fetched, and the few bytes of each quant state.

sources ▸ check (quant states and config) ▸ report
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nf4conv.check.config_check import check_config
from nf4conv.check.structure import Finding, Structure, look_at
from nf4conv.declaring import after_one_place, narrowed
from nf4conv.errors import DiffusersFolderError, SourceError
from nf4conv.format.layout import LARGEST_QUANT_STATE, QUANT_STATE_PREFIX, split_component
from nf4conv.options import InspectOptions, SourceOptions
from nf4conv.plan.rows import TensorRow, summed, total_of
from nf4conv.report.inspected import inspected_rows, layout_of_experts
from nf4conv.report.results import Inspection
from nf4conv.sources.diffusers import open_diffusers
from nf4conv.sources.foreign.config import quantization_of
from nf4conv.sources.foreign.floats import Scaled
from nf4conv.sources.foreign.integers import ENDS_OF_WORDS, PackedIntegers
from nf4conv.sources.opening import open_stored, present_encoded
from nf4conv.sources.record import read_record
from nf4conv.sources.source import Source, read_together
from nf4conv.sources.tensors import TensorInfo
from nf4conv.system.machine import uncollected


@after_one_place(InspectOptions)
@uncollected()
def inspect(path: str | Path, options: InspectOptions) -> Inspection:
    """Describes a checkpoint, or a diffusers pipeline, by its headers.

    Reads no weight, and downloads none.

    Example:
        >>> nf4conv.inspect("unsloth/Llama-3.2-1B-bnb-4bit").totals.bits_per_parameter

    Args:
        path: a folder, a weight file, or "org/name" on the Hugging Face Hub.

    Returns:
        Formats, sizes, what is wrong, and a row for each tensor.

    Raises:
        SourceError: the checkpoint cannot be read.
    """
    sources = _open(path, replace(narrowed(options, SourceOptions), stream=True))
    files: list[str] = []
    tensors: list[TensorRow] = []
    findings: list[Finding] = []
    configs = [source.config or {} for source in sources.values()]
    quantized = (quantization_of(config) for config in configs)
    records: list[Mapping[str, Any] | None] = []
    for submodel, stored in sources.items():
        source = _with_packed_integers(stored)
        rows, structure = _look_into(source)
        records.append(structure.record)
        before = f"{submodel}/" if submodel else ""
        files += [f"{before}{file.name}" for file in source.files]
        tensors += [row.inside(submodel) for row in rows]
        found = sorted(structure.findings, key=lambda one: not one.is_fault)
        findings += [finding.inside(submodel) for finding in found]
    totals = total_of(tensors)
    is_pipeline = "" not in sources  # its submodels have several types, and experts of their own
    return Inspection(
        path=str(path),
        files=tuple(files),
        config=next((found for found in quantized if found is not None), None),
        model_type=None if is_pipeline else configs[0].get("model_type"),
        made=next((record for record in records if record), None),
        tensors=tuple(tensors),
        kinds=summed(tensors),
        totals=totals,
        findings=tuple(findings),
        experts="" if is_pipeline else layout_of_experts(tensors, configs[0]),
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


def _look_into(source: Source) -> tuple[list[TensorRow], Structure]:
    """Describes the tensors of a checkpoint, and checks what is in 4 bits by quant states."""
    small = [tensor for tensor in source.tensors if _describes_a_weight(tensor)]
    contents = read_together(source, small)
    structure = Structure(source.folder, record=read_record(source.folder))
    if contents:
        structure.tensors = {tensor.name: tensor for tensor in source.tensors}
        structure.read = lambda tensor: contents[tensor.name]
        check_config(look_at(structure))
    return list(inspected_rows(source.tensors, structure.weights)), structure


def _with_packed_integers(stored: Source) -> Source:
    """Presents packed integers, whose shapes say little, as the weights that they stand for."""
    if not any(tensor.name.endswith(ENDS_OF_WORDS) for tensor in stored.tensors):
        return stored
    try:
        presented = present_encoded(stored)
    except SourceError:  # what is wrong shows in what is stored
        return stored
    tensors = []
    for tensor in presented.tensors:
        encoding = tensor.encoding
        is_shown_decoded = isinstance(encoding, PackedIntegers)
        if isinstance(encoding, Scaled):  # its values may have another name
            is_shown_decoded = encoding.values.name != tensor.name
        if encoding is None or is_shown_decoded:
            tensors.append(tensor)
        else:
            tensors.extend(part for _, part in encoding.parts)
    return replace(stored, tensors=tuple(tensors))


def _describes_a_weight(tensor: TensorInfo) -> bool:
    """Returns True if a tensor is a quant state, or a code map, of a packed weight."""
    if tensor.nbytes > LARGEST_QUANT_STATE:
        return False
    _, suffix = split_component(tensor.name)
    return suffix.startswith(QUANT_STATE_PREFIX) or suffix.endswith("_map")
