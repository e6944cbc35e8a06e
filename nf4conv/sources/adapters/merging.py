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
from nf4conv.sources.arranged import LowRankDelta, Merged, Strided
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
    if not lora:
        return opened
    merging = _Merging(opened)
    adapters = []
    for place in lora:
        adapter = open_adapter(place, where)
        merging.add(adapter)
        adapters.append(adapter)
    return merging.result(adapters)


class _Merging:
    """Merges adapters into a source, one after the other."""

    def __init__(self, source: Source) -> None:
        self._base = Base(source)
        self._deltas: dict[str, list[LowRankDelta]] = {}  # by the name of the tensor on disk
        self._replaced_by: dict[str, str] = {}  # the adapter's place, by that name
        self._notes: list[str] = []

    def add(self, adapter: Adapter) -> None:
        """Merges an adapter into the source as it is by now."""
        note = separate_head(self._base, adapter)
        for name, replacement in adapter.replaced.items():
            self._replace(adapter, name, replacement)
        families = self._base.names.families
        modules: dict[str, list[Targeted]] = {}
        for part in adapter.targeted:
            modules.setdefault(part.module, []).append(part)
        for module, parts in modules.items():
            weight = self._base.find(f"{module}.weight")
            if weight is not None and len(parts) == 1:
                path = f"{module}.weight" if adapter.targets(f"{module}.weight") else module
                place = Place(weight, is_transposed(module_of(weight.name), families))
                changes = [(weight, delta_at(adapter, parts[0], path, place))]
            else:  # parts of the module's own parameters
                changes = list(changes_of_parameters(self._base, adapter, module, parts))
            for tensor, delta in changes:
                self._deltas.setdefault(tensor.name, []).append(delta)
        counts = f"{len(modules):,} modules changed, {len(adapter.replaced):,} tensors replaced"
        self._notes.append(f"{adapter} merged: {counts}{note}")
        trained_on = str(adapter.config.get("base_model_name_or_path") or "")
        name = PurePosixPath(trained_on).name
        source = str(self._base.source)
        if name and name != PurePosixPath(source.partition("@")[0]).name:
            self._notes.append(
                f"{adapter}: was trained on {trained_on}, and is merged into {source}"
            )

    def _replace(self, adapter: Adapter, name: str, tensor: TensorInfo) -> None:
        """Puts a tensor of an adapter in the place of the one of this name in the model."""
        found = self._base.find(name)
        if found is None:
            raise self._base.lacks(adapter, name)
        if found.shape != tensor.shape:
            why = "an adapter of a resized vocabulary needs a base that is resized alike"
            raise SourceError(f"{misfit(adapter, tensor, found)}; {why}")
        if tensor.dtype != found.dtype and not {tensor.dtype, found.dtype} <= set(FLOAT_DTYPES):
            raise SourceError(
                f"{adapter.file}: {tensor.name} is {tensor.dtype}, and is to replace {found.name}, "
                f"which is {found.dtype}"
            )
        other = self._replaced_by.setdefault(found.name, adapter.place)
        if other != adapter.place:
            raise SourceError(
                f"{adapter.place}: {name}: {other} has one in its place too, and only one of them "
                f"can"
            )
        self._base.tensors[found.name] = _in_place_of(found, tensor)

    def result(self, adapters: Sequence[Adapter]) -> Source:
        """Returns the source with everything that has been added."""
        source = self._base.source
        tensors = self._base.tensors
        for name, deltas in self._deltas.items():
            below = tensors[name]
            tensors[name] = below._replace(encoding=Merged(below, tuple(deltas)))
        # a commit cannot change
        local = [adapter.file for adapter in adapters if adapter.origin is None]
        return replace(
            source,
            files=(*source.files, *(adapter.file for adapter in adapters)),
            tensors=tuple(tensors.values()),
            config=None if source.config is None else self._base.config,
            notes=(*source.notes, *self._notes),
            adapters=tuple(adapters),
            stamps={**source.stamps, **stamps_of(local)},
        )


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
