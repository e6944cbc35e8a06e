"""Recognises the tensors of single experts by their names, and finds the stacks they belong to.

    PATH.experts.3.gate_proj.weight         experts one by one; w1, w2, w3 in some families
    PATH.experts.gate_up_projs.3.weight     the same as Unsloth names those of gpt-oss

Most families store experts one by one on disk, and transformers 5 stacks them when it loads them.
Others are stacked on disk; if they were taken apart to pack them, plain transformers does not find
them before they are stacked again.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from nf4conv.models.expert_layouts import (
    INKLING,
    STANDARD,
    ExpertLayout,
    ExpertStack,
    are_stacked,
    find_stack,
    layouts_of,
    name_after_group,
)
from nf4conv.models.families import model_types

_SINGLE: Final = re.compile(r"^(.*(?:^|\.)experts)\.(\d{1,9})\.(\w+)\.(weight|bias)$")
_SINGLE_OF_UNSLOTH: Final = re.compile(
    r"^(.*(?:^|\.)experts)\.(gate_up_proj|down_proj)s\.(\d{1,9})\.(weight|bias)$"
)

_STACKED_WITHOUT_TOWERS: Final = ("minimax_m3_vl_text", "glm4v_moe_text", "qwen3_vl_moe_text")
"""Model types that are stored as transformers 5 computes, stacked and [out, in], as models of their
own, but singly or [in, out] as parts of another.
"""

_USUAL_NAMES: Final = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""The names that most families have for what others call w1, w2 and w3."""


ROUTER_OF_UNSLOTH: Final = ".router.linear."
"""Part of the name of a router as Unsloth names it in gpt-oss; elsewhere it is ".router."."""


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


def single_expert(name: str) -> SingleExpert | None:
    """Returns what a tensor is to a layer of experts; None for any other tensor."""
    found = _SINGLE.match(name)
    if found is not None:
        experts, number, projection, leaf = found.groups()
        projection = _USUAL_NAMES.get(projection, projection)
        return SingleExpert(experts, int(number), projection, leaf)
    found = _SINGLE_OF_UNSLOTH.match(name)
    if found is not None:
        experts, projection, number, leaf = found.groups()
        return SingleExpert(experts, int(number), projection, leaf, is_of_unsloth=True)
    return None


def stacked_layouts(config: Mapping[str, Any]) -> tuple[ExpertLayout, ...]:
    """Returns the layouts in which a model's experts are stored; none if they are stored singly."""
    if config.get("model_type") in _STACKED_WITHOUT_TOWERS:
        return (STANDARD,)
    if are_stacked(config):
        return layouts_of(config)
    return ()


def stack_name(experts: str, stack: ExpertStack, layout: ExpertLayout) -> str | None:
    """Returns the name of the tensor that stacks experts.

    Args:
        experts: the path below which the experts are numbered.
        stack: how the experts lie in the tensor.
        layout: the layout that the stack belongs to.

    Returns:
        None if the path is not that of such a layout.
    """
    if layout is INKLING and ".llm." not in f".{experts}":
        return None  # without towers these models have the standard names
    below = stack.experts.removeprefix(r"\1")
    if not experts.endswith(below):
        return None
    above = experts.removesuffix(below)
    # what a pattern has after its first group, such as ".experts", is inside the group of others
    name = above + name_after_group(stack)
    found = find_stack(name, (layout,))
    return name if found is not None and found.experts == experts else None


def is_gpt_oss(config: Mapping[str, Any]) -> bool:
    """Returns True for gpt-oss, to whose experts Unsloth gives names of its own."""
    return "gpt_oss" in tuple(model_types(config))
