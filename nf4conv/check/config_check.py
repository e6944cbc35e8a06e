"""Checks config.json against what is stored: the quantization that it names, and its dtypes."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from nf4conv.check.experts_check import check_experts
from nf4conv.check.skip_list_check import check_skip_list
from nf4conv.check.structure import Structure
from nf4conv.choose.evidence import Evidence
from nf4conv.errors import SourceError
from nf4conv.format.dtypes import DTYPE_NAMES, TAGS
from nf4conv.models.config import LEFTOVERS, checkpoint_dtype, levels
from nf4conv.sources.files import QUANTIZATION_LEFTOVERS
from nf4conv.sources.reader import read_json

_FLAGS: Final = (
    "load_in_4bit",
    "load_in_8bit",
    "bnb_4bit_use_double_quant",
    "llm_int8_has_fp16_weight",
    "llm_int8_enable_fp32_cpu_offload",
)
"""Keys for which transformers raises a TypeError unless their value is true or false."""


def check_config(structure: Structure) -> None:
    """Notes everything in which config.json and the stored tensors disagree."""
    config = _read_config(structure)
    check_experts(structure, config or {})
    if config is None:
        return
    _check_leftovers(structure, config)
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        if structure.weights:
            _note(structure, "has no quantization_config, though weights are packed")
        return
    for text in (*_wrong_keys(quantization), *_wrong_format(structure, quantization)):
        _note(structure, text)
    for text in _oddities(quantization):
        _note(structure, text, is_fault=False)
    _check_unpacked_dtypes(structure, config)
    check_skip_list(structure, config, quantization)


def check_plain_config(structure: Structure) -> None:
    """Notes a config.json that says of a decoded checkpoint that it is still quantized."""
    config = _read_config(structure)
    if config is None:
        return
    _check_leftovers(structure, config)
    # a submodel that stays in the encoding that it has keeps its description
    is_in_floats = all(
        tensor.dtype in DTYPE_NAMES for tensor in structure.plain.values() if len(tensor.shape) > 1
    )
    if is_in_floats and config.get("quantization_config") is not None:
        _note(structure, "has a quantization_config, though no weight is quantized")
    _check_unpacked_dtypes(structure, config)


def _note(structure: Structure, text: str, *, is_fault: bool = True) -> None:
    structure.note("config", "config.json", "", text, is_fault=is_fault)


def _read_config(structure: Structure) -> Mapping[str, Any] | None:
    """Returns the content of config.json; notes that there is none, or none that can be read."""
    path = structure.folder / "config.json"
    if not path.is_file():
        _note(structure, "is missing; only programs that need none can load this", is_fault=False)
        return None
    try:
        return read_json(path)
    except SourceError as error:
        structure.note_unreadable("config", path, error)
        return None


def _check_leftovers(structure: Structure, config: Mapping[str, Any]) -> None:
    """Notes what an earlier quantization has left, in files and in config.json."""
    for name in sorted(QUANTIZATION_LEFTOVERS):
        if (structure.folder / name).is_file():
            text = "names another quantization, which loaders would believe"
            structure.note("config", name, "", text)
    for path, level in levels(config):
        for key in LEFTOVERS:
            place = path + key
            if isinstance(level.get(key), Mapping) and place != "quantization_config":
                _note(
                    structure,
                    f"{place} names a quantization; loaders look at quantization_config only",
                )


def _wrong_keys(quantization: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong with the keys that do not depend on what is stored."""
    expected = {
        "quant_method": ("bitsandbytes",),
        "load_in_4bit": (True,),
        "load_in_8bit": (False, None),
    }
    for key, allowed in expected.items():
        if quantization.get(key) not in allowed:
            yield f"{key} is {quantization.get(key)!r}, expected {allowed[0]!r}"
    for key in _FLAGS:
        if not isinstance(quantization.get(key, False), bool):
            yield f"{key} is {quantization[key]!r:.50}; transformers takes only true or false"
    dtype = quantization.get("bnb_4bit_compute_dtype")
    if dtype is not None and dtype not in tuple(TAGS):
        yield f"bnb_4bit_compute_dtype is {dtype!r:.50}, expected bfloat16, float16 or float32"
    threshold = quantization.get("llm_int8_threshold", 6.0)
    if not isinstance(threshold, float):
        yield f"llm_int8_threshold is {threshold!r}; transformers takes only a float: 6.0"


def _wrong_format(structure: Structure, quantization: Mapping[str, Any]) -> Iterator[str]:
    """Yields the keys that say otherwise how the first weight is packed: all are alike."""
    weight = next(iter(structure.weights.values()), None)
    if weight is None:
        return
    format = weight.format
    # the key, what transformers assumes without it, and what is stored
    for key, default, stored in (
        ("bnb_4bit_quant_type", "fp4", format.quant_type),
        ("bnb_4bit_use_double_quant", False, format.double_quant),
        ("bnb_4bit_quant_storage", "uint8", format.quant_storage),
    ):
        found = quantization.get(key, default)
        if found != stored:
            name = weight.values.name
            yield f"{key} is {found!r}, but {name} and others are stored as {stored!r}"


def _oddities(quantization: Mapping[str, Any]) -> Iterator[str]:
    """Yields what loads, but not everywhere, or not as one would expect."""
    if quantization.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        yield (
            "bnb_4bit_quant_storage is not uint8: for FSDP only; vLLM, SGLang and diffusers "
            "refuse it"
        )
    if quantization.get("bnb_4bit_compute_dtype") in ("float32", None):
        yield "bnb_4bit_compute_dtype is float32, or missing, which means the same: slow"
    if quantization.get("llm_int8_skip_modules") is None:
        yield "llm_int8_skip_modules is null: transformers 4 and 5 then guess different lists"


def _check_unpacked_dtypes(structure: Structure, config: Mapping[str, Any]) -> None:
    """Notes an unpacked tensor that is not in the dtype that config.json names.

    From 5.21 on, transformers does not cast the unpacked weights of a packed checkpoint, but does
    cast their biases.
    """
    dtype = checkpoint_dtype(config)
    if dtype not in TAGS:
        return
    evidence = Evidence.gather(tuple(structure.plain.values()), config)
    for tensor in structure.plain.values():
        if tensor.dtype not in DTYPE_NAMES or tensor.dtype == TAGS[dtype]:
            continue
        if evidence.is_float32_by_design(tensor):
            continue
        text = f"is {DTYPE_NAMES[tensor.dtype]}, but config.json says {dtype}"
        structure.note("config", tensor.file, tensor.name, text, is_fault=False)
        return  # one says it: a checkpoint may have thousands
