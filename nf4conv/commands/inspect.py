"""`nf4conv inspect`: what is in a checkpoint or diffusers pipeline, by its headers.

From the Hub only the headers are fetched, and the few bytes of each quant state.

sources ▸ check (quant states and config) ▸ report
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nf4conv.check.config_check import check_config
from nf4conv.check.structure import Finding, Structure, look_at
from nf4conv.declaring import after_one_place, narrowed
from nf4conv.errors import DiffusersFolderError, SourceError
from nf4conv.format.layout import LARGEST_QUANT_STATE, QUANT_STATE_PREFIX, split_component
from nf4conv.options import InspectOptions, SourceOptions
from nf4conv.plan.rows import TensorRow, summed, total_of
from nf4conv.report.advice import unusual
from nf4conv.report.inspected import inspected_rows, layout_of_experts
from nf4conv.report.loading import gpu_bytes
from nf4conv.report.results import Inspection
from nf4conv.sources.diffusers import open_diffusers
from nf4conv.sources.foreign.config import quantization_of
from nf4conv.sources.foreign.floats import Scaled
from nf4conv.sources.foreign.integers import ENDS_OF_WORDS, PackedIntegers
from nf4conv.sources.opening import open_stored, present_encoded
from nf4conv.sources.record import read_record, recorded_scales
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
        Formats, sizes, what is unusual, and a row for each tensor.

    Raises:
        SourceError: the checkpoint cannot be read.
    """
    sources = _open(path, replace(narrowed(options, SourceOptions), stream=True))
    files: list[str] = []
    tensors: list[TensorRow] = []
    notes: list[str] = []
    findings: list[Finding] = []
    for submodel, source in sources.items():
        part = _inspect_one(source)
        if submodel:
            part = part.inside(submodel)
        files.extend(part.files)
        tensors.extend(part.tensors)
        notes.extend(part.notes)
        findings.extend(part.findings)
    config = _first_quantization(sources.values())
    made = _first_record(sources.values())
    totals = total_of(tensors)
    return Inspection(
        path=str(path),
        files=tuple(files),
        config=config,
        model_type=_model_type(sources),
        made=made,
        notes=tuple(notes),
        gpu_bytes=gpu_bytes(totals.bytes),
        tensors=tuple(tensors),
        kinds=summed(tensors),
        totals=totals,
        findings=tuple(findings),
        experts=_experts(sources, tensors),
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


def _experts(sources: Mapping[str, Source], tensors: Sequence[TensorRow]) -> str:
    """Returns how experts are stored; those of a pipeline are left out."""
    if "" not in sources:
        return ""
    return layout_of_experts(tensors, sources[""].config or {})


def _first_record(sources: Iterable[Source]) -> Mapping[str, Any] | None:
    for source in sources:
        record = read_record(source.recorded_in)
        if record:
            return record
    return None


@dataclass(frozen=True)
class _Part:
    """Holds what is found in one checkpoint, or in one submodel of a pipeline."""

    files: Sequence[str]
    tensors: Sequence[TensorRow]
    notes: Sequence[str]
    findings: Sequence[Finding]

    def inside(self, submodel: str) -> "_Part":
        """Puts the name of a submodel before all names."""
        files = [f"{submodel}/{file}" for file in self.files]
        tensors = [row.inside(submodel) for row in self.tensors]
        notes = [f"{submodel}/{note}" for note in self.notes]
        findings = [
            replace(finding, file=f"{submodel}/{finding.file}") for finding in self.findings
        ]
        return _Part(files, tensors, notes, findings)


def _inspect_one(stored: Source) -> _Part:
    """Describes one checkpoint, or one submodel of a pipeline."""
    source = _with_packed_integers(stored)
    small = [tensor for tensor in source.tensors if _describes_a_weight(tensor)]
    contents = read_together(source, small)
    structure = Structure(source.folder, scales=recorded_scales(source.recorded_in))
    if contents:
        structure.tensors = {tensor.name: tensor for tensor in source.tensors}
        structure.read = lambda tensor: contents[tensor.name]
        check_config(look_at(structure))
    rows = list(inspected_rows(source.tensors, structure.weights))
    notes = unusual((row.name, row.stored) for row in rows)
    names = [file.name for file in source.files]
    return _Part(
        files=names,
        tensors=rows,
        notes=notes,
        findings=sorted(structure.findings, key=lambda finding: not finding.is_fault),
    )


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
        if tensor.encoding is None or _is_shown_decoded(tensor):
            tensors.append(tensor)
        else:
            tensors.extend(part for _, part in tensor.encoding.parts)
    return replace(stored, tensors=tuple(tensors))


def _is_shown_decoded(tensor: TensorInfo) -> bool:
    """Returns True if a weight is packed integers, or if its values have another name."""
    encoding = tensor.encoding
    if isinstance(encoding, Scaled):
        return encoding.values.name != tensor.name
    return isinstance(encoding, PackedIntegers)


def _describes_a_weight(tensor: TensorInfo) -> bool:
    """Returns True if a tensor is a quant state, or a code map, of a packed weight."""
    if tensor.nbytes > LARGEST_QUANT_STATE:
        return False
    _, suffix = split_component(tensor.name)
    return suffix.startswith(QUANT_STATE_PREFIX) or suffix.endswith("_map")
