"""Tells files apart of families that llama.cpp's converter gives one name.

Each function gets the metadata without the architecture's name in its keys, and the names of the
tensors, also with `*` for the number of a layer.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from nf4conv.sources.gguf.incoming import Texts

_SPACE: Final = "▁"
"""What SentencePiece writes for a space, and llama.cpp before each word of BERT."""

_FEW: Final = 0.01
"""Share of words that may begin with that character in a vocabulary without SentencePiece."""


def has_words_of_sentencepiece(sizes: Mapping[str, Any], _names: Collection[str]) -> bool:
    """Tells CamemBERT from BERT: its words have the sign of a space, and get it once more.

    Source: BertModel.set_vocab.
    """
    tokens = sizes.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Texts) or not len(tokens):
        return False
    twice = sum(token.startswith(2 * _SPACE) and len(token) > 2 for token in tokens)
    return twice > _FEW * len(tokens)


def rotates_beside_states(sizes: Mapping[str, Any], names: Collection[str]) -> bool:
    """Tells Bamba from Granite 4, which has no rotary embeddings where it has states.

    Source: GraniteHybridModel.set_gguf_parameters.
    """
    return "blk.*.ssm_a" in names and bool(sizes.get("rope.scaling.finetuned"))


def has_tokens_of_solar(sizes: Mapping[str, Any], _names: Collection[str]) -> bool:
    """Tells Solar Open from GLM-4.5, which always says how many layers have no experts.

    Source: SolarOpenModel, which changes nothing but the tokenizer.
    """
    return (
        sizes.get("tokenizer.ggml.pre") == "solar-open" or "leading_dense_block_count" not in sizes
    )


def has_layers_that_differ(sizes: Mapping[str, Any], _names: Collection[str]) -> bool:
    """Tells Puzzle from Nemotron-H: its layers use more or fewer experts (NemotronHPuzzleModel)."""
    return isinstance(sizes.get("expert_used_count"), list)


def lacks_biases(_sizes: Mapping[str, Any], names: Collection[str]) -> bool:
    """Tells KORMo from Qwen2, whose queries have biases always."""
    return "blk.*.attn_q.weight" in names and "blk.*.attn_q.bias" not in names
