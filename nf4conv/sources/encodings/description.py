"""Reads what a config says about the quantization of a checkpoint."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nf4conv.errors import UndecodableError
from nf4conv.models.config import LEFTOVERS, levels

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
)
"""Values of quant_method whose tensors are decoded."""

_WITH_VARIANTS: Final = ("modelopt", "bitsandbytes", "fp8", "mxfp4", "mxfp8")
"""Beginnings of further values of quant_method that are decoded."""

_ALIASES: Final = {
    "compressed_tensors": "compressed-tensors",
    "intel/auto-round": "auto-round",
    "autoround": "auto-round",
}
"""Other spellings of values of quant_method."""

_REFUSED: Final = {
    **dict.fromkeys(
        ("aqlm", "vptq", "spqr", "higgs", "quip", "quip_sharp", "squeezellm", "exl2", "exl3"),
        "a codebook of its own",
    ),
    **dict.fromkeys(
        ("marlin", "gptq_marlin", "awq_marlin", "bitblas", "gptq_bitblas", "awq_bitblas", "eetq"),
        "integers that lie as one kernel reads them",
    ),
    **dict.fromkeys(
        ("quark", "quanto", "sinq", "metal", "gemma"), "packed integers in a layout of its own"
    ),
    **dict.fromkeys(
        ("fp_quant", "fouroversix", "nvfp4"), "small floats in a layout of its own, or rotated"
    ),
    "bitnet": "ternary weights, which 4 bits would only enlarge",
    "gguf": "llama.cpp's block formats, which nf4conv reads from the .gguf file itself",
}
"""Values of quant_method that are refused, with the reason."""

_IS_CLASS_OF_TORCHAO: Final = re.compile(r"\w+Config|\w+_weight_only|\w+_weight")

_OF_ACTIVATIONS: Final = frozenset(("input", "output"))
"""Where compressed-tensors rotates activations, in the words of its configs."""

_CLASSES_OF_TORCHAO: Final = (
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "Float8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "FqnToConfig",
    "ModuleFqnToConfig",
    "int8_weight_only",
)
"""Configs of torchao whose weights are stored as 8-bit values and scales, and those that hold
others."""

_PACKINGS: Final = {
    "gptq": {"gptq": "GPTQ", "gptq_v2": "GPTQ v2"},
    # what runs the last two is stored as the first is
    "awq": {"gemm": "AWQ", "exllama": "AWQ", "ipex": "AWQ"},
}
"""How words lie, by quant_method and by what a config calls it; the first is what a config means
that does not say."""

_PACKING_KEYS: Final = ("checkpoint_format", "version", "format")
"""Where configs of GPTQ and AWQ say how words lie."""

_KERNELS_OF_AUTO_ROUND: Final = ("", "exllamav2", "exllamav1", "triton", "tritonv2", "torch")
"""What may follow "auto_round:" in configs of old releases: a kernel, which changes no layout."""

Block = tuple[int, int]  # (rows, columns) that share a scale

Scheme = tuple[int, int | None]
"""(bits of an integer, columns that share a scale; None for all columns of a row)"""


@dataclass(frozen=True)
class Description:
    """The quantization of a checkpoint, as its config describes it.

    Attributes:
        method: quant_method, in lower case; None if the config describes no quantization.
        blocks: the shapes of blocks that may share a scale, the most likely one first.
        schemes: how integers may be packed; empty if the config names no bits.
        packing: how words lie: "GPTQ", "GPTQ v2" or "AWQ"; None for methods without a choice.
    """

    method: str | None
    blocks: tuple[Block, ...]
    schemes: tuple[Scheme, ...] = ()
    packing: str | None = None


def describe(config: Mapping[str, Any], exported: Mapping[str, Any]) -> Description:
    """Returns what is known about the quantization of a checkpoint.

    Args:
        config: the content of config.json.
        exported: the content of hf_quant_config.json, which ModelOpt writes; empty if there is
            none.

    Raises:
        UndecodableError: nf4conv does not decode the method.
    """
    found = quantization_of(config)
    of_modelopt = exported.get("quantization")
    if found is None and isinstance(of_modelopt, Mapping):
        found = {"quant_method": "modelopt", **of_modelopt}
    if found is None:
        return Description(None, tuple(_blocks({})))
    method = str(found.get("quant_method") or "compressed-tensors").lower()
    method = _ALIASES.get(method, method)
    if method not in _ACCEPTED and not method.startswith(_WITH_VARIANTS):
        reason = _REFUSED.get(method, "a format that nf4conv does not decode")
        raise UndecodableError(
            f"already quantized: quant_method {' '.join(method.split()):.60}; give the checkpoint "
            f"that it was made from: {reason}"
        )
    if method == "compressed-tensors":
        _check_formats(found)
        _check_transforms(found)
    if method == "auto-round":
        _check_auto_round(found)
    if method == "torchao":
        _check_torchao(found)
    packing = _packing(method, found)
    return Description(method, tuple(_blocks(found)), tuple(_schemes(found)), packing)


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the description of a quantization in a config, at whatever level it stands.

    Returns:
        The description as it stands in the config; None if there is none.
    """
    for _, level in levels(config):
        for key in LEFTOVERS:
            description = level.get(key)
            if isinstance(description, Mapping):
                return description
    return None


def _blocks(description: Mapping[str, Any]) -> Iterator[Block]:
    """Yields the shapes of blocks that share a scale, as far as a description names any."""
    for block in _blocks_named(description):
        is_pair = isinstance(block, (list, tuple)) and len(block) == 2
        if is_pair and all(type(size) is int and size > 0 for size in block):
            yield block[0], block[1]


def _blocks_named(description: Mapping[str, Any]) -> Iterator[Any]:
    """Yields everything that may describe a block, checked or not."""
    if str(description.get("quant_method")) == "fp8":
        yield description.get("weight_block_size", (128, 128))  # the default of transformers
    yield 1, description.get("group_size")
    for group in _config_groups(description):
        weights = group.get("weights")
        if isinstance(weights, Mapping):
            yield weights.get("block_structure")
            yield 1, weights.get("group_size")


def _check_formats(description: Mapping[str, Any]) -> None:
    """Refuses the one format of compressed-tensors whose tensors have the names of another."""
    formats = [description.get("format")]
    formats += [group.get("format") for group in _config_groups(description)]
    if "marlin-24" in formats:
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
    """Refuses what AutoRound writes beside integers of few bits and FP8.

    Raises:
        UndecodableError: the description names other values, or rotated ones.
    """
    values = description.get("data_type", "int")
    if values not in ("int", "int_sym", "int_asym_dq", "fp", "fp8"):
        raise UndecodableError(
            f"already quantized: quant_method auto-round, data_type {values!r:.40}; nf4conv "
            f"decodes int and fp, so give the checkpoint that it was made from"
        )
    if description.get("rotation_config"):
        raise UndecodableError(
            "already quantized: quant_method auto-round with a rotation_config; give the "
            "checkpoint that it was made from: its weights are rotated"
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


def _packing(method: str, description: Mapping[str, Any]) -> str | None:
    """Returns how the words of GPTQ, AWQ or AutoRound lie.

    Raises:
        UndecodableError: in a way that nf4conv does not decode.
    """
    if method == "auto-round":
        return _packing_of_auto_round(description)
    known = _PACKINGS.get(method)
    if known is None:
        return None
    if description.get("is_marlin_format") is True:
        description = {"checkpoint_format": "marlin"}
    for key in _PACKING_KEYS:
        named = description.get(key)
        if not isinstance(named, str):
            continue
        packing = known.get(named.lower())
        if packing is None:
            raise _other_packing(method, key, named, " and ".join(tuple(known)[:2]))
        return packing
    return next(iter(known.values()))


def _packing_of_auto_round(description: Mapping[str, Any]) -> str:
    """Returns how the words of AutoRound lie.

    dynamic_import_quant_linear_for_packing of AutoRound 0.16 packs by the same rule
    (auto_round/export/export_to_autoround/export.py): with zero points one too small for GPTQ, and
    as they are for GPTQModel and in its own layout.

    Raises:
        UndecodableError: in a way that nf4conv does not decode.
    """
    key = "packing_format" if "packing_format" in description else "backend"
    named = str(description.get(key) or "auto").lower()
    family, _, rest = named.partition(":")
    if named == "auto":
        return "GPTQ"
    if family in ("auto_round", "autoround"):
        layout = rest.partition(":")[0]
        if layout in ("auto_awq", "awq"):
            return "AWQ"
        if layout in ("auto_gptq", "gptq", "fp8", "fp8_static"):  # FP8 has no words
            return "GPTQ"
        if layout == "gptqmodel" or layout in _KERNELS_OF_AUTO_ROUND:
            return "GPTQ v2"
    known = "auto_round:auto_gptq, auto_round:gptqmodel and auto_round:auto_awq"
    raise _other_packing("auto-round", key, named, known)


def _other_packing(method: str, key: str, named: str, known: str) -> UndecodableError:
    """Returns the error of words that lie in another way."""
    return UndecodableError(
        f"already quantized: quant_method {method}, {key} {named.lower()!r:.40}; nf4conv decodes "
        f"{known}, so give the checkpoint that it was made from"
    )


def _schemes(description: Mapping[str, Any]) -> Iterator[Scheme]:
    """Yields how integers may be packed, as far as a description says."""
    weights = [description]
    for key in ("dynamic", "extra_config"):  # of GPTQModel, of AutoRound
        of_layers = description.get(key)
        if isinstance(of_layers, Mapping):
            weights += [found for found in of_layers.values() if isinstance(found, Mapping)]
    for group in _config_groups(description):
        if isinstance(group.get("weights"), Mapping):
            weights.append(group["weights"])
    for each in weights:
        bits = _first_int(each, "bits", "num_bits", "w_bit")
        if bits is None and each is not description:
            bits = _first_int(description, "bits", "w_bit")
        size = _first_int(each, "group_size", "q_group_size")
        if bits is not None:
            yield bits, size if size is not None and size > 0 else None


def _config_groups(description: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the groups of layers that a config of compressed-tensors describes."""
    groups = description.get("config_groups")
    if isinstance(groups, Mapping):
        yield from (group for group in groups.values() if isinstance(group, Mapping))


def _texts(tree: Any) -> Iterator[str]:
    """Yields every text in a JSON value but keys."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, Mapping):
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _first_int(fields: Mapping[str, Any], *keys: str) -> int | None:
    """Returns the first whole number that there is under these keys."""
    for key in keys:
        if type(fields.get(key)) is int:
            return int(fields[key])
    return None
