"""Adds keys to config.json that transformers 4 reads, where transformers 5 writes others.

transformers 5 reads both. transformers 4 does not miss a key that it does not find: it takes a
default, so that a model fails to load, or loads and computes something else.

    transformers 5                    transformers 4               where
    num_local_experts                 num_experts                  those of _COUNTS_EXPERTS
    rope_parameters.rope_theta        rope_theta                   rotary positions
    rope_parameters.partial_rotary…   partial_rotary_factor        rotary positions
    rope_parameters                   rope_scaling                 rotary positions, scaled

(Found by comparing every config class of transformers 4.57.6 with that of 5.23.0;
tests/choose/test_expert_configs.py does it for mixtures of experts.)
"""

from collections.abc import Mapping
from typing import Any, Final

_COUNTS_EXPERTS: Final = ("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_talker_text")
"""Model types whose number of experts has another name in each of the releases."""

_MOVED: Final = ("rope_theta", "partial_rotary_factor")
"""Keys of rope_parameters that stand beside it in transformers 4."""


def with_keys_of_both(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a config to which keys of transformers 4 are added, at all levels.

    No key that is there changes.
    """
    edited: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in ("rope_parameters", "rope_scaling"):
            edited[key] = with_keys_of_both(value)
        else:
            edited[key] = value
    if edited.get("model_type") in _COUNTS_EXPERTS and "num_local_experts" in edited:
        edited.setdefault("num_experts", edited["num_local_experts"])
    _add_rope(edited)
    return edited


def _add_rope(config: dict[str, Any]) -> None:
    """Adds what transformers 4 reads about rotary positions to one level of a config."""
    parameters = config.get("rope_parameters")
    # parameters of several kinds of layers are nested, and have no rope_theta of their own
    if not isinstance(parameters, Mapping) or "rope_theta" not in parameters:
        return
    for key in _MOVED:
        if key in parameters:
            config.setdefault(key, parameters[key])
    is_scaled = parameters.get("rope_type", "default") != "default"
    if (is_scaled or parameters.keys() - {"rope_type", *_MOVED}) and not config.get("rope_scaling"):
        # whole, because transformers 5 takes it in the place of rope_parameters
        config["rope_scaling"] = dict(parameters)
