"""Finds the family of a file."""

from collections.abc import Collection, Mapping
from typing import Any, Final, TypeAlias

from nf4conv.sources.gguf.families import (
    dense,
    early,
    encoders,
    gemma,
    latents,
    later_dense,
    later_mixtures,
    linear_attention,
    mixtures,
    recurrent,
)
from nf4conv.sources.gguf.families.family import GgufFamily

_Table: TypeAlias = Mapping[str, GgufFamily]
_Choices: TypeAlias = Mapping[str, tuple[GgufFamily, ...]]

_QWEN: Final[_Table] = {
    "qwen2vl": dense.QWEN2,  # what sees is in another file, and the rest is the same
    "qwen3": dense.QWEN3,
    "qwen3vl": dense.QWEN3,
    "qwen2moe": mixtures.QWEN2MOE,
    "qwen3moe": mixtures.QWEN3MOE,
    "qwen3vlmoe": mixtures.QWEN3MOE,
    "qwen3next": linear_attention.QWEN3_NEXT,
    "qwen35": linear_attention.QWEN3_5,
    "qwen35moe": linear_attention.QWEN3_5_MOE,
}

_GEMMA: Final[_Table] = {
    "gemma": gemma.GEMMA,
    "gemma2": gemma.GEMMA2,
    "gemma3": gemma.GEMMA3,
    "gemma-embedding": gemma.EMBEDDING_GEMMA,
    "gemma3n": gemma.GEMMA3N,
}

_OF_COMPANIES: Final[_Table] = {
    "phi3": dense.PHI3,
    "granite": dense.GRANITE,
    "command-r": dense.COMMAND_R,
    "cohere2": dense.COHERE2,
    "nemotron": dense.NEMOTRON,
    "exaone4": dense.EXAONE4,
    "jais2": later_dense.JAIS2,
}

_FROM_CHINA: Final[_Table] = {
    "ernie4_5": dense.ERNIE4_5,
    "seed_oss": dense.SEED_OSS,
    "hunyuan-dense": dense.HUNYUAN_DENSE,
    "internlm2": dense.INTERNLM2,
}

_OF_COMMUNITIES: Final[_Table] = {
    "olmo": dense.OLMO,
    "starcoder2": dense.STARCODER2,
    "stablelm": dense.STABLELM,
    "smollm3": dense.SMOLLM3,
    "arcee": dense.ARCEE,
}

_EARLY: Final[_Table] = {
    "gpt2": early.GPT2,
    "gptneox": early.GPTNEOX,
    "bloom": early.BLOOM,
    "phi2": early.PHI2,
    "starcoder": early.STARCODER,
    "mpt": early.MPT,
}

_MIXTURES: Final[_Table] = {
    "olmoe": mixtures.OLMOE,
    "minimax-m2": mixtures.MINIMAX_M2,
    "gpt-oss": mixtures.GPT_OSS,
    "llama4": mixtures.LLAMA4,
    "dots1": mixtures.DOTS1,
    "ernie4_5-moe": mixtures.ERNIE4_5_MOE,
    "phimoe": mixtures.PHIMOE,
}

_LATER_MIXTURES: Final[_Table] = {
    "afmoe": later_mixtures.AFMOE,
    "exaone-moe": later_mixtures.EXAONE_MOE,
    "hunyuan-moe": later_mixtures.HUNYUAN_MOE,
    "hy_v3": later_mixtures.HY_V3,
    "mellum": later_mixtures.MELLUM,
    "cohere2moe": later_mixtures.COHERE2_MOE,
}

_LATENTS: Final[_Table] = {
    "minicpm3": latents.MINICPM3,
    "deepseek32": latents.DEEPSEEK_V32,
    "glm-dsa": latents.GLM_DSA,
}

_RECURRENT: Final[_Table] = {
    "mamba2": recurrent.MAMBA2,
    "jamba": recurrent.JAMBA,
    "lfm2": recurrent.LFM2,
    "lfm2moe": recurrent.LFM2_MOE,
    "nemotron_h": recurrent.NEMOTRON_H,
}

_ENCODERS: Final[_Table] = {
    "modern-bert": encoders.MODERN_BERT,
    "eurobert": encoders.EUROBERT,
    "nomic-bert": encoders.NOMIC_BERT,
}

_LIKE_NAMED_DENSE: Final[_Choices] = {
    "llama": (mixtures.MIXTRAL, dense.LLAMA),
    "olmo2": (dense.OLMO3, dense.OLMO2),
    "falcon": (early.FALCON_40B, early.FALCON),
    "gemma4": (gemma.GEMMA4_MOE, gemma.GEMMA4),
    "qwen2": (later_dense.QWEN2_WITHOUT_BIASES, dense.QWEN2),
    "mistral3": (dense.MINISTRAL3, dense.MISTRAL),
    "chatglm": (later_dense.CHATGLM, later_dense.GLM),
    "glm4": (later_dense.GLM4V_TEXT, dense.GLM4),
}

_LIKE_NAMED_MIXTURES: Final[_Choices] = {
    "glm4moe": (later_mixtures.SOLAR_OPEN, mixtures.GLM4_MOE),
    "granitemoe": (mixtures.GRANITE_MOE_SHARED, mixtures.GRANITE_MOE),
    "granite_swa": (later_mixtures.GRANITE_MOE_SWA, later_dense.GRANITE_SWA),
    "deepseek2": (
        latents.MISTRAL_LARGE_3,
        latents.DEEPSEEK_V3,
        latents.DEEPSEEK_V2,
        latents.YOUTU,
    ),
}

_LIKE_NAMED_RECURRENT: Final[_Choices] = {
    "mamba": (recurrent.FALCON_MAMBA, recurrent.MAMBA),
    "granitehybrid": (recurrent.GRANITE_HYBRID_MOE, recurrent.BAMBA, recurrent.GRANITE_HYBRID),
    "nemotron_h_moe": (recurrent.NEMOTRON_PUZZLE, recurrent.NEMOTRON_H_MOE),
}

_LIKE_NAMED_ENCODERS: Final[_Choices] = {
    "bert": (
        encoders.ROBERTA,
        encoders.XLM_ROBERTA,
        encoders.CAMEMBERT,
        encoders.BERT,
        encoders.DISTIL_BERT,
    ),
    "t5": (encoders.UMT5, encoders.GATED_T5, encoders.T5),
    "t5encoder": (encoders.GATED_T5_ENCODER, encoders.T5_ENCODER),
}

_SINGLE: Final[_Table] = {
    **_QWEN,
    **_GEMMA,
    **_OF_COMPANIES,
    **_FROM_CHINA,
    **_OF_COMMUNITIES,
    **_EARLY,
    **_MIXTURES,
    **_LATER_MIXTURES,
    **_LATENTS,
    **_RECURRENT,
    **_ENCODERS,
}

FAMILIES: Final[_Choices] = {
    **{architecture: (family,) for architecture, family in _SINGLE.items()},
    **_LIKE_NAMED_DENSE,
    **_LIKE_NAMED_MIXTURES,
    **_LIKE_NAMED_RECURRENT,
    **_LIKE_NAMED_ENCODERS,
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
        names: the names of the tensors, also with `*` for the number of a layer.
    """
    families = FAMILIES.get(architecture, ())
    for family in families:
        if family.is_meant(sizes, names):
            return family
    return None
