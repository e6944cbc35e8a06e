"""Reads what headers and small tensors of a 4-bit checkpoint say about it, and notes every fault.

No fault ends the search. Written against the format (docs/format.md), not against the code that
writes it: no plan, no writer, no decoder is used here. Faults that other tools are known to make
are recognised and named.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from nf4conv.errors import SourceError
from nf4conv.format.layout import split_component
from nf4conv.sources.files import find_weights, read_index
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit, Severity, check_weight
from nf4conv.sources.header import read_header_with_metadata
from nf4conv.sources.reader import read_bytes, read_json
from nf4conv.sources.record import read_record, recorded_scales
from nf4conv.sources.tensors import TensorInfo
from nf4conv.sources.unfinished import check_finished

_FORMATS: Final = ("pt", "tf", "flax", "mlx")
"""The formats that transformers 4.57 accepts in a file's metadata (modeling_utils.py)."""


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

    def inside(self, submodel: str) -> "Finding":
        """Puts the submodel of a diffusers pipeline, if it is one, before the name of the file."""
        return replace(self, file=f"{submodel}/{self.file}") if submodel else self

    def line(self) -> str:
        """Returns the finding as one line."""
        return ": ".join(part for part in (self.file, self.tensor, self.text) if part)


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
        record: the content of its nf4conv.json; None if it has none that can be read.
        exact: True for --exact, by which also such files must be as planned that change no value.
    """

    folder: Path
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    weights: dict[str, Bitsandbytes4bit] = field(default_factory=dict)
    plain: dict[str, TensorInfo] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    read: Callable[[TensorInfo], bytes] = read_bytes
    record: Mapping[str, Any] | None = None
    exact: bool = False

    def note(
        self, check: str, file: Path | str, tensor: str, text: str, *, is_fault: bool = True
    ) -> None:
        """Adds a finding; arguments as the attributes of `Finding`."""
        name = file if isinstance(file, str) else file.name
        self.findings.append(Finding(check, name, tensor, text, is_fault))

    def note_unreadable(self, check: str, file: Path, error: SourceError) -> None:
        """Notes why a file cannot be read."""
        self.note(check, file, "", str(error).removeprefix(f"{file}: "))

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """The content of config.json; None if there is none that can be read."""
        try:
            return read_json(self.folder / "config.json")
        except SourceError:
            return None


def read_structure(path: Path) -> Structure:
    """Looks at the headers of a folder or file, and at what describes its packed weights.

    Raises SourceError if there are no safetensors weights, or if their run has not ended.
    """
    if path.is_file():
        structure = Structure(path.parent)
        files, weight_map = [path], None
    elif path.is_dir():
        check_finished(path)
        structure = Structure(path)
        files, weight_map = _find_files(structure)
    else:
        raise SourceError(f"{path}: no such file or folder", path=path)
    structure.record = read_record(structure.folder)
    readable = _read_headers(structure, files)
    if weight_map is not None:
        _check_index(structure, weight_map, readable)
    return look_at(structure)


def _find_files(structure: Structure) -> tuple[list[Path], Mapping[str, str] | None]:
    """Finds the weight files of a folder; notes those that are missing and those too many.

    Returns those that are there and belong to the checkpoint, and the index if there is one.
    """
    folder = structure.folder
    present = {file.name for file in folder.iterdir() if file.is_file()}
    candidates = {name for name in present if not name.endswith(".bin")}
    weights = find_weights(candidates, None, folder)
    weight_map = None
    names = {weights.name}
    if weights.is_index:
        weight_map = _read_weight_map(structure, folder / weights.name)
        names = set(weight_map.values())
        if not names:
            names = {name for name in present if name.endswith(".safetensors")}

    for name in sorted(names - present):
        structure.note("files", name, "", "the shard is missing; the download is incomplete")
    for name in sorted(present - names):
        if name.endswith(".safetensors"):
            text = "belongs to no index; some loaders read every safetensors file they find"
            structure.note("files", name, "", text)
    return [folder / name for name in sorted(names & present)], weight_map


def _read_weight_map(structure: Structure, index: Path) -> Mapping[str, str]:
    """Reads the index and notes what is wrong with it; an empty map if it cannot be read."""
    try:
        content = read_index(index)
    except SourceError as error:
        structure.note_unreadable("index", index, error)
        return {}
    if not isinstance(content.get("metadata"), dict):
        text = "has no metadata, without which transformers fails: KeyError"
        structure.note("index", index, "", text)
    weight_map: Mapping[str, str] = content["weight_map"]
    return weight_map


def _read_headers(structure: Structure, files: Sequence[Path]) -> list[Path]:
    """Adds the tensors of files to the structure; returns the files that could be read."""
    readable = []
    for file in files:
        try:
            header, metadata = read_header_with_metadata(file)
        except SourceError as error:
            structure.note_unreadable("files", file, error)
            continue
        readable.append(file)
        _check_metadata(structure, file, metadata)
        for tensor in header:
            other = structure.tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                structure.note("files", file, tensor.name, f"also in {other.file.name}")
    return readable


def _check_metadata(structure: Structure, file: Path, metadata: object) -> None:
    """Notes a format that loaders refuse. A file may do without metadata."""
    if metadata is None:
        return
    found = metadata.get("format") if isinstance(metadata, dict) else None
    if found not in _FORMATS:
        text = f"its metadata says format {found!r:.40}, not 'pt'; transformers 4.57 refuses it"
        structure.note("files", file, "", text)


def _check_index(
    structure: Structure, weight_map: Mapping[str, str], readable: Sequence[Path]
) -> None:
    """Notes where the index and the headers disagree."""
    names = {file.name for file in readable}
    for tensor, file in weight_map.items():
        found = structure.tensors.get(tensor)
        if found is None:
            if file in names:
                text = "the index places this tensor here, but the file lacks it"
                structure.note("index", file, tensor, text)
        elif found.file.name != file:
            structure.note("index", found.file, tensor, f"the index places this tensor in {file}")
    if not weight_map:
        return
    for tensor, found in structure.tensors.items():
        if tensor not in weight_map:
            text = "is not in the index, so loaders do not see it"
            structure.note("index", found.file, tensor, text)


def look_at(structure: Structure) -> Structure:
    """Sorts tensors into packed weights and others, notes what is wrong, and returns all that."""
    # the components of each weight by suffix, by the name of the weight
    owners: dict[str, dict[str, TensorInfo]] = {}
    others: list[TensorInfo] = []
    for name, tensor in structure.tensors.items():
        owner, suffix = split_component(name)
        if suffix:
            owners.setdefault(owner, {})[suffix] = tensor
        else:
            others.append(tensor)
    for tensor in others:
        if tensor.name in owners:
            continue
        structure.plain[tensor.name] = tensor
        if tensor.dtype == "U8" and tensor.name.endswith(".weight"):
            text = "packed codes, but none of the tensors beside them"
            structure.note("components", tensor.file, tensor.name, text)
    scales_of = recorded_scales(structure.record)
    for owner, components in owners.items():
        _add_weight(structure, owner, components, scales_of(owner))
    _check_uniform(structure)
    return structure


def _add_weight(
    structure: Structure, owner: str, components: Mapping[str, TensorInfo], scales: str
) -> None:
    """Adds a packed weight unless it cannot be decoded, and notes its faults."""
    values = structure.tensors.get(owner)
    if values is None:
        for part in components.values():
            text = f"belongs to {owner}, which is missing"
            structure.note("components", part.file, part.name, text)
        return
    weight, faults = check_weight(values, components, structure.read, scales)
    for fault in faults:
        is_fault = fault.severity is not Severity.NOTE
        structure.note(fault.check, fault.part.file, fault.part.name, fault.text, is_fault=is_fault)
    if weight is not None:
        structure.weights[owner] = weight


def _check_uniform(structure: Structure) -> None:
    """Notes weights that are packed in another way than most.

    transformers 4.57 finds the tensors of a weight by the config's data type, and counts them by
    its nesting. Different block sizes load, and are only worth knowing.
    """
    for what, is_fault, kind_of in _UNIFORM:
        kinds = {name: kind_of(weight) for name, weight in structure.weights.items()}
        unlike = unlike_most(kinds)
        if unlike:
            name, kind, _, commonest = unlike[-1]
            count = f"{len(unlike) + 1} {what} in one checkpoint"
            text = f"{kind}, while others are {commonest}: {count}"
            file = structure.weights[name].values.file
            structure.note("uniform", file, name, text, is_fault=is_fault)


_UNIFORM: Final[Sequence[tuple[str, bool, Callable[[Bitsandbytes4bit], Hashable]]]] = (
    ("data types", True, lambda weight: weight.format.quant_type),
    ("nestings", True, lambda weight: weight.format.nesting),
    ("block sizes", False, lambda weight: weight.format.blocksize),
    ("storage dtypes", True, lambda weight: weight.values.dtype),
)


def unlike_most(kinds: Mapping[str, Hashable]) -> list[tuple[str, Hashable, int, Hashable]]:
    """Returns the first weight of each kind but the commonest, given the kinds by name.

    Each with its kind, how many are of it, and the commonest kind; the rarest last.
    """
    (commonest, _), *others = Counter(kinds.values()).most_common() or [(None, 0)]
    unlike = []
    for kind, count in others:
        name = next(name for name, other in kinds.items() if other == kind)
        unlike.append((name, kind, count, commonest))
    return unlike
