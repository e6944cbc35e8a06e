"""Maps names on disk to the names that loaders use.

Loaders rename modules, and llm_int8_skip_modules must use the names they end up with. Multimodal
checkpoints keep the names they were first saved with, in two styles, and loaders build a third:

    on disk                        transformers 4.52+ and 5         vLLM
    language_model.model.layers.0  model.language_model.layers.0    language_model.model.layers.0
    model.layers.0                 model.language_model.layers.0    language_model.model.layers.0
    vision_tower.…, visual.…       model.vision_tower.…             vision_tower.…, visual.…

A model without its head, as AutoModel loads it, has no "model." in front; both this module and
skip_list.complete_for_base allow for that.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from nf4conv.models.families import families_of
from nf4conv.models.family_table import Family

HEADS: Final = ("lm_head", "classifier", "score", "qa_outputs")
"""The most common names of heads."""

ADDED: Final = (*HEADS, "classification_head", "pooler")
"""Modules that a loader may add to a checkpoint that has none of them. They must not be 4-bit."""

TEXT_CONFIGS: Final = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "language_model_config",
)
"""Keys of config.json below which a multimodal model describes its language model."""

OTHER_CONFIGS: Final = (
    "vision_config",
    "vit_config",
    "visual",
    "img_processor",
    "audio_config",
    "speech_config",
)
"""Keys of config.json below which a multimodal model describes its other parts."""

_TOWERS: Final = ("vision_tower", "visual", "vision_model", "audio_tower", "multi_modal_projector")
TOWERS: Final = (*_TOWERS, *(f"model.{name}" for name in _TOWERS))
"""What most multimodal models call the parts that are not packed."""

TIED_HEADS: Final = ("lm_head", "proj_out", "output_projection", "embed_out")
"""Heads that are an `nn.Linear` in memory even where they are tied to the embedding, so that no
tensor of their own is stored.
"""

# a path inside the language model, in any of the styles above; group 1 is what follows the style
_LANGUAGE_MODEL: Final = re.compile(
    r"^(?:language_model\.model|model\.language_model|language_model|model)\."
    r"((?:layers|norm|h|blocks|decoder)(?:\.|$).*)"
)
# other modules may have "model." in front, and a head inside the language model "language_model."
_OUTER_PREFIX: Final = re.compile(r"^(model\.|language_model\.(?=lm_head))")

# model types of dual encoders: they embed text and another input side by side
_DUAL_ENCODER: Final = re.compile(
    r"clip|siglip|clap|owl|groupvit|flava|vilt|bridgetower|aimv2|tipsv2|videoprism|grounding"
    r"|dual-encoder|^(align|blip|git)$"
)


def module_of(tensor: str) -> str:
    """Returns the path of the module whose weight a tensor is, by the tensor's name.

    The name of a tensor that is no `*.weight` is given back as it is.
    """
    return tensor.removesuffix(".weight")


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Returns True if a language model stands beside encoders of other inputs.

    A dual encoder such as CLIP has no language model at its core and is not meant.
    """
    has_text = any(isinstance(config.get(key), Mapping) for key in TEXT_CONFIGS)
    has_other = any(isinstance(config.get(key), Mapping) for key in OTHER_CONFIGS)
    # older configs describe the language model at the top and only the other parts below
    is_core = has_text or (has_other and "vocab_size" in config)
    return is_core and not _DUAL_ENCODER.search(str(config.get("model_type", "")))


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Knows how loaders rename the modules of one model.

    Attributes:
        families: the listed deviations that apply to the model.
        multimodal: the answer of `is_multimodal` for its config.
    """

    families: tuple[Family, ...]
    multimodal: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ModuleNames":
        """Returns the names of the model that a config.json describes."""
        return cls(families_of(config), is_multimodal(config))

    @property
    def absent(self) -> tuple[str, ...]:
        """The modules that a loader may build without finding them on disk under their name."""
        absent = list(ADDED)
        for family in self.families:
            absent += family.heads
        if self.multimodal:
            absent += TOWERS
        return tuple(absent)

    def spellings(self, path: str) -> tuple[str, ...]:
        """Returns every path by which a loader may know a module; the path on disk comes first."""
        if not (self.families or self.multimodal):
            return (path,)
        # a dict, because it keeps the order and drops duplicates
        paths = {path: None}
        for family in self.families:
            for known in tuple(paths):
                for pattern, replacement in family.renamed:
                    paths[re.sub(pattern, replacement, known)] = None
        if self.multimodal:
            for known in tuple(paths):
                paths.update(dict.fromkeys(_multimodal_spellings(known)))
        return tuple(paths)


def _multimodal_spellings(path: str) -> tuple[str, ...]:
    """Returns the styles in which multimodal models spell a path."""
    inner = _LANGUAGE_MODEL.match(path)
    if inner is None:
        bare = _OUTER_PREFIX.sub("", path)
        return (bare, f"model.{bare}")
    rest = inner[1]
    forms = [
        f"model.language_model.{rest}",
        f"language_model.model.{rest}",
        f"model.{rest}",
        f"language_model.{rest}",
    ]
    if rest.startswith("decoder."):
        forms.append(rest)
    return tuple(forms)
