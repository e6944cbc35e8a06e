"""What a loader would make of config.json, held against what is stored: the quantization named, and
the skip list.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from nf4conv.choose.decisions import Keep, Pack
from nf4conv.choose.evidence import Evidence, Why
from nf4conv.choose.loader_rules import LITERAL, RULES, Predicate, is_name
from nf4conv.choose.selection import select
from nf4conv.errors import PlanError, SourceError
from nf4conv.format.layout import DTYPE_NAMES, TAGS
from nf4conv.models.config import (
    LEFTOVERS,
    architecture_of,
    checkpoint_dtype,
    levels,
    quantized_config,
)
from nf4conv.models.families import families_of, is_transposed
from nf4conv.models.module_names import HEADS, TIED_HEADS, ModuleNames, module_of
from nf4conv.options import QuantizeOptions
from nf4conv.sources.auxiliary import QUANTIZATION_LEFTOVERS
from nf4conv.sources.source import read_json
from nf4conv.sources.stored_weights import Structure
from nf4conv.sources.tensors import TensorInfo

_SURELY_LINEAR: Final = (Why.HEAD, Why.FEW_ROWS)
"""Reasons for which a module that loaders do hold in an `nn.Linear` is kept."""

_MOST_LINES: Final = 20

_FLAGS: Final = (
    "load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant", "llm_int8_has_fp16_weight",
    "llm_int8_enable_fp32_cpu_offload",
)  # fmt: skip
"""What transformers raises a TypeError for unless it is true or false."""

_Fault = tuple[TensorInfo, str, bool]  # (tensor, what is wrong with it, whether that is sure)
_Verdicts = Iterator[
    tuple[str, list[bool]]
]  # (loader, whether it would skip a module, for each name it may have)

_EMBEDDINGS: Final = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
)


def check_config(structure: Structure) -> Mapping[str, Any]:
    """Note everything in which config.json and the stored tensors disagree; its content, empty if
    there is none.
    """
    path = structure.folder / "config.json"
    if not path.is_file():
        structure.note(
            "config",
            path,
            "",
            "is missing; only programs that need none can load this",
            is_fault=False,
        )
        return {}
    try:
        config = read_json(path)
    except SourceError as error:
        structure.note("config", path, "", str(error).removeprefix(f"{path}: "))
        return {}
    for name in sorted(QUANTIZATION_LEFTOVERS):
        if (structure.folder / name).is_file():
            structure.note(
                "config", name, "", "names another quantization, which loaders would believe"
            )
    quantization = config.get("quantization_config")
    named = [
        where + key
        for where, level in levels(config)
        for key in LEFTOVERS
        if isinstance(level.get(key), Mapping)
    ]
    for where in filter("quantization_config".__ne__, named):
        structure.note(
            "config",
            path,
            "",
            f"{where} names a quantization; loaders look at quantization_config only",
        )
    if not isinstance(quantization, Mapping):
        if structure.weights:
            structure.note(
                "config", path, "", "has no quantization_config, though weights are packed"
            )
        return config
    for text in _quantization_faults(quantization, structure):
        structure.note("config", path, "", text)
    for text in _quantization_oddities(quantization):
        structure.note("config", path, "", text, is_fault=False)
    _check_dtypes(structure, config)
    _check_skip_list(structure, config, quantization)
    return config


def check_exact_config(structure: Structure, config: Mapping[str, Any]) -> None:
    """Note every key of quantization_config that is not what `quantize` writes, but for the skip
    list.
    """
    weight = next(iter(structure.weights.values()), None)
    found = config.get("quantization_config")
    if weight is None or not isinstance(found, Mapping):
        return
    compute = found.get(
        "bnb_4bit_compute_dtype", "bfloat16"
    )  # a choice, which another check looks at
    written = quantized_config(
        {}, weight.format, compute_dtype=compute, skip_modules=(), dtype=None
    )
    expected = written["quantization_config"]
    for key in sorted({*expected, *found} - {"llm_int8_skip_modules"}):
        values = [
            json.dumps(place[key]) if key in place else "missing" for place in (found, expected)
        ]
        if values[0] != values[1]:
            text = f"quantization_config: {key} is {values[0]:.100}, not {values[1]}"
            structure.note("exact", "config.json", "", text)


def _quantization_faults(quantization: Mapping[str, Any], structure: Structure) -> Iterator[str]:
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
    for name, weight in islice(structure.weights.items(), 1):
        for key, default, stored in (
            ("bnb_4bit_quant_type", "fp4", weight.format.quant_type),
            ("bnb_4bit_use_double_quant", False, weight.format.double_quant),
            ("bnb_4bit_quant_storage", "uint8", weight.format.quant_storage),
        ):
            found = quantization.get(key, default)  # what transformers assumes without the key
            if found != stored:
                yield f"{key} is {found!r}, but {name} and others are stored as {stored!r}"
    threshold = quantization.get("llm_int8_threshold", 6.0)
    if not isinstance(threshold, float):
        yield f"llm_int8_threshold is {threshold!r}; transformers takes only a float: 6.0"


def _quantization_oddities(quantization: Mapping[str, Any]) -> Iterator[str]:
    if quantization.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        yield "bnb_4bit_quant_storage is not uint8: for FSDP only; vLLM, SGLang and diffusers refuse it"
    if quantization.get("bnb_4bit_compute_dtype") in ("float32", None):
        yield "bnb_4bit_compute_dtype is float32, or missing, which means the same: slow"
    if quantization.get("llm_int8_skip_modules") is None:
        yield "llm_int8_skip_modules is null: transformers 4 and 5 then guess different lists"


def _check_dtypes(structure: Structure, config: Mapping[str, Any]) -> None:
    """From 5.21 on, transformers does not cast the unpacked weights of a packed checkpoint, but
    their biases.
    """
    dtype = checkpoint_dtype(config)
    if dtype not in TAGS:
        return
    evidence = Evidence.gather(tuple(structure.plain.values()), config)
    for tensor in structure.plain.values():
        if (
            tensor.dtype in DTYPE_NAMES
            and tensor.dtype != TAGS[dtype]
            and not evidence.is_float32_by_design(tensor)
        ):
            text = f"is {DTYPE_NAMES[tensor.dtype]}, but config.json says {dtype}"
            structure.note("config", tensor.file, tensor.name, text, is_fault=False)
            return  # one says it: a checkpoint may have thousands


def _check_skip_list(
    structure: Structure, config: Mapping[str, Any], quantization: Mapping[str, Any]
) -> None:
    listed = quantization.get("llm_int8_skip_modules")
    if listed is not None and not (
        isinstance(listed, list) and all(isinstance(entry, str) for entry in listed)
    ):
        structure.note(
            "skip list", "config.json", "", "llm_int8_skip_modules is not a list of names"
        )
        return
    matchers = _matchers(structure, HEADS if listed is None else listed)
    names = ModuleNames.of(config)

    def verdicts(module: str) -> _Verdicts:
        paths = names.spellings(module)
        return (
            (loader, [is_skipped(path) for path in paths])
            for loader, is_skipped in matchers.items()
        )

    faults = list(_misread(structure, config, verdicts, listed is not None))
    faults += _unnamed_heads(structure, config, names, matchers) if listed is not None else []
    for tensor, text, is_fault in faults[:_MOST_LINES]:
        structure.note("skip list", tensor.file, tensor.name, text, is_fault=is_fault)
    if len(faults) > _MOST_LINES:
        text = f"and {len(faults) - _MOST_LINES:,} more"
        structure.note(
            "skip list", "config.json", "", text, is_fault=any(fault for _, _, fault in faults)
        )


def _matchers(structure: Structure, entries: Sequence[str]) -> dict[str, Predicate]:
    """What each loader makes of a list; not transformers 5 if that takes entries for patterns,
    which may never end.
    """
    patterns = [entry for entry in entries if entry and not is_name(entry)]
    for pattern in patterns[:_MOST_LINES]:
        try:
            re.compile(pattern)
            text, is_fault = (
                "a pattern to transformers 5, which is not checked, and a name to other loaders",
                False,
            )
        except (re.error, OverflowError, RecursionError) as error:
            text, is_fault = (
                f"not a regular expression, for which transformers 5 takes it: {error}",
                True,
            )
        text = f"llm_int8_skip_modules: {pattern[:100]!r} is {text}"
        structure.note("skip list", "config.json", "", text, is_fault=is_fault)
    return {
        name: match(entries) for name, match in RULES.items() if not patterns or name in LITERAL
    }


def _misread(
    structure: Structure,
    config: Mapping[str, Any],
    verdicts: Callable[[str], _Verdicts],
    is_explicit: bool,
) -> Iterator[_Fault]:
    """Packed modules that a loader would skip, and others that it would not; surely only if under
    every name.
    """
    for weight in structure.weights.values():
        for loader, hits in verdicts(module_of(weight.name)):
            if any(hits):
                yield weight.values, f"is packed, but {loader} would skip it", all(hits)
    for tensor, module, is_sure in list(_linear(structure, config)):
        for loader, hits in verdicts(module):
            if not all(hits):
                fault = is_sure and is_explicit and not any(hits)
                yield tensor, f"is not packed, but {loader} would not skip {module}", fault


def _unnamed_heads(
    structure: Structure,
    config: Mapping[str, Any],
    names: ModuleNames,
    matchers: Mapping[str, Predicate],
) -> Iterator[_Fault]:
    """An output head that is the embedding: it is not stored, but loaders make it 4-bit unless the
    list names it.
    """
    embedding = next(
        (tensor for name, tensor in structure.plain.items() if name.endswith(_EMBEDDINGS)), None
    )
    heads = TIED_HEADS + tuple(head for family in names.families for head in family.heads)
    is_stored = any(
        module_of(name).endswith(heads) for name in (*structure.plain, *structure.weights)
    )
    is_tied = config.get("tie_word_embeddings", True) is True
    if (
        embedding is None
        or is_stored
        or not is_tied
        or not architecture_of(config).endswith("ForCausalLM")
    ):
        return
    paths = [path for head in heads for path in names.spellings(head)]
    # vLLM never quantizes a head
    loaders = [
        loader
        for loader, is_skipped in matchers.items()
        if loader != "vLLM" and not any(map(is_skipped, paths))
    ]
    if loaders:
        text = f"is the output head as well, but {', '.join(loaders)} would not skip lm_head"
        yield embedding, text, "auto_map" not in config


def _linear(
    structure: Structure, config: Mapping[str, Any]
) -> Iterator[tuple[TensorInfo, str, bool]]:
    """(tensor, module, whether it surely is one) of everything unpacked that loaders may hold in an
    `nn.Linear`.
    """
    families = families_of(config)
    logical = list(structure.plain.values())
    for weight in structure.weights.values():
        transposed = len(weight.shape) == 2 and is_transposed(module_of(weight.name), families)
        shape = weight.shape[::-1] if transposed else weight.shape
        logical.append(weight.values._replace(shape=shape, dtype=TAGS[weight.format.dtype]))
    try:
        decisions = select(
            logical, config, QuantizeOptions(quantize_towers=True, moe="per-expert")
        ).decisions
    except PlanError as error:
        structure.note(
            "skip list", "config.json", "", f"could not be checked: {error}", is_fault=False
        )
        return
    for name, tensor in structure.plain.items():
        decision = decisions[name]
        if isinstance(decision, Pack):
            yield from ((tensor, module_of(matrix.name), True) for matrix in decision.matrices)
        elif isinstance(decision, Keep) and decision.is_linear:
            yield tensor, module_of(name), decision.why in _SURELY_LINEAR
