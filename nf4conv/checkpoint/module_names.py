"""Names on disk → names in memory. Loaders rename modules; llm_int8_skip_modules must use the names they end up with.

Multimodal checkpoints keep the names they were first saved with, in two styles, and loaders build a third:

    on disk                          transformers 4.52+ and 5            vLLM
    language_model.model.layers.0    model.language_model.layers.0       language_model.model.layers.0
    model.layers.0                   model.language_model.layers.0       language_model.model.layers.0
    vision_tower.…, visual.…         model.vision_tower.…                vision_tower.…, visual.…
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from nf4conv.checkpoint.families import Family

TEXT_CONFIGS: Final = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config")
_LANGUAGE: Final = re.compile(r"^(?:language_model\.model|model\.language_model|language_model|model)\.(.+)")
_DUAL_ENCODER: Final = re.compile(r"clip|siglip|clap|align|owl|groupvit|flava|vilt|bridgetower|blip(?!.?2)", re.I)


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether a language model stands beside encoders of other inputs. A dual encoder such as CLIP has no such core."""
    nested = any(isinstance(config.get(key), Mapping) for key in TEXT_CONFIGS)
    return nested and not _DUAL_ENCODER.search(str(config.get("model_type", "")))


def spellings(path: str, families: Iterable[Family], multimodal: bool) -> tuple[str, ...]:
    """Every path that a loader may know a module by; the path on disk comes first.

    Args:
        path: of a module on disk.
        families: of the model.
        multimodal: whether `is_multimodal(config)`.
    """
    paths = [path]
    for family in families:
        paths += [re.sub(pattern, new, old) for pattern, new in family.renamed for old in paths]
    if multimodal:
        paths += [alias for name in paths for alias in _multimodal_spellings(name)]
    return tuple(dict.fromkeys(paths))


def _multimodal_spellings(path: str) -> tuple[str, ...]:
    bare = re.sub(r"^(model\.|language_model\.(?=lm_head))", "", path)
    inner = _LANGUAGE.match(path)
    if inner is None or not _is_language(inner[1]):
        return (bare, f"model.{bare}")
    return (f"model.language_model.{inner[1]}", f"language_model.model.{inner[1]}", f"model.{inner[1]}")


def _is_language(inner: str) -> bool:
    return re.match(r"(layers|embed_tokens|norm|h|blocks|decoder)(\.|$)", inner) is not None
