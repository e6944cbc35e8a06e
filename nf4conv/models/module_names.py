"""Names on disk → names in memory. Loaders rename modules; llm_int8_skip_modules must use the names
they end up with.

Multimodal checkpoints keep the names they were first saved with, in two styles, and loaders build a
third:

    on disk                          transformers 4.52+ and 5            vLLM
    language_model.model.layers.0    model.language_model.layers.0       language_model.model.layers.0
    model.layers.0                   model.language_model.layers.0       language_model.model.layers.0
    vision_tower.…, visual.…         model.vision_tower.…                vision_tower.…, visual.…

A model without its head, as AutoModel loads it, has no "model." in front (here, and
skip_list.complete_for_base).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from nf4conv.models.families import Family, families_of

_EMBEDDING: Final = re.compile(
    r"^(embed|embeddings?|embed_(?!out|.*proj).*|.*_(emb|embed|embeds|embedding|embeddings)|emb|embeds|wte|wpe|shared|embedding_table|codebook|tokens_embed|positions_embed|positions|pos_embed.*|relative_attention_bias|.*position_bias.*)$"
)

HEADS: Final = ("lm_head", "classifier", "score", "qa_outputs")  # the most common names of heads

ADDED: Final = (*HEADS, "classification_head", "pooler")
"""What a loader may add to a checkpoint that has none of it, which has to stay out of the 4-bit
modules.
"""

TEXT_CONFIGS: Final = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "language_model_config",
)
OTHER_CONFIGS: Final = (
    "vision_config",
    "vit_config",
    "visual",
    "img_processor",
    "audio_config",
    "speech_config",
)

_TOWERS: Final = ("vision_tower", "visual", "vision_model", "audio_tower", "multi_modal_projector")
TOWERS: Final = (*_TOWERS, *(f"model.{tower}" for tower in _TOWERS))
"""What most multimodal models call the parts that are not packed."""

TIED_HEADS: Final = ("lm_head", "proj_out", "output_projection", "embed_out")
"""Heads that are an `nn.Linear` in memory also where they are the embedding, and no tensor of their
own is stored.
"""

_LANGUAGE: Final = re.compile(
    r"^(?:language_model\.model|model\.language_model|language_model|model)\.((?:layers|norm|h|blocks|decoder)(?:\.|$).*)"
)
_DUAL_ENCODER: Final = re.compile(
    r"clip|siglip|clap|owl|groupvit|flava|vilt|bridgetower|aimv2|tipsv2|videoprism|grounding|dual-encoder|^(align|blip|git)$"
)


def module_of(tensor: str) -> str:
    """The path of the module whose weight a tensor is, by its name; other tensors stand for
    themselves.
    """
    return tensor.removesuffix(".weight")


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether a language model stands beside encoders of other inputs. A dual encoder such as CLIP
    has no such core.
    """
    has_text = any(isinstance(config.get(key), Mapping) for key in TEXT_CONFIGS)
    has_other = any(isinstance(config.get(key), Mapping) for key in OTHER_CONFIGS)
    # older configs describe the language model at the top and only the other parts below
    is_core = has_text or (has_other and "vocab_size" in config)
    return is_core and not _DUAL_ENCODER.search(str(config.get("model_type", "")))


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """How loaders rename the modules of one model."""

    families: tuple[Family, ...]  # listed deviations that apply
    multimodal: bool  # whether `is_multimodal(config)`
    in_memory: Mapping[str, str] = field(
        default_factory=dict
    )  # paths that are known for certain, by path on disk

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ModuleNames":
        return cls(families_of(config), is_multimodal(config))

    @property
    def absent(self) -> tuple[str, ...]:
        """Modules that a loader may build although the checkpoint holds nothing for them, or under
        other names.
        """
        tied = tuple(head for family in self.families for head in family.heads)
        return ADDED + tied + (TOWERS if self.multimodal else ())

    def spellings(self, path: str) -> tuple[str, ...]:
        """Every path that a loader may know a module by; the path on disk comes first."""
        if not (self.families or self.multimodal or self.in_memory):
            return (path,)
        paths = [path] + ([self.in_memory[path]] if path in self.in_memory else [])
        for family in self.families:
            renamed = [
                re.sub(pattern, new, old) for old in paths for pattern, new in family.renamed
            ]
            paths += [name for name in renamed if name not in paths]
        if self.multimodal:
            paths += [alias for name in paths for alias in _multimodal_spellings(name)]
        return tuple(dict.fromkeys(paths))


def _multimodal_spellings(path: str) -> tuple[str, ...]:
    inner = _LANGUAGE.match(path)
    if inner is not None:
        forms = "model.language_model.", "language_model.model.", "model.", "language_model."
        return tuple(
            f"{form}{inner[1]}"
            for form in (*forms, *([""] if inner[1].startswith("decoder.") else []))
        )
    bare = re.sub(r"^(model\.|language_model\.(?=lm_head))", "", path)
    return (bare, f"model.{bare}")


@lru_cache(maxsize=1024)
def is_embedding(leaf: str) -> bool:
    """Whether a module is an embedding, by the last part of its path."""
    return _EMBEDDING.match(leaf) is not None
