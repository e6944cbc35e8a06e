"""Finds out what an adapter does to the weights of a module.

An adapter names modules of the model as it is loaded; on disk they may be called otherwise.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from nf4conv.errors import SourceError
from nf4conv.models.families import is_transposed
from nf4conv.models.module_names import ModuleNames, module_of
from nf4conv.sources.adapters.adapter import Adapter, Targeted
from nf4conv.sources.arranged import LowRankDelta
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


class Factors(NamedTuple):
    """The two matrices whose product is added to a weight."""

    up: TensorInfo  # [out, rank], lora_B
    down: TensorInfo  # [rank, in], lora_A
    is_embedding: bool  # True if an embedding's weight is the product transposed


def factors_of(adapter: Adapter, part: Targeted) -> Factors:
    """Returns the factors of a module; raises a SourceError if one is missing, or no matrix."""
    embedding = ("lora_embedding_B", "lora_embedding_A", True)
    linear = ("lora_B.weight", "lora_A.weight", False)
    for up_role, down_role, is_embedding in (embedding, linear):
        up = part.tensors.get(up_role)
        down = part.tensors.get(down_role)
        if up is None or down is None:
            continue
        if len(up.shape) < 2 or len(down.shape) < 2:
            raise misfit(adapter, up, down)
        return Factors(up, down, is_embedding)
    raise SourceError(
        f"{adapter.file}: {part.module}: has one of lora_A and lora_B, but not both",
        path=adapter.file,
    )


def delta_of_module(
    base: Base, adapter: Adapter, part: Targeted, weight: TensorInfo
) -> LowRankDelta:
    """Returns what an adapter adds to a module's weight."""
    path = part.module
    if adapter.targets(f"{part.module}.weight"):
        path = f"{part.module}.weight"
    up, down, _ = factors = factors_of(adapter, part)
    transposed = _is_product_transposed(base, adapter, factors, weight)
    if down.shape[0] != adapter.rank(path) or up.shape[1] != down.shape[0]:
        raise misfit(adapter, down, up, f", nor with the rank {adapter.rank(path)} of its config")
    magnitude = part.tensors.get("lora_magnitude_vector")
    if magnitude is not None and magnitude.elements != up.shape[0]:
        raise misfit(adapter, magnitude, weight)
    return LowRankDelta(up, down, adapter.scale(path), transposed, magnitude)


def _is_product_transposed(
    base: Base, adapter: Adapter, factors: Factors, weight: TensorInfo
) -> bool:
    """Returns True if a matrix on disk is the product of its factors transposed; raises a
    SourceError if it is neither.
    """
    up, down, is_embedding = factors
    if len(up.shape) == len(down.shape) == len(weight.shape) == 2:
        made = (up.shape[0], down.shape[1])
        fits = weight.shape == made
        fits_transposed = weight.shape == made[::-1]
        if fits_transposed and is_embedding:
            return True
        if fits and fits_transposed:  # the shape of a square matrix does not tell
            return is_transposed(module_of(weight.name), base.names.families)
        if not is_embedding and (fits or fits_transposed):
            return fits_transposed
    raise misfit(adapter, up, weight, f" by way of {list(down.shape)}")
