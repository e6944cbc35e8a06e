"""Lists how model families store the experts of a layer in one tensor, and how to take them apart.

A packed checkpoint has a weight for each expert and projection, [out, in], under the names of most
mixtures: `….experts.3.gate_proj.weight`. Where a family stacks its experts on disk, this table says
which tensors are stacks, which projections each holds, and how they lie in it. It was read off
transformers 5.23 (models and conversion_mapping.py), and tests/choose/test_experts_writing.py
compares it with models that transformers builds.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from nf4conv.models.config import levels
from nf4conv.models.families import model_types

GATE_UP: Final = ("gate_proj", "up_proj")
DOWN: Final = ("down_proj",)


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Describes one kind of tensor that holds the same projections of all experts of a layer.

    Attributes:
        pattern: matches the whole name of such a tensor.
        experts: the path below which single experts are numbered, as the replacement of `re.sub`.
        projections: the projections in the tensor, in order; two of them are fused.
        is_transposed: True if each matrix is stored as [in, out].
        is_interleaved: True if the outputs of fused projections alternate; False if those of the
            first precede those of the second.
        is_flat: True if the experts follow each other along the rows of a matrix, [experts · rows,
            columns]; False for a tensor of three dimensions.
    """

    pattern: str
    experts: str
    projections: tuple[str, ...]
    is_transposed: bool = False
    is_interleaved: bool = False
    is_flat: bool = False

    @property
    def is_last(self) -> bool:
        """Returns True if the projections lead back to the width of the model."""
        return self.projections[0] in ("down_proj", "output_linear")


class ExpertLayout(NamedTuple):
    """Describes how a family stacks its experts.

    Attributes:
        stacks: the kinds of tensors.
        fits_either_way: True if files of both orientations exist, and shapes tell which one it is.
        has_loader: True if transformers 5 can load the experts in 4 bits when they are taken apart.
    """

    stacks: tuple[ExpertStack, ...]
    fits_either_way: bool = False
    has_loader: bool = True


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


def _layout(
    gate_up: str,
    down: str,
    experts: str = r"\1",
    *,
    is_transposed: bool = False,
    is_interleaved: bool = False,
    fits_either_way: bool = False,
    has_loader: bool = True,
) -> ExpertLayout:
    """Returns the layout of a family with a fused tensor and another for what follows."""
    stacks = (
        ExpertStack(gate_up, experts, GATE_UP, is_transposed, is_interleaved),
        ExpertStack(down, experts, DOWN, is_transposed),
    )
    return ExpertLayout(stacks, fits_either_way, has_loader)


_GATE_UP_NAME: Final = r"^(.*(?:^|\.)experts)\.gate_up_proj$"
_DOWN_NAME: Final = r"^(.*(?:^|\.)experts)\.down_proj$"

STANDARD: Final = _layout(_GATE_UP_NAME, _DOWN_NAME)
"""The layout of most models in transformers 5: [experts, out, in], gate before up."""

TRANSPOSED: Final = _layout(_GATE_UP_NAME, _DOWN_NAME, is_transposed=True)
GPT_OSS: Final = _layout(_GATE_UP_NAME, _DOWN_NAME, is_transposed=True, is_interleaved=True)
# repositories have [in, out], and what transformers 5 saves may have [out, in]
QWEN3_VL: Final = _layout(_GATE_UP_NAME, _DOWN_NAME, is_transposed=True, fits_either_way=True)
GRANITE: Final = _layout(
    r"^(.*\.block_sparse_moe)\.input_linear\.weight$",
    r"^(.*\.block_sparse_moe)\.output_linear\.weight$",
    r"\1.experts",
)
ARIA: Final = _layout(
    r"^(.*\.experts)\.fc1\.weight$", r"^(.*\.experts)\.fc2\.weight$", is_transposed=True
)
INKLING: Final = ExpertLayout(
    (
        ExpertStack(r"^(.*\.experts)\.w13_weight$", r"\1", GATE_UP, is_interleaved=True),
        ExpertStack(r"^(.*\.experts)\.w2_weight$", r"\1", DOWN),
    )
)
"""Models that transformers saves without towers have the standard names instead."""

STEP: Final = ExpertLayout(
    (
        ExpertStack(r"^(.*)\.moe\.gate_proj\.weight$", r"\1.mlp.experts", ("gate_proj",)),
        ExpertStack(r"^(.*)\.moe\.up_proj\.weight$", r"\1.mlp.experts", ("up_proj",)),
        ExpertStack(r"^(.*)\.moe\.down_proj\.weight$", r"\1.mlp.experts", DOWN),
    )
)
DBRX: Final = ExpertLayout(
    (
        ExpertStack(r"^(.*\.experts)\.mlp\.w1$", r"\1", ("gate_proj",), is_flat=True),
        ExpertStack(r"^(.*\.experts)\.mlp\.v1$", r"\1", ("up_proj",), is_flat=True),
        ExpertStack(r"^(.*\.experts)\.mlp\.w2$", r"\1", DOWN, is_transposed=True, is_flat=True),
    ),
    has_loader=False,
)
JETMOE: Final = ExpertLayout(
    (
        ExpertStack(r"^(.*\.mlp)\.input_linear\.weight$", r"\1.experts", GATE_UP),
        ExpertStack(r"^(.*\.mlp)\.output_linear\.weight$", r"\1.experts", DOWN),
        # the experts of its attention
        ExpertStack(
            r"^(.*\.self_attention\.experts)\.input_linear\.weight$", r"\1", ("input_linear",)
        ),
        ExpertStack(
            r"^(.*\.self_attention\.experts)\.output_linear\.weight$", r"\1", ("output_linear",)
        ),
    ),
    has_loader=False,
)

_STANDARD_TYPES: Final = (
    "afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_ocr2_text",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1",
    "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint",
    "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm5_next_text", "glm_moe_dsa",
    "hunyuan_v1_moe", "hy_v3", "jamba", "kimi_linear", "kolibri1",
    "laguna", "lfm2_moe", "mellum", "mimo_v2_flash", "minimax", "minimax_m2",
    "minimax_m3_vl_text", "mistral_large4_text", "mixtral",
    "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
    "qwen3_omni_moe_text", "qwen3_omni_moe_talker_text", "qwen4_exp_text", "solar_open",
    "unlimited_ocr_text",
)  # fmt: skip
"""Model types whose experts transformers 5 computes with `use_experts_implementation` as it is by
default, and which are stored expert by expert: only other tools stack them.
"""

_STACKED_TYPES: Final = (
    "diffusion_gemma_text", "gemma4_text", "granitemoe_swa", "hy_v4", "mistral4",
    "muse_spark_text", "zaya",
)  # fmt: skip
"""Model types of the same layout whose authors store the experts as stacks."""

_TRANSPOSED_TYPES: Final = ("openai_privacy_filter", "llama4", "llama4_text")
_QWEN_VL_TYPES: Final = ("qwen3_vl_moe", "qwen3_vl_moe_text")
_GRANITE_TYPES: Final = ("granitemoe", "granitemoehybrid", "granitemoeshared")
_INKLING_TYPES: Final = ("inkling_mm_model", "inkling_text", "inkling2", "inkling2_text")

LAYOUTS: Final[Mapping[str, tuple[ExpertLayout, ...]]] = {
    **dict.fromkeys((*_STANDARD_TYPES, *_STACKED_TYPES), (STANDARD,)),
    **dict.fromkeys(_TRANSPOSED_TYPES, (TRANSPOSED,)),
    **dict.fromkeys(_QWEN_VL_TYPES, (QWEN3_VL,)),
    **dict.fromkeys(_GRANITE_TYPES, (GRANITE, STANDARD)),
    **dict.fromkeys(_INKLING_TYPES, (INKLING, STANDARD)),
    **dict.fromkeys(("aria", "aria_text"), (ARIA, TRANSPOSED)),
    **dict.fromkeys(("step3p5", "step3p7"), (STEP,)),
    "gpt_oss": (GPT_OSS,),
    "dbrx": (DBRX,),
    "jetmoe": (JETMOE,),
}
"""The layouts of each model type. The first that matches a tensor's name counts."""


UNEVEN: Final = ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text", "longcat_flash")
"""Model types whose layers have experts of several kinds, or fewer than their routers know."""

_NUMBERS: Final = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_moe_experts",
)
"""Keys of config.json for the number of experts in a layer."""

_BY_LAYER: Final = re.compile(r"num_\w*expert|num_routed|block_configs")
"""Found in keys that may hold a list with such a number for each layer."""


def layouts_of(config: Mapping[str, Any]) -> tuple[ExpertLayout, ...]:
    """Returns the layouts of a model and of its parts, each once, the outermost first."""
    found: dict[ExpertLayout, None] = {}
    for model_type in model_types(config):
        found.update(dict.fromkeys(LAYOUTS.get(model_type, ())))
    return tuple(found)


def are_stacked(config: Mapping[str, Any]) -> bool:
    """Returns True if a model's authors store its experts as stacks.

    Loaders then know no names of single experts.
    """
    for model_type in model_types(config):
        if model_type not in _STANDARD_TYPES and model_type in LAYOUTS:
            return True
    return False


def find_stack(name: str, layouts: tuple[ExpertLayout, ...]) -> FoundStack | None:
    """Returns how experts are stacked in a tensor; None if its name is not that of a stack.

    Args:
        name: the name of the tensor. Of MXFP4 and FP8, the name without "_blocks" or "_scale_inv".
        layouts: the layouts of the model.
    """
    for layout in layouts:
        for stack in layout.stacks:
            match = re.match(stack.pattern, name)
            if match is not None:
                return FoundStack(stack, match.expand(stack.experts), layout)
    return None


def partner_names(name: str, found: FoundStack) -> Iterator[str]:
    """Yields the names of the stacks that a layer has beside one.

    Args:
        name: the name of a stack.
        found: what `find_stack` returned for it.
    """
    end = name_after_group(found.stack)
    for other in found.layout.stacks:
        if other is not found.stack and other.experts == found.stack.experts:
            yield name.removesuffix(end) + name_after_group(other)


def name_after_group(stack: ExpertStack) -> str:
    """Returns the end of a stack's name: what its pattern has after the group.

    The ends of the patterns are names as they stand, with escaped dots.
    """
    return stack.pattern.rpartition(")")[2].removesuffix("$").replace("\\", "")


def experts_in(config: Mapping[str, Any]) -> frozenset[int]:
    """Returns the numbers of experts in a layer that a config names, most often a single one.

    Returns:
        The numbers; none if the config does not say, or if layers differ.
    """
    numbers = set()
    for _, level in levels(config):
        for key, value in level.items():
            if isinstance(value, list) and _BY_LAYER.search(key):
                return frozenset()
            if key in _NUMBERS and type(value) is int and value > 0:
                numbers.add(value)
    return frozenset(numbers)
