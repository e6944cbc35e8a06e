"""Declares what may be decided about a tensor, and about a whole checkpoint."""

from dataclasses import dataclass
from typing import NamedTuple


class PackedMatrix(NamedTuple):
    """Describes one 4-bit weight of the output, and where in its source it comes from.

    Attributes:
        name: name of the weight in the output, such as
            "model.layers.0.mlp.experts.3.gate_proj.weight".
        shape: [out, in], as it is stored in the output; the whole shape of a stack of experts.
        transpose: True if the source holds [in, out].
        expert: index along dimension 0 of a source with three dimensions; None for other sources.
        columns: range of the source's columns, before transposing; None for all of them.
        rows: range of the source's rows, before transposing; None for all of them.
        step: distance between those rows that are taken; of a transposed weight, between columns.
    """

    name: str
    shape: tuple[int, ...]
    transpose: bool = False
    expert: int | None = None
    columns: tuple[int, int] | None = None
    rows: tuple[int, int] | None = None
    step: int = 1


class Pack(NamedTuple):
    """Decides that a tensor becomes one 4-bit weight, or several.

    Attributes:
        matrices: the weights.
        reason: what the user reads about it.
    """

    matrices: tuple[PackedMatrix, ...]
    reason: str


class Keep(NamedTuple):
    """Decides that a tensor is copied.

    Attributes:
        reason: what the user reads about it.
        keep_dtype: True if the tensor is float32 by design and is not cast to the checkpoint's
            dtype.
        is_linear: True if a loader may hold the tensor in an `nn.Linear`. The skip list must then
            name its module.
    """

    reason: str
    keep_dtype: bool = False
    is_linear: bool = False


@dataclass(frozen=True, slots=True)
class Selection:
    """Holds the decisions for a whole checkpoint.

    Attributes:
        decisions: the decision for every tensor of the source by name, in the source's order.
        skip_modules: the content of llm_int8_skip_modules.
        notes: what the user should know, one line each.
    """

    decisions: dict[str, Pack | Keep]
    skip_modules: tuple[str, ...]
    notes: tuple[str, ...] = ()
