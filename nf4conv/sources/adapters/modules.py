"""Finds out what an adapter does to the weights of a module.

An adapter names modules of the model as it is loaded; on disk they may be called otherwise.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from nf4conv.errors import SourceError
from nf4conv.models.module_names import ModuleNames
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


class Place(NamedTuple):
    """A tensor on disk: the weight of a module, or its experts, or one of them or a part of it."""

    tensor: TensorInfo
    is_transposed: bool = False  # of a square matrix, whose shape does not tell
    experts: int = 0  # how many experts the factors stack; 0 if they are those of a single matrix
    expert: int | None = None  # which expert the tensor is; None if it holds all of them
    share: int = 0  # which part of the rows it is
    shares: int = 1  # how many such parts there are
    is_interleaved: bool = False  # True if rows of the parts alternate in the product


def delta_at(adapter: Adapter, part: Targeted, path: str, place: Place) -> LowRankDelta:
    """Returns what an adapter adds to a tensor; `path` is that of the module or parameter. Raises a
    SourceError if the factors or their product do not fit.
    """
    tensor = place.tensor
    up, down, is_embedding = _factors_of(adapter, part)
    made = (up.shape[0] // place.shares, down.shape[1])
    is_stack = place.experts > 0 and place.expert is None
    stored = tensor.shape[1:] if is_stack else tensor.shape
    if stored != made[::-1] and (is_embedding or stored != made):
        raise misfit(adapter, up, tensor, f" by way of {list(down.shape)}")
    is_transposed = stored != made
    if made[0] == made[1]:
        is_transposed = is_embedding or place.is_transposed
    rank = adapter.rank(path)
    if not down.shape[0] == up.shape[1] == rank * max(place.experts, 1):
        of_all = f" for {place.experts} experts" if place.experts else ""
        raise misfit(adapter, down, up, f", nor{of_all} with the rank {rank} of its config")
    magnitude = part.tensors.get("lora_magnitude_vector")
    if magnitude is not None and magnitude.elements != up.shape[0]:
        raise misfit(adapter, magnitude, tensor)
    rows = None
    if place.is_interleaved:
        rows = (place.share, up.shape[0])
    elif place.shares > 1:
        rows = (place.share * made[0], (place.share + 1) * made[0])
    return LowRankDelta(
        up,
        down,
        adapter.scale(path),
        is_transposed=is_transposed,
        magnitude=magnitude,
        rows=rows,
        row_step=place.shares if place.is_interleaved else 1,
        experts=place.experts,
        expert=place.expert,
    )


def _factors_of(adapter: Adapter, part: Targeted) -> tuple[TensorInfo, TensorInfo, bool]:
    """Returns lora_B, [out, rank], lora_A, [rank, in], and True if they are those of an embedding,
    whose weight is the product transposed. Raises a SourceError if one is missing, or no matrix.
    """
    embedding = ("lora_embedding_B", "lora_embedding_A", True)
    linear = ("lora_B.weight", "lora_A.weight", False)
    for up_role, down_role, is_embedding in (embedding, linear):
        up = part.tensors.get(up_role)
        down = part.tensors.get(down_role)
        if up is None or down is None:
            continue
        if len(up.shape) != 2 or len(down.shape) != 2:
            raise misfit(adapter, up, down)
        return up, down, is_embedding
    raise SourceError(
        f"{adapter.file}: {part.module}: has one of lora_A and lora_B, but not both",
        path=adapter.file,
    )
