"""Lists what tools change in config.json without changing the model.

Found by letting transformers 5.23.0 parse and save what 4.57.6 writes for every model type, with
defaults and without.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

REWRITTEN: Final = frozenset(
    (
        "transformers_version",
        "_diffusers_version",
        "_name_or_path",
        "_commit_hash",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_output_attentions",
        # of training, which switches it off, and of padding, for which tools choose a token
        "use_cache",
        "pad_token_id",
    )
)
"""Keys that save_pretrained, Trainer and Unsloth rewrite; none of them changes a logit."""

_OF_GENERATION: Final = frozenset(
    (
        "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample",
        "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
        "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "min_length",
        "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
        "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
        "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
    )
)  # fmt: skip
"""Keys that transformers 5 moves to generation_config.json."""

NOT_ARITHMETIC: Final = frozenset(
    (
        *REWRITTEN,
        *_OF_GENERATION,
        "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id",
        "id2label", "label2id", "finetuning_task", "task_specific_params", "problem_type",
        "tokenizer_class", "prefix", "return_dict", "output_attentions", "output_hidden_states",
        "torchscript", "tf_legacy_loss", "use_bfloat16", "initializer_range", "initializer_factor",
        "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "dropout",
        "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop",
        "activation_dropout", "classifier_dropout", "router_aux_loss_coef", "output_router_logits",
    )
)  # fmt: skip
"""Keys that decide neither a shape nor what a loaded model computes; training and output apart."""

_DEFAULTS: Final[Mapping[str, Any]] = {
    "return_dict": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "chunk_size_feed_forward": 0,
    "torchscript": False,
    "pruned_heads": {},
    "use_bfloat16": False,
    "tf_legacy_loss": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "tie_word_embeddings": True,
    "use_pretrained_backbone": False,
    "use_timm_backbone": False,
    "use_falcon_mambapy": False,
    "unsloth_fixed": True,
}
"""Defaults of every config class of transformers 4 or 5, which are not always written."""

_LEFT_OUT: Final = frozenset(
    # a class of models either has it or not
    ("is_encoder_decoder",)
)
"""Keys that may be left out whatever their value."""

_ALIASES: Final = (
    ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"),
    ("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"),
    ("hidden_size", "d_model", "n_embd", "dim"),
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("bos_token_id", "bos_index"),
    ("eos_token_id", "eos_index"),
    ("pad_token_id", "pad_index"),
)
"""Names of one thing in different releases of transformers."""

_ROPE: Final[Mapping[str, str]] = {
    "rope_theta": "rope_theta",
    "rope_local_base_freq": "rope_theta",
    "global_rope_theta": "rope_theta",
    "local_rope_theta": "rope_theta",
    "memory_attention_rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "rotary_pct": "partial_rotary_factor",
}
"""Keys of transformers 4 by what they are called in rope_parameters of transformers 5."""

_NO_NUMBERS: Final = ("Infinity", "-Infinity", "NaN")

_PARAMETERS: Final = "rope_parameters"


def may_be_left_out(key: str, value: object, config: Mapping[str, Any]) -> bool:
    """Tells whether a config says the same without a key.

    Args:
        key: a key of the source's config that the config lacks.
        value: its value in the source, which is not null.
        config: the level of the config that lacks it.
    """
    if key in _OF_GENERATION or key in _LEFT_OUT or _is_default(key, value):
        return True
    for group in _ALIASES:
        if key in group and any(_equal(config.get(name), value) for name in group):
            return True
    parameters = config.get(_PARAMETERS)
    if not isinstance(parameters, Mapping):
        return False
    leaves = list(_leaves(parameters))
    if key in _ROPE:
        return (_ROPE[key], _spelled(value)) in leaves
    if key == "rope_scaling" and isinstance(value, Mapping):
        return all(leaf in leaves for leaf in _leaves(value))
    return False


def means_the_same(key: str, wanted: object, value: object, *, is_part: bool) -> bool:
    """Tells whether two values of a key describe the same model.

    Args:
        key: a key that both configs have.
        wanted: its value in the source.
        value: its value in the config.
        is_part: True if the key describes a part of the model, such as text_config.
    """
    if key == "model_type" and is_part:
        # transformers 5 names parts more exactly: qwen2_vl becomes qwen2_vl_vision
        return isinstance(value, str) and value.startswith(str(wanted))
    return _equal(wanted, value)


def _is_default(key: str, value: object) -> bool:
    if key in ("id2label", "label2id") and isinstance(value, Mapping):
        names = value.values() if key == "id2label" else value.keys()
        return all(str(name).startswith("LABEL_") for name in names)
    return key in _DEFAULTS and _equal(_DEFAULTS[key], value)


def _leaves(parameters: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields keys and values of parameters of rotary positions, at all levels."""
    for key, value in parameters.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield ("rope_type" if key == "type" else key), _spelled(value)


def _equal(wanted: object, value: object) -> bool:
    return _spelled(wanted) == _spelled(value)


def _spelled(value: object) -> str:
    """Returns a value as JSON in which equal numbers, and infinity, are spelled alike."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: object) -> object:
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"} and value["__float__"] in _NO_NUMBERS:
            return float(value["__float__"])  # as transformers 5 writes it
        return {key: _normal(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_normal(item) for item in value]
    if type(value) is int and abs(value) < 2**53:
        return float(value)
    return value
