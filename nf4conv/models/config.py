"""Reads and edits config.json.

The config of a 4-bit checkpoint has the 11 keys of quantization_config that loaders read, and
nothing that an earlier quantization left. The keys and their order are those that transformers
4.57.6 and 5.23.0 write (BitsAndBytesConfig.to_dict), without _load_in_4bit and _load_in_8bit, which
no loader reads, and on which vllm-omni fails.

Keys of which transformers 5 has another than transformers 4 are added for both: 5 reads both, and 4
does not miss a key that it does not find. It takes a default, so that a model fails to load, or
loads and computes something else.

    transformers 5                    transformers 4               where
    num_local_experts                 num_experts                  where counts_experts_twice
    rope_parameters.rope_theta        rope_theta                   rotary positions
    rope_parameters.partial_rotary…   partial_rotary_factor        rotary positions
    rope_parameters                   rope_scaling                 rotary positions, scaled

(Found by comparing every config class of transformers 4.57.6 with that of 5.23.0;
tests/choose/test_expert_configs.py does it for mixtures of experts.)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from nf4conv.format.layout import Format
from nf4conv.models.family_table import FAMILIES

LEFTOVERS: Final = ("quantization_config", "compression_config")
"""Keys that make loaders believe in another quantization, wherever in config.json they stand."""

OF_EXPERTS: Final = "expert_dtype"
"""The key of DeepSeek-V4 that says how experts are encoded, beside quantization_config.

transformers moves it into any quantization_config that there is.
"""

# transformers 4.56 and newer write the first, older releases the second
DTYPE_KEYS: Final = ("dtype", "torch_dtype")

_MOVED: Final = ("rope_theta", "partial_rotary_factor")
"""Keys of rope_parameters that stand beside it in transformers 4."""


def levels(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields a config and every config nested in it, the outer before the inner.

    The path of a level ends with a dot; that of config.json itself is empty.
    """
    yield path, config
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from levels(value, f"{path}{key}.")


def architecture_of(config: Mapping[str, Any]) -> str:
    """Returns the first of the model classes that config.json names; "" if it names none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return ""
    first = names[0]
    return first if isinstance(first, str) else ""


def quantized_config(
    config: Mapping[str, Any],
    format: Format,
    *,
    compute_dtype: str,
    skip_modules: Sequence[str],
    dtype: str | None,
) -> dict[str, Any]:
    """Returns the content of config.json for a 4-bit checkpoint.

    transformers assumes fp4 where no quant_type is given, and 4.57 counts the tensors of a weight,
    so the format is that on disk. Modules to skip are listed even if there are none: with null
    every loader would guess. Without a dtype, what the source says of it stays.
    """
    edited = at_all_levels(without_quantization(config), add_keys_of_transformers_4)
    if dtype is not None:
        edited = plain_config(edited, dtype)
    edited["quantization_config"] = {
        "bnb_4bit_compute_dtype": compute_dtype,
        "bnb_4bit_quant_storage": format.quant_storage,
        "bnb_4bit_quant_type": format.quant_type,
        "bnb_4bit_use_double_quant": format.double_quant,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": list(skip_modules),
        "llm_int8_threshold": 6.0,  # loaders refuse an int
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }
    return edited


def plain_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Returns the content of config.json for a checkpoint without any quantization.

    Every dtype that the source names, at any level, becomes this one.
    """

    def name_dtype(level: dict[str, Any]) -> None:
        for key in DTYPE_KEYS:
            if level.get(key) is not None:
                level[key] = dtype

    edited = at_all_levels(without_quantization(config), name_dtype)
    # releases before 4.56 read nothing but torch_dtype
    if "dtype" in edited or "torch_dtype" not in edited:
        edited["dtype"] = dtype
    edited["torch_dtype"] = dtype
    return edited


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a config with every trace of a quantization removed, at all levels."""

    def remove_traces(level: dict[str, Any]) -> None:
        for key in (*LEFTOVERS, OF_EXPERTS):
            level.pop(key, None)

    return at_all_levels(config, remove_traces)


def at_all_levels(
    config: Mapping[str, Any], edit: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Returns a copy of a config of which each level has been edited, the inner ones first."""
    level = {}
    for key, value in config.items():
        level[key] = at_all_levels(value, edit) if isinstance(value, Mapping) else value
    edit(level)
    return level


def checkpoint_dtype(config: Mapping[str, Any]) -> str | None:
    """Returns the dtype that a config names, such as "bfloat16"; None if it names none.

    Where the top is silent, the first part of the model that names a dtype speaks for it.
    """
    for _, level in levels(config):
        for key in DTYPE_KEYS:
            dtype = level.get(key)
            if isinstance(dtype, str):
                return dtype.removeprefix("torch.")
    return None


def add_keys_of_transformers_4(config: dict[str, Any]) -> None:
    """Adds keys that transformers 4 reads to one level of a config; none that is there changes."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and family.counts_experts_twice and "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])
    _add_rope(config)


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
