"""Tells files apart of families that llama.cpp's converter gives one name.

Each function gets the metadata without the architecture's name in its keys, and the names of the
tensors, also with `*` for the number of a layer.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final, TypeAlias

from nf4conv.sources.gguf.incoming import Texts

_Sizes: TypeAlias = Mapping[str, Any]
_Names: TypeAlias = Collection[str]

_SPACE: Final = "▁"
"""What SentencePiece writes for a space, and llama.cpp before each word of BERT."""

_FEW: Final = 0.01
"""Share of words that may begin with it twice in a vocabulary without SentencePiece."""


def has_words_of_sentencepiece(sizes: _Sizes, _names: _Names) -> bool:
    """Tells CamemBERT from BERT.

    Words of CamemBERT begin with the sign of a space, and the converter adds a second one. Words of
    BERT have the one that the converter adds (BertModel.set_vocab).
    """
    tokens = sizes.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Texts) or not len(tokens):
        return False
    twice = 2 * _SPACE
    count = 0
    for token in tokens:
        if token.startswith(twice) and token != twice:
            count += 1
    return count > _FEW * len(tokens)


def rotates_beside_states(sizes: _Sizes, names: _Names) -> bool:
    """Tells Bamba from Granite 4, which has either states or rotary embeddings.

    Source: GraniteHybridModel.set_gguf_parameters.
    """
    has_states = "blk.*.ssm_a" in names
    return has_states and bool(sizes.get("rope.scaling.finetuned"))


def has_tokens_of_solar(sizes: _Sizes, _names: _Names) -> bool:
    """Tells Solar Open from GLM-4.5, which always says how many layers have no experts.

    Source: SolarOpenModel, which changes nothing but the tokenizer.
    """
    if sizes.get("tokenizer.ggml.pre") == "solar-open":
        return True
    return "leading_dense_block_count" not in sizes


def has_layers_that_differ(sizes: _Sizes, _names: _Names) -> bool:
    """Tells Puzzle from Nemotron-H: its layers use more or fewer experts (NemotronHPuzzleModel)."""
    used_experts = sizes.get("expert_used_count")
    return isinstance(used_experts, list)


def lacks_biases(_sizes: _Sizes, names: _Names) -> bool:
    """Tells KORMo from Qwen2, whose queries always have biases."""
    has_queries = "blk.*.attn_q.weight" in names
    has_biases = "blk.*.attn_q.bias" in names
    return has_queries and not has_biases
