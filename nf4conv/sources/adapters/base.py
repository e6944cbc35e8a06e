"""Finds tensors of a source by the names that they have in the model in memory.

An adapter names modules of the model as it is loaded; on disk they may be called otherwise.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from nf4conv.errors import SourceError
from nf4conv.models.module_names import ModuleNames
from nf4conv.sources.adapters.adapter import Adapter
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo


class Base:
    """The source that adapters are merged into, as far as it has been changed.

    Attributes:
        source: the source as it was opened.
        config: the content of its config.json; empty if there is none.
        tensors: its tensors by name on disk.
        names: the names that loaders give its modules.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.config: Mapping[str, Any] = source.config or {}
        self.tensors = {tensor.name: tensor for tensor in source.tensors}
        self.names = ModuleNames.of(self.config)
        self._on_disk = self._names_on_disk()
        self._prefix = self._common_prefix()

    def _names_on_disk(self) -> dict[str, str]:
        """Returns the names on disk by the names in memory."""
        found = {}
        for name in self.tensors:
            module, _, leaf = name.rpartition(".")
            for path in self.names.spellings(module):
                found[f"{path}.{leaf}"] = name
        # a name on disk is the most certain spelling
        found.update({name: name for name in self.tensors})
        return found

    def _common_prefix(self) -> str:
        """Returns the first part of most names, such as "model"; empty if there is none."""
        counts = Counter(name.partition(".")[0] for name in self.tensors)
        for prefix, count in counts.most_common(1):
            if 2 * count > len(self.tensors):
                return prefix
        return ""

    def find(self, name: str) -> TensorInfo | None:
        """Returns the tensor on disk that becomes the one of this name in the model.

        A model with a head has the name of its base in front of everything else, a model without
        one has not: names are found either way.
        """
        spellings = [name, f"{self._prefix}.{name}"]
        prefix, _, rest = name.partition(".")
        if prefix != self._prefix:
            spellings.append(rest)
        for spelling in spellings:
            if spelling in self._on_disk:
                return self.tensors[self._on_disk[spelling]]
        return None

    def add(self, tensor: TensorInfo) -> None:
        """Adds a tensor that the source does not have."""
        self.tensors[tensor.name] = tensor
        self._on_disk[tensor.name] = tensor.name

    def lacks(self, adapter: Adapter, name: str) -> SourceError:
        """Returns the error of an adapter that changes a tensor which the source lacks."""
        return SourceError(
            f"{adapter.place}: {name}: {self.source} has nothing that the adapter could change "
            f"there"
        )


def misfit(adapter: Adapter, tensor: TensorInfo, found: TensorInfo, more: str = "") -> SourceError:
    """Returns the error of a tensor of an adapter that does not fit one of the source."""
    given = f"{tensor.name} {list(tensor.shape)}"
    expected = f"{found.name} {list(found.shape)}"
    return SourceError(f"{adapter.place}: {given} does not go with {expected}{more}")
