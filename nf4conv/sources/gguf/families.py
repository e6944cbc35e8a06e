"""Finds the family of a file, the model of transformers that an architecture stands for, and makes
what config.json and a model card say of the metadata.

families.toml lists the families.
"""

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

from nf4conv.format.dtypes import DTYPE_NAMES
from nf4conv.sources.gguf import completing, joining
from nf4conv.sources.gguf.header import Texts, positive, shortest
from nf4conv.sources.original_card import OriginalCard
from nf4conv.sources.tensors import TensorInfo

FLAT: Final = "flat"
"""Vectors that the converter gave more dimensions."""

CHANNELS: Final = "channels"
"""Convolutions of single channels: [channels, 1, width], which the converter stored without 1."""

_SPACE: Final = "▁"
"""What SentencePiece writes for a space, and llama.cpp before each word of BERT."""

_FEW: Final = 0.01
"""Share of words that may begin with it twice in a vocabulary without SentencePiece."""

_Sizes: TypeAlias = Mapping[str, Any]
_Names: TypeAlias = Collection[str]


@dataclass(frozen=True)
class Join:
    """A tensor of transformers that the converter took apart."""

    name: str
    put_together: Callable[[joining.Parts, _Sizes], joining.Stack]
    parts: tuple[str, ...]  # the names of the tensors in the file


@dataclass(frozen=True)
class GgufFamily:
    """A model of transformers that an architecture of llama.cpp stands for: a row of the table."""

    model_type: str
    architecture: str
    told_by: str = ""
    is_encoder: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    joined: tuple[Join, ...] = ()
    changed: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)
    complete: tuple[Callable[[_Sizes, _Names, dict[str, Any]], None], ...] = ()
    rows: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    refusal: str = ""  # what follows "GGUF of a … model", if no such file can be read

    def is_meant(self, sizes: _Sizes, names: _Names) -> bool:
        """Returns True if a file is of this family, and not of others with the same name."""
        if self.told_by in _SIGNS:
            return _SIGNS[self.told_by](sizes, names)
        return not self.told_by or self.told_by in names or bool(sizes.get(self.told_by))


def family_of(architecture: str, sizes: _Sizes, names: _Names) -> GgufFamily | None:
    """Returns the family of a file; None if its architecture is not listed.

    `sizes` is the metadata without the architecture's name in its keys; `names` are those of the
    tensors, also with `*` for the number of a layer.
    """
    for family in families_of(architecture):
        if family.is_meant(sizes, names):
            return family
    return None


def architectures() -> list[str]:
    """Returns the architectures that `families_of` knows."""
    found = []
    for name, row in _table()["family"].items():
        found += row.get("of", [name])
    return sorted(set(found))


@cache
def families_of(architecture: str) -> tuple[GgufFamily, ...]:
    """Returns the families of an architecture, in the order in which they are to be tried."""
    table = _table()
    found = []
    for name, row in table["refused"].items():
        if row.get("of", name) == architecture:
            model_type, kind = row["model"]
            found.append(GgufFamily(model_type, kind, row["told_by"], refusal=row["why"]))
    for name, row in table["family"].items():
        if architecture in row.get("of", [name]):
            found.append(_family(name))
    return tuple(found)


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))


def _family(name: str) -> GgufFamily:
    """Makes a family of its row, and of those that it is like."""
    table = _table()
    row = _row(name)
    layers = row.get("layers", "model.layers.*")
    model_type, architecture = row["model"]
    names: dict[str, str] = {}
    for module, value in _pairs("names", row["names"]).items():
        names.update([_in_layers(module, value, layers)])
    joined = []
    for group in row["joined"]:
        for value, function, *parts in table["joined"][group]:
            in_file = tuple(f"blk.*.{part}" for part in parts)
            _, whole = _in_layers("", value, layers)
            joined.append(Join(whole, getattr(joining, function), in_file))
    return GgufFamily(
        model_type,
        architecture,
        told_by=table["family"][name].get("told_by", ""),
        is_encoder=row.get("is_encoder", False),
        names=names,
        joined=tuple(joined),
        changed=_pairs("changed", row["changed"]),
        shapes=_pairs("shapes", row["shapes"]),
        config=_pairs("config", row["config"]),
        constants=row["constants"],
        shown=row["shown"],
        complete=tuple(getattr(completing, function) for function in row["complete"]),
        rows=table["rows"].get(name, {}),
        also=tuple(table["also"].get(name, ())),
    )


def _row(name: str) -> dict[str, Any]:
    """Returns a row with all that it adds to the row that it is like."""
    row = _table()["family"][name]
    like = _row(row["like"]) if "like" in row else {}
    whole = {**like, **row}
    for key in ("names", "joined", "changed", "shapes", "config", "complete"):
        whole[key] = [*like.get(key, ()), *row.get(key, ())]
    for key in ("constants", "shown"):
        whole[key] = {**like.get(key, {}), **row.get(key, {})}
    return whole


def _pairs(kind: str, items: Iterable[str | Mapping[str, str]]) -> dict[str, str]:
    """Returns the pairs of groups, a later one in the place of an earlier one of the same key."""
    found: dict[str, str] = {}
    for item in items:
        found.update(_pairs(kind, _table()[kind][item]) if isinstance(item, str) else item)
    return found


def _in_layers(module: str, value: str, layers: str) -> tuple[str, str]:
    """Returns the whole names of a module in the file and in transformers."""
    if value.startswith("."):
        return f"blk.*.{module}", f"{layers}{value}"
    return module, value


# --- signs of a family ----------------------------------------------------------------------------
# Each gets the metadata without the architecture's name in its keys, and the names of the tensors.


def has_words_of_sentencepiece(sizes: _Sizes, _names: _Names) -> bool:
    """Tells CamemBERT from BERT.

    Words of CamemBERT begin with the sign of a space, and the converter adds a second one. Words of
    BERT have the one that the converter adds (BertModel.set_vocab).
    """
    tokens = sizes.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Texts) or not len(tokens):
        return False
    twice = 2 * _SPACE
    count = sum(token.startswith(twice) and token != twice for token in tokens)
    return count > _FEW * len(tokens)


def rotates_beside_states(sizes: _Sizes, names: _Names) -> bool:
    """Tells Bamba from Granite 4, which has either states or rotary embeddings.

    Source: GraniteHybridModel.set_gguf_parameters.
    """
    return "blk.*.ssm_a" in names and bool(sizes.get("rope.scaling.finetuned"))


def has_tokens_of_solar(sizes: _Sizes, _names: _Names) -> bool:
    """Tells Solar Open from GLM-4.5, which always says how many layers have no experts.

    Source: SolarOpenModel, which changes nothing but the tokenizer.
    """
    if sizes.get("tokenizer.ggml.pre") == "solar-open":
        return True
    return "leading_dense_block_count" not in sizes


def has_layers_that_differ(sizes: _Sizes, _names: _Names) -> bool:
    """Tells Puzzle from Nemotron-H: its layers use more or fewer experts (NemotronHPuzzleModel)."""
    return isinstance(sizes.get("expert_used_count"), list)


def lacks_biases(_sizes: _Sizes, names: _Names) -> bool:
    """Tells KORMo from Qwen2, whose queries always have biases."""
    return "blk.*.attn_q.weight" in names and "blk.*.attn_q.bias" not in names


_SIGNS: Final[Mapping[str, Callable[[_Sizes, _Names], bool]]] = {
    "has_words_of_sentencepiece": has_words_of_sentencepiece,
    "rotates_beside_states": rotates_beside_states,
    "has_tokens_of_solar": has_tokens_of_solar,
    "has_layers_that_differ": has_layers_that_differ,
    "lacks_biases": lacks_biases,
}


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
