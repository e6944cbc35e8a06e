"""Makes what config.json and a model card say of the metadata of a GGUF file."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from nf4conv.format.dtypes import DTYPE_NAMES
from nf4conv.sources.gguf.families import GgufFamily
from nf4conv.sources.gguf.metadata import Texts, positive, shortest
from nf4conv.sources.original_card import OriginalCard
from nf4conv.sources.tensors import TensorInfo

_TOKENS: Final = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}

_YARN: Final = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
}
"""How rotary embeddings are stretched: the key of config.json by that behind "rope.scaling."."""

_FIELDS_OF_CARD: Final = {
    "general.license": "license",
    "general.license.name": "license_name",
    "general.license.link": "license_link",
}
"""Fields of a card's front matter by the keys of the metadata (docs/gguf.md in ggml)."""

_LONGEST: Final = 200  # letters of a field; those that models have are shorter
_MOST_LANGUAGES: Final = 200


def card_of(metadata: Mapping[str, Any]) -> OriginalCard:
    """Returns a card with what the metadata says of licence and languages.

    The metadata's base models are left out: they are those of the model that was converted, which
    need not be what this file was made from.
    """
    fields: dict[str, str | Sequence[str]] = {}
    for key, name in _FIELDS_OF_CARD.items():
        value = metadata.get(key)
        if isinstance(value, str) and 0 < len(value) <= _LONGEST:
            fields[name] = value
    languages = metadata.get("general.languages")
    if isinstance(languages, Texts) and 0 < len(languages) <= _MOST_LANGUAGES:
        fields["language"] = [language[:_LONGEST] for language in languages]
    return OriginalCard(fields)


def config_of(
    sizes: Mapping[str, Any],
    names: Collection[str],
    family: GgufFamily,
    tensors: Sequence[TensorInfo],
    dtype: str,
) -> dict[str, Any]:
    """Returns what config.json would say.

    `sizes` and `names` are those of the file; `tensors`, and the tag of their dtype, are as
    transformers has them.
    """
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": DTYPE_NAMES[dtype],
    }
    for key, name in family.config.items():
        value = sizes.get(key)
        if isinstance(value, float):
            config[name] = shortest(value)
        elif isinstance(value, int) and (value or name != "sliding_window"):
            config[name] = value
    for key, name in _TOKENS.items():
        token = sizes.get(key)
        if isinstance(token, int):
            config[name] = token
    config.update(family.constants)
    _add_what_tensors_tell(config, family, tensors)
    _add_rotary_share(config, sizes)
    _add_rotary_scaling(config, sizes)
    _leave_out_next_tokens(config, sizes)
    for key, tensor in family.shown.items():
        config[key] = tensor in names
    for complete in family.complete:
        complete(sizes, names, config)
    return config


def _add_what_tensors_tell(
    config: dict[str, Any], family: GgufFamily, tensors: Sequence[TensorInfo]
) -> None:
    """Adds sizes that only tensors have, and whether the head is tied to the embeddings."""
    by_name = {tensor.name: tensor for tensor in tensors}
    embedding = by_name.get(f"{family.names['token_embd']}.weight")
    if embedding is not None and embedding.shape:
        config["vocab_size"] = embedding.shape[0]
    for key, name in family.rows.items():
        if name in by_name and by_name[name].shape:
            config[key] = by_name[name].shape[0]
    if "output" in family.names:
        config["tie_word_embeddings"] = f"{family.names['output']}.weight" not in by_name


def _leave_out_next_tokens(config: dict[str, Any], sizes: Mapping[str, Any]) -> None:
    """Takes layers that predict the token after the next one out of the number of layers."""
    more = positive(sizes, "nextn_predict_layers")
    layers = positive(config, "num_hidden_layers")
    if more is not None and layers is not None and more < layers:
        config["num_hidden_layers"] = layers - more
        config["num_nextn_predict_layers"] = more


def _add_rotary_share(config: dict[str, Any], sizes: Mapping[str, Any]) -> None:
    """Adds which share of a head is rotated, where it is not all of it."""
    rotated = positive(sizes, "rope.dimension_count")
    heads = positive(config, "num_attention_heads")
    hidden = positive(config, "hidden_size")
    size = positive(config, "head_dim")
    if size is None and hidden is not None and heads is not None:
        size = hidden // heads
    if rotated is not None and size is not None and rotated < size:
        key = "rotary_pct" if config["model_type"] == "gpt_neox" else "partial_rotary_factor"
        config[key] = rotated / size


def _add_rotary_scaling(config: dict[str, Any], sizes: Mapping[str, Any]) -> None:
    """Adds how rotary embeddings are stretched to longer texts, if linearly or by YaRN."""
    kind = sizes.get("rope.scaling.type")
    if kind not in ("linear", "yarn"):
        return
    scaling: dict[str, Any] = {"rope_type": kind}
    for key, name in _YARN.items():
        value = sizes.get(f"rope.scaling.{key}")
        if isinstance(value, float):
            value = shortest(value)
        if isinstance(value, int | float):
            scaling[name] = value
    if "factor" in scaling:
        config["rope_scaling"] = scaling
