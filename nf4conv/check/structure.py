"""What a 4-bit checkpoint's headers and small tensors say about it: every fault is noted, none ends
the search.

Written against the format (docs/format.md), not against the code that writes it: no plan, no
writer, no decoder is used here. Faults that other tools are known to make are recognised and named.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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


def read_structure(path: Path) -> Structure:
    """Look at the headers of a checkpoint, a folder or a .safetensors file, and at what describes
    its packed weights.

    A SourceError if there are no safetensors weights at all.
    """
    listed: tuple[Path, ...] = (path,)
    weight_map: Mapping[str, Any] | None = None
    if path.is_file():
        structure = Structure(path.parent)
    elif path.is_dir():
        check_finished(path)
        structure = Structure(path)
        listed, weight_map = _find_files(structure)
    else:
        raise SourceError(f"{path}: no such file or folder")
    structure.scales = recorded_scales(structure.folder)
    readable = _read_headers(structure, listed)
    if weight_map is not None:
        _check_index(structure, weight_map, readable)
    return look_at(structure)


def _find_files(structure: Structure) -> tuple[tuple[Path, ...], Mapping[str, Any] | None]:
    folder = structure.folder
    present = {file.name for file in folder.iterdir() if file.is_file()}
    weights = find_weights({name for name in present if not name.endswith(".bin")}, None, folder)
    if not weights.is_index:
        names, weight_map = {weights.name}, None
    else:
        weight_map = _read_weight_map(structure, folder / weights.name)
        named = {name for name in weight_map.values() if isinstance(name, str) and "/" not in name}
        names = named or {name for name in present if name.endswith(".safetensors")}
    for name in sorted(names - present):
        structure.note("files", name, "", "the shard is missing; the download is incomplete")
    for name in sorted(present - names):
        if name.endswith(".safetensors"):
            structure.note(
                "files",
                name,
                "",
                "belongs to no index; some loaders read every safetensors file they find",
            )
    return tuple(folder / name for name in sorted(names & present)), weight_map


def _read_weight_map(structure: Structure, index: Path) -> Mapping[str, Any]:
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
        structure.note(
            "index", index, "", "has no metadata, without which transformers fails: KeyError"
        )
    return weight_map


def _read_headers(structure: Structure, files: Sequence[Path]) -> tuple[Path, ...]:
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
    return tuple(readable)


def _check_index(
    structure: Structure, weight_map: Mapping[str, Any], readable: Sequence[Path]
) -> None:
    names = {file.name for file in readable}
    for tensor, file in weight_map.items():
        found = structure.tensors.get(tensor)
        if not isinstance(file, str):
            text = f"the index places this tensor in {file!r:.50}, which is no file"
            structure.note("index", "", tensor, text)
        elif file in names and found is None:
            structure.note(
                "index", file, tensor, "the index places this tensor here, but the file lacks it"
            )
        elif found is not None and found.file.name != file:
            structure.note("index", found.file, tensor, f"the index places this tensor in {file}")
    for tensor, found in structure.tensors.items():
        if weight_map and tensor not in weight_map:
            structure.note(
                "index", found.file, tensor, "is not in the index, so loaders do not see it"
            )


def look_at(structure: Structure) -> Structure:
    """Sort a checkpoint's tensors into packed weights and others, and note what is wrong with them."""
    owners: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in structure.tensors.items():
        owner, suffix = split_component(name)
        if suffix:
            owners.setdefault(owner, {})[suffix] = tensor
    for name, tensor in structure.tensors.items():
        if name not in owners and not split_component(name)[1]:
            structure.plain[name] = tensor
            if tensor.dtype == "U8" and name.endswith(".weight"):
                structure.note(
                    "components",
                    tensor.file,
                    name,
                    "packed codes, but none of the tensors beside them",
                )
    for owner, components in owners.items():
        weight = check_weight(structure, owner, components)
        if weight is not None:
            structure.weights[owner] = weight
    _check_uniform(structure)
    return structure


def _check_uniform(structure: Structure) -> None:
    """Transformers 4.57 finds the tensors of a weight by the config's data type and counts them by
    its nesting.
    """
    kinds: dict[str, Callable[[StoredWeight], object]] = {
        "data types": lambda weight: weight.format.quant_type,
        "nestings": lambda weight: (
            "double quantization" if weight.format.double_quant else "no double quantization"
        ),
        "block sizes": lambda weight: weight.format.blocksize,
        "storage dtypes": lambda weight: weight.values.dtype,
    }
    for what, kind_of in kinds.items():
        common = [
            kind for kind, _ in Counter(map(kind_of, structure.weights.values())).most_common()
        ]
        if len(common) < 2:
            continue
        rare, is_fault = common[-1], what != "block sizes"
        weight = next(weight for weight in structure.weights.values() if kind_of(weight) == rare)
        text = f"{rare}, while others are {common[0]}: {len(common)} {what} in one checkpoint"
        structure.note("uniform", weight.values.file, weight.name, text, is_fault=is_fault)
