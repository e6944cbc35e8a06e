"""Finds the kind of a tower, by its projector."""

from collections.abc import Mapping
from typing import Any, Final

from nf4conv.sources.gguf.towers import encoders, hearing, qwen
from nf4conv.sources.gguf.towers.tower import Tower

TOWERS: Final[Mapping[str, Tower]] = {
    "qwen2vl_merger": qwen.QWEN2_VL,
    "qwen2.5vl_merger": qwen.QWEN2_5_VL,
    "qwen3vl_merger": qwen.QWEN3_VL,
    "glm4v": qwen.GLM4V,
    "llama4": encoders.LLAMA4,
    "gemma3": encoders.GEMMA3,
    "gemma4v": encoders.GEMMA4,
    "idefics3": encoders.IDEFICS3,
    "pixtral": encoders.PIXTRAL,
    "internvl": encoders.INTERNVL,
    "mlp": encoders.LLAVA,  # of convert_image_encoder_to_gguf.py, in the folder of legacy models
    "qwen2a": hearing.QWEN2_AUDIO,
    "voxtral": hearing.VOXTRAL,
}
"""The towers by the type of projector that the metadata names (VisionProjectorType)."""

ARCHITECTURE: Final = "clip"
"""What `general.architecture` says of every tower."""

SEEING: Final = ("qwen2vl", "qwen3vl", "qwen3vlmoe")
"""Architectures of text models that occur only as parts of models that see."""


def projector_of(metadata: Mapping[str, Any]) -> object:
    """Returns the type of projector that the metadata names; None if it names none."""
    for key in ("clip.vision.projector_type", "clip.audio.projector_type"):
        if key in metadata:
            return metadata[key]
    return metadata.get("clip.projector_type")
