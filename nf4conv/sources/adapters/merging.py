"""Opens a source as it is once adapters are merged into it.

Some tensors stand in the place of others, and to some tensors something is added. Nothing is
computed here: a tensor that an adapter changes gets an encoding, and is merged a piece at a time
when it is read.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from nf4conv.errors import DiffusersFolderError, PlanError, SourceError
from nf4conv.format.dtypes import FLOAT_DTYPES
from nf4conv.options import SourceOptions
from nf4conv.sources.adapters.adapter import Adapter, Targeted, open_adapter
from nf4conv.sources.adapters.base import Base, misfit
from nf4conv.sources.adapters.experts import changes_of_parameters
from nf4conv.sources.adapters.modules import Change, changes_of_module
from nf4conv.sources.adapters.tied import separate_head
from nf4conv.sources.arranged import Delta, Merged, Strided
from nf4conv.sources.opening import open_source
from nf4conv.sources.shards import stamp_of
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo


def open_merged(source: str | Path, where: SourceOptions | None, lora: Sequence[str]) -> Source:
    """Opens a checkpoint, and merges adapters into its tensors, one after the other.

    Args:
        source: a folder, a file, or "org/name" on the Hub.
        where: what to take of a folder or repository, and how to reach the Hub.
        lora: the adapters: folders, or names on the Hub; may be empty.

    Raises:
        SourceError: something cannot be read, an adapter changes what the checkpoint lacks, or
            shapes disagree.
        PlanError: adapters are given for a diffusers pipeline.
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
        self._deltas: dict[str, list[Delta]] = {}  # by the name of the tensor on disk
        self._replaced_by: dict[str, str] = {}  # the adapter's place, by that name
        self._notes: list[str] = []

    def add(self, adapter: Adapter) -> None:
        """Merges an adapter into the source as it is by now.

        Raises:
            SourceError: the adapter changes what the source lacks, or shapes disagree.
        """
        adapter, note = separate_head(self._base, adapter)
        for name, tensor in adapter.replaced.items():
            self._replace(adapter, name, tensor)
        modules: dict[str, list[Targeted]] = {}
        for part in adapter.targeted:
            modules.setdefault(part.module, []).append(part)
        for module, parts in modules.items():
            for change in self._changes_of(adapter, module, parts):
                self._deltas.setdefault(change.tensor.name, []).append(change.delta)
        counts = f"{len(modules):,} modules changed, {len(adapter.replaced):,} tensors replaced"
        self._notes.append(f"{adapter} merged: {counts}{note}")
        self._note_other_base(adapter)

    def _note_other_base(self, adapter: Adapter) -> None:
        """Notes an adapter that was trained on a model of another name."""
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

    def _changes_of(
        self, adapter: Adapter, module: str, parts: Sequence[Targeted]
    ) -> Iterator[Change]:
        """Yields what an adapter does to the tensors of a module.

        Several parts, or a part of a module without a weight, are those of the module's parameters;
        the outermost wrapper comes first.
        """
        weight = self._base.find(f"{module}.weight")
        if weight is not None and len(parts) == 1:
            return changes_of_module(self._base, adapter, parts[0], weight)
        return changes_of_parameters(self._base, adapter, module, parts)

    def result(self, adapters: Sequence[Adapter]) -> Source:
        """Returns the source with everything that has been added."""
        source = self._base.source
        tensors = self._base.tensors
        for name, deltas in self._deltas.items():
            below = tensors[name]
            tensors[name] = below._replace(encoding=Merged(below, tuple(deltas)))
        stamps = dict(source.stamps)
        for adapter in adapters:
            if adapter.origin is None:  # a commit cannot change
                stamps[adapter.file] = stamp_of(adapter.file)
        return replace(
            source,
            files=(*source.files, *(adapter.file for adapter in adapters)),
            tensors=tuple(tensors.values()),
            config=None if source.config is None else self._base.config,
            notes=(*source.notes, *self._notes),
            adapters=tuple(adapters),
            stamps=stamps,
        )


def _in_place_of(found: TensorInfo, tensor: TensorInfo) -> TensorInfo:
    """Returns a tensor under the name of another, and in its dtype."""
    if tensor.dtype == found.dtype or tensor.encoding is not None:
        return tensor._replace(name=found.name, dtype=found.dtype)
    stored = tensor._replace(shape=(tensor.elements,))
    strides = tuple(math.prod(tensor.shape[index + 1 :]) for index in range(len(tensor.shape)))
    return tensor._replace(name=found.name, dtype=found.dtype, encoding=Strided(stored, strides))
