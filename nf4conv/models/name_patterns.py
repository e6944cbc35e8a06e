"""Recognises what a module is by its name: embedding, head, router or tower.

A module's path on disk is a tensor's name without ".weight", and its leaf the last part of it.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final


def _any_of(names: Sequence[str]) -> str:
    return "|".join(names)


_EMBEDDINGS: Final = (
    r"embed",
    r"embeddings?",
    # not embed_out, which is a head, nor embed_in_proj, which is an nn.Linear
    r"embed_(?!out|.*proj).*",
    r".*_(emb|embed|embeds|embedding|embeddings)",
    r"emb",
    r"embeds",
    r"wte",
    r"wpe",
    r"shared",
    r"embedding_table",
    r"codebook",
    r"positions",
    r"pos_embed.*",
    r"relative_attention_bias",
    r".*position_bias.*",
)
EMBEDDING: Final = re.compile(rf"^({_any_of(_EMBEDDINGS)})$")
"""Matches the leaf of an embedding."""

_HEADS: Final = (
    r"lm_head\w*",
    r"embed_out",
    r"output_projection",
    r"\w*predictions",
    r"cls",
    r"score",
    r"scores",
    r"classifier\w*",
    r"qa_outputs",
    r"vocab_\w+",
    r"lm_loss",
    r"pred_layer",
    r"proj_out",
    r"final_proj",
    r"head",
    r"\w*_heads?",
    r"output",
    r"unembed",
    r"logits_proj",
)
HEAD: Final = re.compile(rf"(^|\.)({_any_of(_HEADS)})(\.|$)")
"""Found in the path of an output head, or of a module below one."""

_ROUTERS: Final = (
    r"gate",
    r"router",
    r"wg",
    r"shared_expert_gate",
    r"gate_weight",
    r"router\.\w+",
)
ROUTER: Final = re.compile(rf"(^|\.)({_any_of(_ROUTERS)})$")
"""Found in the path of a module that chooses experts."""

_TOWERS: Final = (
    # encoders of images, video and sound
    r"vision",
    r"visual",
    r"vit",
    r"audio",
    r"image",
    r"video",
    r"speech",
    r"sound",
    r"acoustic",
    r"semantic_tok",
    r"pixel",
    r"sam",
    r"vq",
    r"embed_vision",
    r"embed_audio",
    # what connects them to the language model
    r"merger",
    r"connector",
    r"multi_modal",
    r"multimodal",
    r"mm_",
    r"modality_proj",
    r"\w*projector",
    r"mlp1$",
    r"resampler",
    r"perceiver",
    r"q_?former",
    r"aligner",
    r"abstractor",
    r"patch_",
    # what turns the language model's output into sound or images
    r"codec",
    r"generation_",
    r"talker",
    r"token2wav",
    r"code2wav",
)
TOWER: Final = re.compile(rf"^({_any_of(_TOWERS)})")
"""Matches the beginning of a part of a path, where that part is not the language model."""

_FLOAT32: Final = (
    # biases by which routers choose experts
    r"e_score_correction_bias",
    r"expert_bias",
    r"moe_statics",
    # state-space layers
    r"A_log$",
    r"\.D$",
    r"dt_bias",
    # attention sinks
    r"sinks$",
    r"router.*bias$",
)
FLOAT32: Final = re.compile(_any_of(_FLOAT32))
"""Found in the name of a tensor that models keep in float32."""

NUMBERED: Final = re.compile(r"\.\d+\.")
"""Found in the path of a module that is below something numbered, as everything in a layer is."""

LANGUAGE_LAYER: Final = re.compile(
    r"^(?:model\.|language_model\.model\.|model\.language_model\.)layers\.(\d+)\."
)
"""Matches the path of a module in a layer of the language model; group 1 is its number."""

PREDICTION_LAYER: Final = re.compile(r"(^|\.)(mtp\w*|nextn\w*)\.")
"""Found in the path of a module in a layer that predicts tokens beyond the next one."""

EXPERT: Final = re.compile(r"(^|\.)experts\.\d+\.")
"""Found in the path of a module in a single expert."""


@lru_cache(maxsize=1024)
def is_embedding(leaf: str) -> bool:
    """Returns True if a module is an embedding, by the last part of its path."""
    return EMBEDDING.match(leaf) is not None


def is_in_tower(module: str) -> bool:
    """Returns True if a module belongs to a part for images or sound, by what is above numbers."""
    outside = NUMBERED.split(module)[0]
    return any(TOWER.match(part) for part in outside.split("."))
