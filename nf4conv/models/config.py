"""config.json of a 4-bit checkpoint: the 13 keys of quantization_config, without what an earlier
quantization left.

The keys and their order are those that transformers 4.57.6 and 5.23.0 write
(BitsAndBytesConfig.to_dict).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from nf4conv.format.layout import Format

LEFTOVERS: Final = ("quantization_config", "compression_config")
"""Keys that make loaders believe in another quantization, wherever in config.json they stand."""

_WRITTEN: Final = json.loads(Path(__file__).with_name("quantization_config.json").read_bytes())
"""What quantization_config says; null is what the checkpoint decides. Loaders refuse an int as a
threshold.
"""

DTYPE_KEYS: Final = (
    "dtype",
    "torch_dtype",
)  # transformers 4.56 and newer write the first, older releases the second


def levels(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(path, content) of a config, whose path is empty, and of all that is nested in it, the outer
    before the inner.
    """
    yield path, config
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from levels(value, f"{path}{key}.")


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first of the model classes that config.json names; empty if it names none."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    return first if isinstance(first, str) else ""


def quantized_config(
    config: Mapping[str, Any],
    format: Format,
    *,
    compute_dtype: str,
    skip_modules: Sequence[str],
    dtype: str | None,
) -> dict[str, Any]:
    """The content of config.json for a 4-bit checkpoint.

    `config` is the content of the source's. The format must be what is stored: transformers assumes
    fp4 without a quant_type, and 4.57 counts the tensors of a weight. A loaded model multiplies in
    `compute_dtype`: "bfloat16", "float16" or "float32". `skip_modules` are listed even if there are
    none: null would let every loader guess its own list. `dtype` is what the unpacked tensors are
    stored in, "bfloat16" for example; None leaves the source's word on it.
    """
    edited = without_quantization(config) if dtype is None else plain_config(config, dtype)
    edited["quantization_config"] = _WRITTEN | {
        "bnb_4bit_compute_dtype": compute_dtype,
        "bnb_4bit_quant_storage": format.quant_storage,
        "bnb_4bit_quant_type": format.quant_type,
        "bnb_4bit_use_double_quant": format.double_quant,
        "llm_int8_skip_modules": list(skip_modules),
    }
    return edited


def plain_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The content of config.json for a checkpoint without any quantization, stored in a dtype such
    as "bfloat16".
    """
    config = without_quantization(config)
    keys = [key for key in DTYPE_KEYS if key in config] or ["dtype"]
    return _with_present_dtype(config, dtype) | dict.fromkeys([*keys, "torch_dtype"], dtype)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config with every trace of a quantization removed, at all levels."""
    return {
        key: without_quantization(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in LEFTOVERS
    }


def _with_present_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    edited = {
        key: _with_present_dtype(value, dtype) if isinstance(value, Mapping) else value
        for key, value in config.items()
    }
    return edited | {key: dtype for key in DTYPE_KEYS if config.get(key) is not None}


def checkpoint_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that a config names, such as "bfloat16"; the part of a model that names one speaks
    for a silent top.
    """
    found = (level.get(key) for _, level in levels(config) for key in DTYPE_KEYS)
    return next((dtype.removeprefix("torch.") for dtype in found if isinstance(dtype, str)), None)
