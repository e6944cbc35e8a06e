"""What a model family does differently from the general rule of selection.py. Keys are config.json's model_type.

A family is listed only when names and shapes cannot tell. Patterns are regular expressions, searched in the path of a
module on disk (a tensor's name without ".weight").
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Family:
    """Deviations of one family.

    Attributes:
        transposed: modules that store [in, out] (transformers' Conv1D) and are packed as [out, in].
        linear: modules that are `nn.Linear` although their names speak against it.
        keep: (pattern, reason) of modules that must not be packed.
        renamed: (pattern, replacement): names on disk → names in memory, where loaders rename.
    """

    transposed: str = ""
    linear: str = ""
    keep: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()


FP32_WO: Final = Family(keep=((r"(^|\.)wo$", "transformers never quantizes wo of this family"),))
GPT2: Final = Family(transposed=r"(^|\.)h\.\d+\.(attn|crossattention|mlp)\.(c_attn|q_attn|c_proj|c_fc)$")
SUBCLASS: Final = "an nn.Linear subclass, which transformers 5 leaves alone"
CONVERTED: Final = "transformers 5 splits or merges this weight when loading"

FAMILIES: Final[Mapping[str, Family]] = {
    "gpt2": GPT2,
    "openai-gpt": GPT2,
    "imagegpt": GPT2,
    "decision_transformer": GPT2,
    "t5": FP32_WO,
    "mt5": FP32_WO,
    "umt5": FP32_WO,
    "udop": FP32_WO,
    "pop2piano": FP32_WO,
    "falcon": Family(keep=((r"(self_attention|mlp)\.", SUBCLASS),)),
    "RefinedWeb": Family(keep=((r"(self_attention|mlp)\.", SUBCLASS),)),
    "RefinedWebModel": Family(keep=((r"(self_attention|mlp)\.", SUBCLASS),)),
    "mixtral": Family(renamed=((r"\.block_sparse_moe\.", ".mlp."),)),
    "gpt_neox": Family(renamed=((r"^embed_out$", "lm_head"),)),
}


def families_of(config: Mapping[str, Any]) -> tuple[Family, ...]:
    """The families of a model and of its parts, as far as they are listed."""
    return tuple(FAMILIES[name] for name in dict.fromkeys(model_types(config)) if name in FAMILIES)


def model_types(config: Mapping[str, Any]) -> Iterator[str]:
    """model_type at every level of a config, the outermost first."""
    if isinstance(config.get("model_type"), str):
        yield config["model_type"]
    for value in config.values():
        if isinstance(value, Mapping):
            yield from model_types(value)
