"""Says who reads the experts of a checkpoint that has them in 4 bits."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nf4conv.choose.decisions import Pack, PackedMatrix
from nf4conv.models.experts import SINGLE_WEIGHT
from nf4conv.models.families import are_stacked, families_of, layouts_of


class Readers(NamedTuple):
    """Says who reads the experts of a checkpoint that has them in 4 bits.

    Attributes:
        text: how they are stored, and who reads them.
        has_loader: True if transformers 5 does, with nf4conv installed.
        in_transformers_4: True if transformers 4 does by itself, where it knows the model.
    """

    text: str
    has_loader: bool
    in_transformers_4: bool = False


def readers_of(
    matrices: Iterable[PackedMatrix], config: Mapping[str, Any], quant_type: str | None
) -> Readers | None:
    """Finds out who reads the experts of a checkpoint.

    Args:
        matrices: the weights in 4 bits; the first expert among them tells.
        config: the content of config.json.
        quant_type: the 4-bit data type, or None for the usual one.

    Returns:
        Who does; None if no expert is in 4 bits, or if the family's experts load everywhere.
    """
    if any(family.splits_experts for family in families_of(config)):
        return None
    for matrix in matrices:
        is_stack = len(matrix.shape) == 3
        if is_stack or SINGLE_WEIGHT.match(matrix.name) is not None:
            break
    else:
        return None
    if not is_stack and not all(layout.has_loader for layout in layouts_of(config)):
        text = "experts are packed, which no loader reads for this family; nf4conv dequantize does"
        return Readers(text, has_loader=False)
    if is_stack:
        text = (
            "experts are packed as the stacks that they are, which transformers 5 with nf4conv "
            "installed and Unsloth read"
        )
    elif are_stacked(config) or matrix.expert is not None:
        text = (
            "experts are packed one by one, which for this family transformers 5 with nf4conv "
            "installed reads"
        )
    else:
        others = "vLLM's bitsandbytes plugin and Unsloth"
        if quant_type == "fp4":
            others = "Unsloth"
        text = (
            f"experts are packed one by one, which transformers 5 with nf4conv installed reads; "
            f"where it knows the model, transformers 4.57 does too, and by their code {others}"
        )
        return Readers(text, has_loader=True, in_transformers_4=True)
    return Readers(text, has_loader=True)


def is_of_experts(decision: Pack) -> bool:
    """Returns True if a tensor becomes weights of single experts, or a packed stack of them."""
    first = decision.matrices[0]
    return len(first.shape) == 3 or SINGLE_WEIGHT.match(first.name) is not None
