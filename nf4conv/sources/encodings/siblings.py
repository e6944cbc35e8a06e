"""Finds the tensors that belong together by their names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nf4conv.errors import SourceError
from nf4conv.models.family_table import Family
from nf4conv.sources.encodings.description import Description
from nf4conv.sources.tensors import TensorInfo


@dataclass(frozen=True)
class SiblingTensors:
    """The tensors of a checkpoint, to find those that belong to one of them."""

    by_name: Mapping[str, TensorInfo]  # all tensors as they are stored
    description: Description  # the quantization, as the config describes it
    dtype: str  # the tag to decode to where the source does not say
    families: tuple[Family, ...]  # the model's families, some of which store weights transposed
    read: Callable[[TensorInfo], bytes]  # reads a small tensor

    def find(self, *names: str) -> TensorInfo | None:
        """Returns the first tensor that there is of these names."""
        for name in names:
            if name in self.by_name:
                return self.by_name[name]
        return None

    def is_scale(self, tensor: TensorInfo) -> bool:
        """Returns True if a tensor is the scale of another; a scale may be 8-bit itself."""
        stem, _, ending = tensor.name.rpartition("_scale")
        if not stem or ending not in ("", "_inv", "_2", "s"):
            return False
        return self.find(stem, f"{stem}_packed") is not None


def misfit(tensor: TensorInfo, other: TensorInfo) -> SourceError:
    """Returns the error of two tensors that belong together by their names and do not fit."""
    return SourceError.about(
        tensor.file,
        tensor.name,
        f"{tensor.dtype} {list(tensor.shape)} does not go with "
        f"{other.name}, {other.dtype} {list(other.shape)}",
    )
