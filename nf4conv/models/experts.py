"""Recognises the tensors of experts by their names: single experts, and stacks of them.

    PATH.experts.3.gate_proj.weight         experts one by one; w1, w2, w3 in some families
    PATH.experts.gate_up_projs.3.weight     the same as Unsloth names those of gpt-oss
    PATH.experts.gate_up_proj               a stack, as family_table.py has it for each family

Most families store experts one by one on disk, and transformers 5 stacks them when it loads them.
Others are stacked on disk; if they were taken apart to pack them, plain transformers does not find
them before they are stacked again.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from nf4conv.models.family_table import DOWN, GATE_UP, INKLING, ExpertLayout, ExpertStack

FUSED: Final = {"gate_up_proj": GATE_UP, "down_proj": DOWN}
"""The projections that parameters of fused experts hold, in the order in which PEFT wraps them."""

USUAL_NAMES: Final = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""The names that most families have for what others call w1, w2 and w3."""

SINGLE_WEIGHT: Final = re.compile(r"^(.*(?:^|\.)experts)\.(\d{1,9})\.(.+)\.weight$")
"""Matches the name of a weight of a single expert: path of the experts, number, projection."""

_SINGLE: Final = re.compile(r"^(.*(?:^|\.)experts)\.(\d{1,9})\.(\w+)\.(weight|bias)$")
_SINGLE_OF_UNSLOTH: Final = re.compile(
    r"^(.*(?:^|\.)experts)\.(gate_up_proj|down_proj)s\.(\d{1,9})\.(weight|bias)$"
)


class SingleExpert(NamedTuple):
    """Says what a tensor is to a layer of experts.

    Attributes:
        experts: the path below which the experts are numbered.
        expert: the number of the expert.
        projection: which of its matrices the tensor belongs to, such as "gate_proj".
        leaf: "weight" or "bias".
        is_of_unsloth: True if the tensor has the name that Unsloth gives it in gpt-oss.
    """

    experts: str
    expert: int
    projection: str
    leaf: str
    is_of_unsloth: bool = False


class FoundStack(NamedTuple):
    """A tensor of a checkpoint that stacks experts.

    Attributes:
        stack: how the experts lie in the tensor.
        experts: the path below which single experts are numbered.
        layout: the layout of the family.
    """

    stack: ExpertStack
    experts: str
    layout: ExpertLayout

    def name_of(self, expert: int, projection: str) -> str:
        """Returns the name of a weight of a single expert."""
        return f"{self.experts}.{expert}.{projection}.weight"


def single_expert(name: str) -> SingleExpert | None:
    """Returns what a tensor is to a layer of experts; None for any other tensor."""
    found = _SINGLE.match(name)
    if found is not None:
        experts, number, projection, leaf = found.groups()
        projection = USUAL_NAMES.get(projection, projection)
        return SingleExpert(experts, int(number), projection, leaf)
    found = _SINGLE_OF_UNSLOTH.match(name)
    if found is not None:
        experts, projection, number, leaf = found.groups()
        return SingleExpert(experts, int(number), projection, leaf, is_of_unsloth=True)
    return None


def find_stack(name: str, layouts: Sequence[ExpertLayout]) -> FoundStack | None:
    """Returns how experts are stacked in a tensor; None if its name is not that of a stack."""
    dotted = f".{name}"
    for layout in layouts:
        for stack in layout.stacks:
            if dotted.endswith(stack.end):
                experts = dotted.removesuffix(stack.end) + stack.experts
                return FoundStack(stack, experts[1:], layout)
    return None


def partner_names(name: str, found: FoundStack) -> Iterator[str]:
    """Yields the names of the stacks that a layer has beside one of this name."""
    above = name.removesuffix(found.stack.end[1:])
    for other in found.layout.stacks:
        if other is not found.stack and other.experts == found.stack.experts:
            yield above + other.end[1:]


def stack_name(experts: str, stack: ExpertStack, layout: ExpertLayout) -> str | None:
    """Returns the name of the tensor that stacks experts; None if those are of other layers."""
    dotted = f".{experts}"
    if layout is INKLING and ".llm." not in dotted:
        return None  # without towers these models have the standard names
    if not dotted.endswith(stack.experts):
        return None
    return experts.removesuffix(stack.experts[1:]) + stack.end[1:]
