"""Lists the submodels of diffusers that deviate from the rules of choose/selection.py, by class.

The config of a submodel names its class in "_class_name". Patterns are regular expressions,
searched in the path of a module on disk, which is a tensor's name without ".weight".
tests/diffusers converts and loads tiny models of these classes.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from nf4conv.models.family import Family, KeptModules, Renaming

# Reasons that users read.

DIFFUSERS_FLOAT32: Final = "diffusers keeps this in float32"
OLD_ATTENTION: Final = "diffusers renames this weight of an old checkpoint when it loads it"


def _kept_in_float32(names: str) -> Family:
    """Returns the family of a class that lists `names` as its _keep_in_fp32_modules.

    diffusers skips linear layers below a module of such a name when it quantizes.
    """
    return Family(
        keep=(KeptModules(rf"({names})(\.|$)", DIFFUSERS_FLOAT32),),
        float32=rf"(^|\.)({names})(\.|$)",
    )


ANY_SUBMODEL: Final = Family(
    only_blocks=True,
    linear=r"\.experts\.\d+\.",  # one nn.Linear each, as in HiDream
)
JOY_IMAGE: Final = _kept_in_float32("time_embedder|norm1|norm2|norm_out")
KANDINSKY: Final = _kept_in_float32(r"time_embeddings|pooled_bias|\w*modulation")
WAN: Final = _kept_in_float32("rope|time_embedder|scale_shift_table|norm1|norm2|norm3")

CLASSES: Final[Mapping[str, Family]] = {
    # Every submodel of a diffusers pipeline has this key in its config, with its class as value.
    "_class_name": ANY_SUBMODEL,
    # Classes of diffusers.
    "AnyFlowTransformer3DModel": WAN,
    "AnyFlowFARTransformer3DModel": WAN,
    "ChronoEditTransformer3DModel": WAN,
    "SkyReelsV2Transformer3DModel": WAN,
    "WanTransformer3DModel": WAN,
    "WanVACETransformer3DModel": WAN,
    "Cosmos3OmniTransformer": _kept_in_float32("time_embedder"),
    "Flux3Transformer2DModel": _kept_in_float32("norm_q|norm_k"),
    "HeliosTransformer3DModel": _kept_in_float32(
        "time_embedder|scale_shift_table|norm1|norm2|norm3|history_key_scale"
    ),
    "JoyImageEditTransformer3DModel": JOY_IMAGE,
    "JoyImageEditPlusTransformer3DModel": JOY_IMAGE,
    "Kandinsky5Transformer3DModel": KANDINSKY,
    "Kandinsky6Transformer3DModel": KANDINSKY,
    "Kandinsky6SRTransformer3DModel": KANDINSKY,
    "Krea2Transformer2DModel": replace(
        _kept_in_float32("norm|norm1|norm2|norm_q|norm_k"),
        linear=r"\.ff\.gate$",  # of a gated feed-forward network: no router
    ),
    "MiniMaxH3Transformer3DModel": _kept_in_float32(
        "proj_in|audio_proj_in|time_embedder|proj_out|audio_proj_out|rope"
    ),
    "RFD4ProteinaTransformer": _kept_in_float32("cond_factory|norm|ln_out"),
    "UNet2DModel": Family(
        keep=(KeptModules(r"\.(query|key|value|proj_attn)$", OLD_ATTENTION),),
        renamed=(
            Renaming(r"\.query$", ".to_q"),
            Renaming(r"\.key$", ".to_k"),
            Renaming(r"\.value$", ".to_v"),
            Renaming(r"\.proj_attn$", ".to_out.0"),
        ),
    ),
    "WanAnimateTransformer3DModel": _kept_in_float32(
        "rope|time_embedder|scale_shift_table|norm1|norm2|norm3|motion_synthesis_weight"
    ),
    "WanAnimate2Transformer3DModel": _kept_in_float32(
        "time_embedding|time_projection|scale_shift_table|norm1|norm2|norm3|modulation"
    ),
}
