"""Reads what headers and small tensors of a 4-bit checkpoint say about it, and notes every fault.

No fault ends the search. Written against the format (docs/format.md), not against the code that
writes it: no plan, no writer, no decoder is used here. Faults that other tools are known to make
are recognised and named.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nf4conv.errors import SourceError
from nf4conv.sources.header import read_header
from nf4conv.sources.record import recorded_scales
from nf4conv.sources.source import LARGEST_INDEX, read_json
from nf4conv.sources.stored_weights import StoredWeight, Structure, check_weight, split_component
from nf4conv.sources.tensors import TensorInfo
from nf4conv.sources.unfinished import check_finished
from nf4conv.sources.weight_files import find_weights


@dataclass(frozen=True)
class _WeightFiles:
    """Lists the weight files of a folder."""

    # those that are there and belong to the checkpoint
    files: tuple[Path, ...]
    # file by tensor, as the index says; None without an index
    weight_map: Mapping[str, Any] | None


def read_structure(path: Path) -> Structure:
    """Looks at the headers of a checkpoint, and at what describes its packed weights.

    Args:
        path: a folder or a .safetensors file.

    Raises:
        SourceError: there are no safetensors weights at all, or the run that writes them has not
            ended.
    """
    if path.is_file():
        structure = Structure(path.parent)
        found = _WeightFiles((path,), None)
    elif path.is_dir():
        check_finished(path)
        structure = Structure(path)
        found = _find_files(structure)
    else:
        raise SourceError(f"{path}: no such file or folder")
    structure.scales = recorded_scales(structure.folder)
    readable = _read_headers(structure, found.files)
    if found.weight_map is not None:
        _check_index(structure, found.weight_map, readable)
    return look_at(structure)


def _find_files(structure: Structure) -> _WeightFiles:
    """Finds the weight files of a folder; notes those that are missing and those too many."""
    folder = structure.folder
    present = {file.name for file in folder.iterdir() if file.is_file()}
    candidates = {name for name in present if not name.endswith(".bin")}
    weights = find_weights(candidates, None, folder)
    weight_map = None
    names = {weights.name}
    if weights.is_index:
        weight_map = _read_weight_map(structure, folder / weights.name)
        names = {name for name in weight_map.values() if isinstance(name, str) and "/" not in name}
        if not names:
            names = {name for name in present if name.endswith(".safetensors")}

    for name in sorted(names - present):
        structure.note("files", name, "", "the shard is missing; the download is incomplete")
    for name in sorted(present - names):
        if name.endswith(".safetensors"):
            text = "belongs to no index; some loaders read every safetensors file they find"
            structure.note("files", name, "", text)
    files = tuple(folder / name for name in sorted(names & present))
    return _WeightFiles(files, weight_map)


def _read_weight_map(structure: Structure, index: Path) -> Mapping[str, Any]:
    """Reads the index and notes what is wrong with it; an empty map if it cannot be read."""
    try:
        table = read_json(index, LARGEST_INDEX)
    except SourceError as error:
        structure.note("index", index, "", str(error).removeprefix(f"{index}: "))
        return {}
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict):
        structure.note("index", index, "", "has no weight_map")
        return {}
    if not weight_map:
        structure.note("index", index, "", "names no tensor, so loaders see none")
    if not isinstance(table.get("metadata"), dict):
        text = "has no metadata, without which transformers fails: KeyError"
        structure.note("index", index, "", text)
    return weight_map


def _read_headers(structure: Structure, files: Sequence[Path]) -> list[Path]:
    """Adds the tensors of files to the structure; returns the files that could be read."""
    readable = []
    for file in files:
        try:
            header = read_header(file)
        except SourceError as error:
            structure.note("files", file, "", str(error).removeprefix(f"{file}: "))
            continue
        readable.append(file)
        for tensor in header:
            other = structure.tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                structure.note("files", file, tensor.name, f"also in {other.file.name}")
    return readable


def _check_index(
    structure: Structure, weight_map: Mapping[str, Any], readable: Sequence[Path]
) -> None:
    """Notes where the index and the headers disagree."""
    names = {file.name for file in readable}
    for tensor, file in weight_map.items():
        found = structure.tensors.get(tensor)
        if not isinstance(file, str):
            text = f"the index places this tensor in {file!r:.50}, which is no file"
            structure.note("index", "", tensor, text)
        elif found is None:
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
    """Sorts a checkpoint's tensors into packed weights and others, and notes what is wrong.

    Args:
        structure: a checkpoint of which the tensors are known.

    Returns:
        The same structure, of which `weights`, `plain` and `findings` are filled.
    """
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
    for owner, components in owners.items():
        weight = check_weight(structure, owner, components)
        if weight is not None:
            structure.weights[owner] = weight
    _check_uniform(structure)
    return structure


def _check_uniform(structure: Structure) -> None:
    """Notes weights that are packed in another way than most.

    transformers 4.57 finds the tensors of a weight by the config's data type, and counts them by
    its nesting. Different block sizes load, and are only worth knowing.
    """
    weights = list(structure.weights.values())
    properties: dict[str, list[Hashable]] = {
        "data types": [weight.format.quant_type for weight in weights],
        "nestings": [_nesting_of(weight) for weight in weights],
        "block sizes": [weight.format.blocksize for weight in weights],
        "storage dtypes": [weight.values.dtype for weight in weights],
    }
    for what, kinds in properties.items():
        by_frequency = [kind for kind, _ in Counter(kinds).most_common()]
        if len(by_frequency) < 2:
            continue
        rarest = by_frequency[-1]
        weight = weights[kinds.index(rarest)]
        text = (
            f"{rarest}, while others are {by_frequency[0]}: "
            f"{len(by_frequency)} {what} in one checkpoint"
        )
        is_fault = what != "block sizes"
        structure.note("uniform", weight.values.file, weight.name, text, is_fault=is_fault)


def _nesting_of(weight: StoredWeight) -> str:
    return "double quantization" if weight.format.double_quant else "no double quantization"
