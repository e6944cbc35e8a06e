"""Finds the family of a file, the model of transformers that an architecture stands for, and makes
what config.json says of the metadata.

families.toml lists the families.
"""

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from nf4conv.format.dtypes import DTYPE_NAMES
from nf4conv.sources.gguf import completing, joining
from nf4conv.sources.gguf.header import Sizes, positive, shortest
from nf4conv.sources.tensors import TensorInfo


@dataclass(frozen=True)
class Join:
    """A tensor of transformers that the converter took apart."""

    name: str
    put_together: Callable[[joining.Parts, Sizes], joining.Stack]
    parts: tuple[str, ...]  # the names of the tensors in the file


@dataclass(frozen=True)
class GgufFamily:
    """A model of transformers that an architecture of llama.cpp stands for: a row of the table."""

    model_type: str
    architecture: str
    told_by: str
    also: tuple[str, ...]
    needs_config: bool
    names: Mapping[str, str]
    joined: tuple[Join, ...]
    changed: Mapping[str, str]
    shapes: Mapping[str, str]
    config: Mapping[str, str]
    constants: Mapping[str, object]
    shown: Mapping[str, str]
    complete: tuple[completing.Completion, ...]

    def is_meant(self, sizes: Sizes, names: Collection[str]) -> bool:
        """Returns True if a file is of this family, and not of others with the same name.

        `names` are those of the tensors, also with `*` for the number of a layer.
        """
        return not self.told_by or self.told_by in names or bool(sizes.get(self.told_by))


def architectures() -> list[str]:
    """Returns the architectures that `families_of` knows."""
    found = []
    for name, row in _table()["family"].items():
        found += row.get("of", [name])
    return sorted(set(found))


@cache
def families_of(architecture: str) -> tuple[GgufFamily, ...]:
    """Returns the families of an architecture, in the order in which they are to be tried."""
    rows = _table()["family"].items()
    return tuple(_family(name) for name, row in rows if architecture in row.get("of", [name]))


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
        also=tuple(table["family"][name].get("also", ())),
        needs_config=row.get("needs_config", False),
        names=names,
        joined=tuple(joined),
        changed=_pairs("changed", row["changed"]),
        shapes=_pairs("shapes", row["shapes"]),
        config=_pairs("config", row["config"]),
        constants=row["constants"],
        shown=row["shown"],
        complete=tuple(getattr(completing, function) for function in row["complete"]),
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


# --- config.json ----------------------------------------------------------------------------------

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


def config_of(
    sizes: Sizes,
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
    of_layers = by_name.get("model.embed_tokens_per_layer.weight")
    if of_layers is not None and of_layers.shape:
        config["vocab_size_per_layer_input"] = of_layers.shape[0]
    if "output" in family.names:
        config["tie_word_embeddings"] = f"{family.names['output']}.weight" not in by_name


def _leave_out_next_tokens(config: dict[str, Any], sizes: Sizes) -> None:
    """Takes layers that predict the token after the next one out of the number of layers."""
    more = positive(sizes, "nextn_predict_layers")
    layers = positive(config, "num_hidden_layers")
    if more is not None and layers is not None and more < layers:
        config["num_hidden_layers"] = layers - more
        config["num_nextn_predict_layers"] = more


def _add_rotary_share(config: dict[str, Any], sizes: Sizes) -> None:
    """Adds which share of a head is rotated, where it is not all of it."""
    rotated = positive(sizes, "rope.dimension_count")
    heads = positive(config, "num_attention_heads")
    hidden = positive(config, "hidden_size")
    size = positive(config, "head_dim")
    if size is None and hidden is not None and heads is not None:
        size = hidden // heads
    if rotated is not None and size is not None and rotated < size:
        config["partial_rotary_factor"] = rotated / size


def _add_rotary_scaling(config: dict[str, Any], sizes: Sizes) -> None:
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
