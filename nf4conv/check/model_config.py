"""Compares config.json with the one that converting the source gives: does it still describe the
same model?

nf4conv copies every key but those of the quantization and of dtypes, and adds those that only one
release of transformers reads. Other tools parse the source's config and write it again, with
defaults added or left out and keys renamed: there, only keys are compared that decide shapes or
arithmetic and have one name everywhere.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from nf4conv.check.structure import Structure
from nf4conv.choose.formats import dominant_dtype
from nf4conv.models.config import checkpoint_dtype, quantized_config
from nf4conv.sources.reader import read_json
from nf4conv.sources.record import SCHEMA_VERSION
from nf4conv.sources.source import Source

CHECK: Final = "model config"

_REWRITTEN: Final = frozenset(
    (
        "transformers_version",
        "_diffusers_version",
        "_name_or_path",
        "_commit_hash",
        # of training, which switches it off, and of padding, for which tools choose a token
        "use_cache",
        "pad_token_id",
    )
)
"""Keys that programs rewrite where they save a model. None of them changes a logit."""

_OF_THE_MODEL: Final = frozenset(
    (
        "architectures", "model_type", "vocab_size", "tie_word_embeddings", "hidden_size",
        "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "hidden_act", "hidden_activation", "rms_norm_eps", "layer_norm_eps",
        "layer_norm_epsilon", "norm_eps", "rope_theta", "partial_rotary_factor", "sliding_window",
        "attention_bias", "mlp_bias", "num_experts", "num_local_experts", "n_routed_experts",
        "num_experts_per_tok", "moe_intermediate_size", "kv_lora_rank", "q_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_embd", "n_head", "n_layer",
        "d_model", "d_ff", "d_kv", "num_layers", "num_heads",
    )
)  # fmt: skip
"""Keys that decide shapes or arithmetic, and are compared whatever tool wrote them."""

_MISSING: Final = object()


class _Difference(NamedTuple):
    """A key of a config that is not what it should be."""

    path: str  # the keys that lead to it, with dots between them
    wanted: object
    found: object


def is_ours(structure: Structure) -> bool:
    """Returns True for a checkpoint that nf4conv wrote, and wrote as this release does."""
    record = structure.record
    return record is not None and record.get("schema_version") == SCHEMA_VERSION


def check_model_config(structure: Structure, source: Source) -> None:
    """Notes every key by which config.json describes another model than the source's."""
    check_planned_config(structure, _planned(structure, source))


def check_planned_config(structure: Structure, planned: Mapping[str, Any] | None) -> None:
    """Notes every key by which config.json is not as planned; with --exact, rewritten ones, too."""
    if planned is None:
        return
    ours = is_ours(structure)
    config = structure.config
    if config is None:
        if not (structure.folder / "config.json").is_file():
            text = "is missing; the source has one"
            structure.note(CHECK, "config.json", "", text, is_fault=structure.exact or ours)
        return  # that it cannot be read is noted elsewhere
    for difference in _differences(planned, config, ""):
        if ours or _is_of_the_model(difference):
            _note(structure, "config.json", difference)


def check_model_index(around: Structure, index: Path, *, is_ours: bool) -> None:
    """Notes every key by which model_index.json describes another pipeline than the source's."""
    for difference in _differences(read_json(index), read_json(around.folder / index.name), ""):
        if is_ours or difference.wanted is not _MISSING:  # other tools add keys
            _note(around, index.name, difference)


def _is_of_the_model(difference: _Difference) -> bool:
    """Returns True for a key that decides the model, whatever tool wrote it, and that both have."""
    path, wanted, found = difference
    name = path.rpartition(".")[2]
    if name not in _OF_THE_MODEL or _MISSING in (wanted, found):
        return False
    # transformers 5 names the parts of a model more closely: qwen2_vl_vision
    is_part = name == "model_type" and name != path
    return not (is_part and str(found).startswith(str(wanted)))


def _note(structure: Structure, file: str, difference: _Difference) -> None:
    path, wanted, found = difference
    by_source = f"by the source it is {_shown(wanted):.100}"
    if wanted is _MISSING:
        by_source = "the source has no such key"
    is_fault = structure.exact or path.rpartition(".")[2] not in _REWRITTEN
    text = f"{path} is {_shown(found):.100}; {by_source}"
    structure.note(CHECK, file, "", text, is_fault=is_fault)


def _planned(structure: Structure, source: Source) -> Mapping[str, Any] | None:
    """Returns the config that quantizing a source gives, but for compute dtype and skip list,
    which other checks look at.

    A submodel of a diffusers pipeline in which nothing is packed has the config of the source.
    """
    if source.config is None:
        return None
    weight = next(iter(structure.weights.values()), None)
    found = (structure.config or {}).get("quantization_config")
    if weight is None or not isinstance(found, Mapping):
        return {**source.config, "quantization_config": found} if found else source.config
    listed = found.get("llm_int8_skip_modules")
    planned = quantized_config(
        source.config,
        weight.format,
        compute_dtype=found.get("bnb_4bit_compute_dtype", "bfloat16"),
        skip_modules=(),
        # diffusers does not know dtypes
        dtype=None if "_class_name" in source.config else _dtype_of(structure, source),
    )
    planned["quantization_config"]["llm_int8_skip_modules"] = listed
    return planned


def _dtype_of(structure: Structure, source: Source) -> str:
    """Returns the dtype that nf4conv writes, as choose/formats.py chooses it."""
    asked = (structure.record or {}).get("options", {}).get("dtype")
    if isinstance(asked, str):
        return asked
    return checkpoint_dtype(source.config or {}) or dominant_dtype(source.tensors)


def _differences(
    expected: Mapping[str, Any], found: Mapping[str, Any], path: str
) -> Iterator[_Difference]:
    """Yields every key of two configs whose values are not spelled alike."""
    for key in {**expected, **found}:
        wanted = expected.get(key, _MISSING)
        value = found.get(key, _MISSING)
        if isinstance(wanted, Mapping) and isinstance(value, Mapping):
            yield from _differences(wanted, value, f"{path}{key}.")
        elif _shown(wanted) != _shown(value):
            yield _Difference(f"{path}{key}", wanted, value)


def _shown(value: object) -> str:
    return "missing" if value is _MISSING else json.dumps(value)
