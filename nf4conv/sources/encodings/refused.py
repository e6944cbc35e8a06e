"""Refuses quantizations that nf4conv does not decode, by what a config says of them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from nf4conv.errors import UndecodableError
from nf4conv.sources.encodings.quark import check_quark

_ACCEPTED: Final = (
    "fp8",
    "fbgemm_fp8",
    "mxfp8",
    "mxfp4",
    "compressed-tensors",
    "modelopt",
    "bitsandbytes",
    "gptq",
    "awq",
    "auto-round",
    "hqq",
    "torchao",
    "quark",
    "bitnet",
)
"""Values of quant_method whose tensors are decoded."""

_WITH_VARIANTS: Final = ("modelopt", "bitsandbytes", "fp8", "mxfp4", "mxfp8")
"""Beginnings of further values of quant_method that are decoded."""

_REFUSED: Final = {
    **dict.fromkeys(
        ("aqlm", "vptq", "spqr", "higgs", "quip", "quip_sharp", "squeezellm", "exl2", "exl3"),
        "a codebook of its own",
    ),
    **dict.fromkeys(
        ("marlin", "gptq_marlin", "awq_marlin", "bitblas", "gptq_bitblas", "awq_bitblas", "eetq"),
        "integers that lie as one kernel reads them",
    ),
    **dict.fromkeys(("quanto", "sinq", "metal", "gemma"), "packed integers in a layout of its own"),
    **dict.fromkeys(
        ("fp_quant", "fouroversix", "nvfp4"), "small floats in a layout of its own, or rotated"
    ),
    "gguf": "llama.cpp's block formats, which nf4conv reads from the .gguf file itself",
}
"""Values of quant_method that are refused, with the reason."""

DIVIDING: Final = "bitlinear"
"""The class of BitNet's layers whose results are divided by the scale; it need not be named."""

_MULTIPLYING: Final = "autobitlinear"
"""The class of BitNet's layers whose results are multiplied with the scale."""

INT4_OF_TORCHAO: Final = ("Int4WeightOnlyConfig", "Float8DynamicActivationInt4WeightConfig")
"""Configs of torchao that store two integers a byte, or eight a word."""

_IS_CLASS_OF_TORCHAO: Final = re.compile(r"\w+Config|\w+_weight_only|\w+_weight")

_OF_ACTIVATIONS: Final = frozenset(("input", "output"))
"""Where compressed-tensors rotates activations, in the words of its configs."""

_CLASSES_OF_TORCHAO: Final = (
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "Float8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    *INT4_OF_TORCHAO,
    "FqnToConfig",
    "ModuleFqnToConfig",
    "int8_weight_only",
)
"""Configs of torchao whose weights are stored as values and scales, and those that hold others."""

_PACKINGS_OF_TORCHAO: Final = ("plain", "plain_int32", "unpacked_to_int8")
"""Values of int4_packing_format and intx_packing_format whose integers lie in order."""


def check_decodable(method: str, description: Mapping[str, Any]) -> None:
    """Refuses a quantization by its method, or by what the config says beside.

    Args:
        method: quant_method, in lower case.
        description: the description of the quantization in the config.

    Raises:
        UndecodableError: nf4conv does not decode it.
    """
    if method not in _ACCEPTED and not method.startswith(_WITH_VARIANTS):
        reason = _REFUSED.get(method, "a format that nf4conv does not decode")
        raise UndecodableError(
            f"already quantized: quant_method {' '.join(method.split()):.60}; give the checkpoint "
            f"that it was made from: {reason}"
        )
    _check_gptqmodel(method, description)
    if method == "compressed-tensors":
        _check_formats(description)
        _check_transforms(description)
    if method == "auto-round":
        _check_auto_round(description)
    if method == "torchao":
        _check_torchao(description)
    if method == "quark":
        check_quark(description)


def check_no_mlx(config: Mapping[str, Any]) -> None:
    """Refuses what MLX quantizes: its configs name no method, and have a key of their own.

    Raises:
        UndecodableError: the config has that key.
    """
    found = config.get("quantization")
    if isinstance(found, Mapping) and "bits" in found and "group_size" in found:
        raise UndecodableError(
            f"already quantized: by MLX, to {found['bits']!r:.20} bits; give the checkpoint that "
            f"it was made from"
        )


def _check_gptqmodel(method: str, description: Mapping[str, Any]) -> None:
    """Refuses what GPTQModel writes under the names of others, and means in another way.

    It divides FP8 by W_scale_inv, where all others multiply (dequantize_weight of
    gptqmodel/nn_modules/qlinear/fp8.py of GPTQModel 7.7.0). With `rotation`, its loader rotates
    activations while the model runs (_setup_rotation_online_had of gptqmodel/models/loader.py).

    Raises:
        UndecodableError: the description names either.
    """
    if "weight_scale_semantics" in description:
        raise UndecodableError(
            f"already quantized: quant_method {method:.20} of GPTQModel, whose scales divide; give "
            f"the checkpoint that it was made from"
        )
    if method in ("gptq", "awq") and description.get("rotation"):
        raise UndecodableError(
            f"already quantized: quant_method {method} with a rotation; give the checkpoint that "
            f"it was made from: its weights are rotated"
        )


def _check_formats(description: Mapping[str, Any]) -> None:
    """Refuses the one format of compressed-tensors whose tensors have the names of another.

    Raises:
        UndecodableError: the description names it, for all layers or for some.
    """
    if "marlin-24" in _texts(description):
        raise UndecodableError(
            "already quantized: format marlin-24 of compressed-tensors; give the checkpoint that "
            "it was made from: its integers lie as one kernel for sparse weights reads them"
        )


def _check_transforms(description: Mapping[str, Any]) -> None:
    """Refuses weights that go with activations that are rotated while the model runs.

    Rotations of two weights cancel each other, and so do those of queries and keys
    (compressed_tensors/transform/transform_args.py of compressed-tensors 0.20).

    Raises:
        UndecodableError: the description names such a rotation.
    """
    transforms = description.get("transform_config")
    if not isinstance(transforms, Mapping) or not _OF_ACTIVATIONS.intersection(_texts(transforms)):
        return
    raise UndecodableError(
        "already quantized: compressed-tensors with a transform_config that rotates activations; "
        "give the checkpoint that it was made from: its weights are rotated"
    )


def _check_auto_round(description: Mapping[str, Any]) -> None:
    """Refuses what AutoRound writes beside integers of few bits, FP8, MXFP4, MXFP8 and NVFP4.

    Raises:
        UndecodableError: the description names other values, or rotated ones.
    """
    values = description.get("data_type", "int")
    # small floats lie as those of compressed-tensors, or in a way of their own
    is_as_compressed = description.get("packing_format") == "auto_round:llm_compressor"
    is_small_float = is_as_compressed and values in ("mx_fp", "nv_fp")
    if values not in ("int", "int_sym", "int_asym_dq", "fp", "fp8") and not is_small_float:
        raise UndecodableError(
            f"already quantized: quant_method auto-round, data_type {values!r:.40}; nf4conv "
            f"decodes int, fp, mx_fp and nv_fp, so give the checkpoint that it was made from"
        )
    if description.get("rotation_config"):
        raise UndecodableError(
            "already quantized: quant_method auto-round with a rotation_config; give the "
            "checkpoint that it was made from: its weights are rotated"
        )


def linear_class_of(description: Mapping[str, Any]) -> str:
    """Returns the class of BitNet's layers, which says what their scales do.

    Raises:
        UndecodableError: weights are rounded while the model runs, norms stand before them, or the
            class is unknown.
    """
    found = description.get("linear_class", DIVIDING)
    if found not in (DIVIDING, _MULTIPLYING):
        raise _refused_bitnet(
            f"linear_class {found!r:.40}", "nf4conv does not know what scales do in it"
        )
    mode = description.get("quantization_mode", "offline")
    if mode != "offline":
        raise _refused_bitnet(
            f"quantization_mode {mode!r:.40}", "its weights are rounded while the model runs"
        )
    if description.get("use_rms_norm"):
        raise _refused_bitnet("use_rms_norm", "no plain model has a norm before each layer")
    return str(found)


def _refused_bitnet(what: str, why: str) -> UndecodableError:
    """Returns the error of a model that computes more than it stores."""
    return UndecodableError(
        f"already quantized: quant_method bitnet, {what}; give the checkpoint that it was made "
        f"from: {why}"
    )


def _check_torchao(description: Mapping[str, Any]) -> None:
    """Refuses classes of torchao whose words lie as kernels read them.

    Raises:
        UndecodableError: the description names such a class, or none.
    """
    named = [text for text in _texts(description) if _IS_CLASS_OF_TORCHAO.fullmatch(text)]
    for name in named or ["nothing"]:
        if name not in _CLASSES_OF_TORCHAO:
            raise UndecodableError(
                f"already quantized: quant_method torchao, quant_type {name:.60}; nf4conv decodes "
                f"{', '.join(_CLASSES_OF_TORCHAO[:3])} …, so give the checkpoint that it was made "
                f"from"
            )
    for packing in _packings_of_torchao(description):
        if packing not in _PACKINGS_OF_TORCHAO:
            raise UndecodableError(
                f"already quantized: quant_method torchao, packing format {packing!r:.40}; give "
                f"the checkpoint that it was made from: its integers lie as one kernel reads them"
            )


def _packings_of_torchao(description: Mapping[str, Any]) -> Iterator[str]:
    """Yields how integers lie by what the configs of torchao name, which may hold others."""
    for node in mappings_in(description):
        for key in ("int4_packing_format", "intx_packing_format"):
            named = node.get(key)
            if isinstance(named, Mapping):
                named = named.get("_data")
            if isinstance(named, str):
                yield named.lower()


def _texts(tree: Any) -> Iterator[str]:
    """Yields every text in a JSON value but keys."""
    for node in _nodes(tree):
        if isinstance(node, str):
            yield node


def mappings_in(tree: Any) -> Iterator[Mapping[str, Any]]:
    """Yields every object in a JSON value, itself included."""
    for node in _nodes(tree):
        if isinstance(node, Mapping):
            yield node


def _nodes(tree: Any) -> Iterator[Any]:
    """Yields every value in a JSON value, itself included."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, Mapping):
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
