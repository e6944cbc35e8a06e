"""Finds the family of a file."""

from collections.abc import Collection, Mapping
from typing import Any, Final, TypeAlias

from nf4conv.sources.gguf.families import (
    dense,
    early,
    encoders,
    linear_attention,
    mixtures,
    recurrent,
)
from nf4conv.sources.gguf.families.family import GgufFamily

_Table: TypeAlias = Mapping[str, tuple[GgufFamily, ...]]

_DENSE: Final[_Table] = {
    "mistral3": (dense.MISTRAL3,),
    "qwen2": (dense.QWEN2,),
    "qwen2vl": (dense.QWEN2,),  # what sees is in another file, and the rest is the same
    "qwen3": (dense.QWEN3,),
    "qwen3vl": (dense.QWEN3,),
    "gemma": (dense.GEMMA,),
    "gemma2": (dense.GEMMA2,),
    "gemma3": (dense.GEMMA3,),
    "phi3": (dense.PHI3,),
    "granite": (dense.GRANITE,),
    "command-r": (dense.COMMAND_R,),
    "cohere2": (dense.COHERE2,),
    "olmo": (dense.OLMO,),
    "olmo2": (dense.OLMO3, dense.OLMO2),
}

_LATER_DENSE: Final[_Table] = {
    "starcoder2": (dense.STARCODER2,),
    "stablelm": (dense.STABLELM,),
    "nemotron": (dense.NEMOTRON,),
    "smollm3": (dense.SMOLLM3,),
    "ernie4_5": (dense.ERNIE4_5,),
    "exaone4": (dense.EXAONE4,),
    "glm4": (dense.GLM4,),
    "seed_oss": (dense.SEED_OSS,),
    "arcee": (dense.ARCEE,),
    "hunyuan-dense": (dense.HUNYUAN_DENSE,),
    "internlm2": (dense.INTERNLM2,),
    "gemma-embedding": (dense.EMBEDDING_GEMMA,),
    "gemma3n": (dense.GEMMA3N,),
    "gemma4": (dense.GEMMA4,),
}

_EARLY: Final[_Table] = {
    "gpt2": (early.GPT2,),
    "gptneox": (early.GPTNEOX,),
    "bloom": (early.BLOOM,),
    "falcon": (early.FALCON_40B, early.FALCON),
    "phi2": (early.PHI2,),
    "starcoder": (early.STARCODER,),
    "mpt": (early.MPT,),
}

_MIXTURES: Final[_Table] = {
    "llama": (mixtures.MIXTRAL, dense.LLAMA),
    "qwen2moe": (mixtures.QWEN2MOE,),
    "qwen3moe": (mixtures.QWEN3MOE,),
    "olmoe": (mixtures.OLMOE,),
    "minimax-m2": (mixtures.MINIMAX_M2,),
    "gpt-oss": (mixtures.GPT_OSS,),
    "llama4": (mixtures.LLAMA4,),
    "deepseek2": (mixtures.DEEPSEEK_V3, mixtures.DEEPSEEK_V2),
    "glm4moe": (mixtures.GLM4_MOE,),
    "dots1": (mixtures.DOTS1,),
    "ernie4_5-moe": (mixtures.ERNIE4_5_MOE,),
    "granitemoe": (mixtures.GRANITE_MOE_SHARED, mixtures.GRANITE_MOE),
    "phimoe": (mixtures.PHIMOE,),
}

_RECURRENT: Final[_Table] = {
    "mamba": (recurrent.FALCON_MAMBA, recurrent.MAMBA),
    "granitehybrid": (recurrent.GRANITE_HYBRID_MOE, recurrent.GRANITE_HYBRID),
    "mamba2": (recurrent.MAMBA2,),
    "jamba": (recurrent.JAMBA,),
    "lfm2": (recurrent.LFM2,),
    "lfm2moe": (recurrent.LFM2_MOE,),
    "qwen3next": (linear_attention.QWEN3_NEXT,),
    "qwen35": (linear_attention.QWEN3_5,),
    "qwen35moe": (linear_attention.QWEN3_5_MOE,),
}

_ENCODERS: Final[_Table] = {
    "modern-bert": (encoders.MODERN_BERT,),
    "bert": (encoders.BERT,),
    "t5": (encoders.UMT5, encoders.GATED_T5, encoders.T5),
    "t5encoder": (encoders.GATED_T5_ENCODER, encoders.T5_ENCODER),
}

FAMILIES: Final[_Table] = {
    **_DENSE,
    **_LATER_DENSE,
    **_EARLY,
    **_MIXTURES,
    **_RECURRENT,
    **_ENCODERS,
}
"""The families by the architecture that `general.architecture` names.

Where there are several, the first whose marker the file has is meant, or the last.
"""


def family_of(
    architecture: str, sizes: Mapping[str, Any], names: Collection[str]
) -> GgufFamily | None:
    """Returns the family of a file; None if its architecture is not listed.

    Args:
        architecture: what `general.architecture` says.
        sizes: the metadata without the architecture's name in its keys.
        names: those of the tensors, also with `*` for the number of a layer.
    """
    families = FAMILIES.get(architecture, ())
    for family in families:
        if not family.marker or family.marker in names or sizes.get(family.marker):
            return family
    return None
