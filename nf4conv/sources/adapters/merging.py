"""Opens a source as it is once adapters are merged into it.

Some tensors stand in the place of others, and to some tensors something is added. Nothing is
computed here: a tensor that an adapter changes gets an encoding, and is merged a piece at a time
when it is read.

An output head may be the embedding, and an adapter change one of the two. PEFT's merge unties them
for modules_to_save. It adds LoRA of either one to both, with a warning: the adapter was not trained
for that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Final

from nf4conv.errors import DiffusersFolderError, PlanError, SourceError
from nf4conv.format.dtypes import FLOAT_DTYPES
from nf4conv.models.config import architecture_of
from nf4conv.models.families import is_transposed
from nf4conv.models.module_names import TEXT_CONFIGS, TIED_HEADS, module_of
from nf4conv.models.name_patterns import is_embedding
from nf4conv.options import SourceOptions
from nf4conv.sources.adapters.adapter import Adapter, Targeted, open_adapter
from nf4conv.sources.adapters.experts import changes_of_parameters
from nf4conv.sources.adapters.modules import Base, Place, delta_at, misfit
from nf4conv.sources.arranged import Merged, Strided
from nf4conv.sources.opening import open_source
from nf4conv.sources.source import Source, stamps_of
from nf4conv.sources.tensors import TensorInfo


def open_merged(source: str | Path, where: SourceOptions | None, lora: Sequence[str]) -> Source:
    """Opens a checkpoint, and merges adapters into its tensors, one after the other. `lora` names
    folders, or adapters on the Hub.
    """
    try:
        opened = open_source(source, where)
    except DiffusersFolderError as error:
        if not lora:
            raise
        raise PlanError(
            f"{source}: --lora is for one part of a diffusers pipeline: --subfolder transformer"
        ) from error
    for place in lora:
        opened = _merged(opened, open_adapter(place, where))
    return opened


def _merged(source: Source, adapter: Adapter) -> Source:
    """Merges an adapter into a source, into which others may have been merged before."""
    base = Base(source)
    note = separate_head(base, adapter)
    for name, replacement in adapter.replaced.items():
        _replace(base, adapter, name, replacement)
    modules: dict[str, list[Targeted]] = {}
    for part in adapter.targeted:
        modules.setdefault(part.module, []).append(part)
    for module, parts in modules.items():
        weight = base.find(f"{module}.weight")
        if weight is not None and len(parts) == 1:
            path = f"{module}.weight" if adapter.targets(f"{module}.weight") else module
            place = Place(weight, is_transposed(module_of(weight.name), base.names.families))
            changes = [(weight, delta_at(adapter, parts[0], path, place))]
        else:  # parts of the module's own parameters
            changes = list(changes_of_parameters(base, adapter, module, parts))
        for tensor, delta in changes:
            found = base.tensors[tensor.name]
            if isinstance(found.encoding, Merged):
                merged = replace(found.encoding, deltas=(*found.encoding.deltas, delta))
            else:
                merged = Merged(found, (delta,))
            base.tensors[tensor.name] = found._replace(encoding=merged)
    counts = f"{len(modules):,} modules changed, {len(adapter.replaced):,} tensors replaced"
    notes = [f"{adapter} merged: {counts}{note}"]
    trained_on = str(adapter.config.get("base_model_name_or_path") or "")
    name = PurePosixPath(trained_on).name
    if name and name != PurePosixPath(str(source).partition("@")[0]).name:
        notes.append(f"{adapter}: was trained on {trained_on}, and is merged into {source}")
    local = [adapter.file] if adapter.origin is None else []  # a commit cannot change
    return replace(
        source,
        files=(*source.files, adapter.file),
        tensors=tuple(base.tensors.values()),
        config=None if source.config is None else base.config,
        notes=(*source.notes, *notes),
        adapters=(*source.adapters, adapter),
        stamps={**source.stamps, **stamps_of(local)},
    )


def _replace(base: Base, adapter: Adapter, name: str, tensor: TensorInfo) -> None:
    """Puts a tensor of an adapter in the place of the one of this name in the model."""
    found = base.find(name)
    if found is None:
        raise base.lacks(adapter, name)
    if found.shape != tensor.shape:
        why = "an adapter of a resized vocabulary needs a base that is resized alike"
        raise SourceError(f"{misfit(adapter, tensor, found)}; {why}")
    if tensor.dtype != found.dtype and not {tensor.dtype, found.dtype} <= set(FLOAT_DTYPES):
        raise SourceError(
            f"{adapter.file}: {tensor.name} is {tensor.dtype}, and is to replace {found.name}, "
            f"which is {found.dtype}"
        )
    for other in base.source.adapters:
        if found.unmerged.file == other.file:
            raise SourceError(
                f"{adapter.place}: {name}: {other.place} has one in its place too, and only one of "
                f"them can"
            )
    base.tensors[found.name] = _in_place_of(found, tensor)


def _in_place_of(found: TensorInfo, tensor: TensorInfo) -> TensorInfo:
    """Returns a tensor under the name of another, and in its dtype."""
    if tensor.dtype == found.dtype or tensor.encoding is not None:
        return tensor._replace(name=found.name, dtype=found.dtype)
    stored = tensor._replace(shape=(tensor.elements,))
    strides = tuple(math.prod(tensor.shape[index + 1 :]) for index in range(len(tensor.shape)))
    return tensor._replace(name=found.name, dtype=found.dtype, encoding=Strided(stored, strides))


_WITH_HEAD: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of architectures that have an embedding and a head of the same shape."""


def separate_head(base: Base, adapter: Adapter) -> str:
    """Gives a tied head a tensor of its own if the adapter was trained to make it differ.

    The base gets the tensor, and a config that says so. Returns what to add to the line about it.
    """
    if base.config.get("tie_word_embeddings", True) is False:
        return ""
    names = sorted({f"{part.module}.weight" for part in adapter.targeted} | set(adapter.replaced))
    heads = [name for name in names if _leaf(name) in TIED_HEADS]
    embeddings = [base.find(name) for name in names if is_embedding(_leaf(name))]
    has_head = _has_head(base)
    if not heads and not (any(embeddings) and has_head):
        return ""
    head = heads[0] if heads else "lm_head.weight"
    if base.find(head) is None:
        if not any(embeddings):
            embeddings = [one for name, one in base.tensors.items() if is_embedding(_leaf(name))]
        alike = [one for one in embeddings if one is not None]
        if not has_head or not alike:
            raise base.lacks(adapter, head)
        base.add(max(alike, key=lambda one: one.elements)._replace(name=head))
    _untie_config(base)
    return ", the output head untied from the embedding"


def _has_head(base: Base) -> bool:
    """Returns True if a model has an embedding and a head that may be the same matrix."""
    if base.config.get("is_encoder_decoder"):  # which scales a tied head, and no other
        return False
    return architecture_of(base.config).endswith(_WITH_HEAD)


def _untie_config(base: Base) -> None:
    """Says in the config, and in those of its parts, that the head is no longer the embedding."""
    config = dict(base.config)
    for key in TEXT_CONFIGS:
        nested = config.get(key)
        if isinstance(nested, Mapping):
            config[key] = {**nested, "tie_word_embeddings": False}
    config["tie_word_embeddings"] = False
    base.config = config


def _leaf(name: str) -> str:
    """Returns the last part of a module's path, by the name of its weight."""
    return module_of(name).rpartition(".")[2]
