"""Reads what a config says about the quantization of a checkpoint, and refuses by it.

A config says who quantized and, where shapes do not tell, how large the blocks are that share a
scale, and how words lie. What it names that nf4conv does not decode is refused before anything is
read.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nf4conv.errors import UndecodableError
from nf4conv.models.config import LEFTOVERS, levels

METHODS: Final = [
    "fp8", "fbgemm_fp8", "mxfp8", "mxfp4", "compressed-tensors", "modelopt", "bitsandbytes",
    "gptq", "awq", "auto-round", "torchao", "quark",
]  # fmt: skip
"""Values of quant_method whose tensors are decoded."""

_WITH_VARIANTS: Final = ("modelopt", "bitsandbytes", "fp8", "mxfp4", "mxfp8")
"""Beginnings of further values of quant_method that are decoded."""

_ALIASES: Final = {
    "compressed_tensors": "compressed-tensors",
    "intel/auto-round": "auto-round",
    "autoround": "auto-round",
}
"""Other spellings of values of quant_method."""

_KERNEL: Final = "integers that lie as one kernel reads them"
_ROTATED: Final = "its weights are rotated"

_PACKINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "gptq": {"gptq": "GPTQ", "gptq_v2": "GPTQ v2"},
    # what runs the last two is stored as the first is
    "awq": {"gemm": "AWQ", "exllama": "AWQ", "ipex": "AWQ"},
    # dynamic_import_quant_linear_for_packing of AutoRound 0.16 packs zero points one too small for
    # GPTQ, and as they are for GPTQModel and in its own layout, whatever kernel is named. Floats
    # have no words. AutoRound 0.2 names kernels after "gptq:", and packed with AutoGPTQ
    "auto-round": {
        **dict.fromkeys(
            ("auto", "auto_gptq", "gptq", "fp8", "fp8_static", "llm_compressor",
             "gptq:exllamav2", "gptq:exllamav1", "gptq:triton", "gptq:cuda"),
            "GPTQ",
        ),
        **dict.fromkeys(("auto_awq", "awq"), "AWQ"),
        **dict.fromkeys(
            ("gptqmodel", "", "exllamav2", "exllamav1", "triton", "tritonv2", "torch"), "GPTQ v2"
        ),
    },
}  # fmt: skip
"""How words lie, by quant_method and by what a config calls it; the first is what a config means
that does not say."""

_INT4_OF_TORCHAO: Final = ("Int4WeightOnlyConfig", "Float8DynamicActivationInt4WeightConfig")
"""Configs of torchao that store two integers a byte, or eight a word."""

_CLASSES_OF_TORCHAO: Final = (
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "Float8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    *_INT4_OF_TORCHAO,
    "FqnToConfig",
    "ModuleFqnToConfig",
    "int8_weight_only",
)
"""Configs of torchao whose weights are stored as values and scales, and those that hold others."""

_IS_CLASS_OF_TORCHAO: Final = re.compile(r"\w+Config|\w+_weight_only|\w+_weight")

_DECODED_OF_QUARK: Final[Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2"), ("per_tensor", "per_channel", "per_block")),
    "int8": ("per_tensor", "per_channel"),
    "fp4": ("per_group",),
}
"""The values of qscheme that are decoded, by dtype in a config of AMD's Quark."""

_AXES_OF_QUARK: Final = {"per_channel": (0, None), "per_group": (1, -1, None)}
"""The values of ch_axis that are decoded: scales of rows, and of groups of their columns."""

Block = tuple[int, int]  # (rows, columns) that share a scale

Scheme = tuple[int, int | None]
"""(bits of an integer, columns that share a scale; None for all columns of a row)"""


@dataclass(frozen=True)
class Description:
    """The quantization of a checkpoint, as its config describes it."""

    method: str | None  # quant_method, in lower case; None if nothing is described
    blocks: tuple[Block, ...]  # blocks that may share a scale, the most likely first
    schemes: tuple[Scheme, ...] = ()  # how integers may be packed; empty if no bits are named
    packing: str | None = None  # how words lie: "GPTQ", "GPTQ v2" or "AWQ"
    is_reordered: bool = False  # True if columns are not in the order of their groups
    names_block: bool = False  # True if it says which rows and columns share a scale
    has_zeros: bool = False  # True if all integers have zero points


def describe(config: Mapping[str, Any], exported: Mapping[str, Any]) -> Description:
    """Returns what is known about the quantization of a checkpoint, by its config.json and by
    hf_quant_config.json, which ModelOpt writes; raises an UndecodableError if nf4conv does not
    decode it.
    """
    of_mlx = config.get("quantization")
    if isinstance(of_mlx, Mapping) and "bits" in of_mlx and "group_size" in of_mlx:
        raise UndecodableError(
            f"already quantized: by MLX, to {of_mlx['bits']!r:.20} bits; give the checkpoint that "
            f"it was made from"
        )
    if config.get("quantization_bit"):  # 0 in models that are not quantized
        raise UndecodableError(
            f"already quantized: quantization_bit {config['quantization_bit']!r:.20} of ChatGLM; "
            f"give the checkpoint that it was made from"
        )
    found = quantization_of(config)
    of_modelopt = exported.get("quantization")
    if found is None and isinstance(of_modelopt, Mapping):
        found = {"quant_method": "modelopt", **of_modelopt}
    if found is None:
        return Description(None, tuple(_blocks({})))
    method = str(found.get("quant_method") or "compressed-tensors").lower()
    method = _ALIASES.get(method, method)
    if method not in METHODS and not method.startswith(_WITH_VARIANTS):
        name = " ".join(method.split())[:60]
        raise _undecodable(name, "", "a format that nf4conv does not decode")
    for what, why in _refusals(method, found):
        raise _undecodable(method, what, why)
    if method == "torchao":
        schemes = tuple(_schemes_of_torchao(found))
        return Description(method, (), schemes)
    return Description(
        method,
        blocks=tuple(_blocks(found)),
        schemes=tuple(_schemes(found)),
        packing=_packing(method, found),
        is_reordered=found.get("desc_act") is True,
        names_block=found.get("weight_block_size") is not None,
        has_zeros=_all_have_zeros(found),
    )


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the description of a quantization in a config, at whatever level it stands; None if
    there is none.
    """
    for _, level in levels(config):
        for key in LEFTOVERS:
            description = level.get(key)
            if isinstance(description, Mapping):
                return description
    return None


def _undecodable(method: str, what: str, why: str) -> UndecodableError:
    """Returns the error of a quantization: what the config names, and why it is not decoded."""
    named = f"{method}, {what}" if what else method
    return UndecodableError(
        f"already quantized: quant_method {named}; give the checkpoint that it was made from: {why}"
    )


def _refusals(method: str, found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what a description names that is not decoded, and why."""
    if "weight_scale_semantics" in found:
        # dequantize_weight of gptqmodel/nn_modules/qlinear/fp8.py of GPTQModel 7.7.0
        yield "weight_scale_semantics of GPTQModel", "its scales divide, where others multiply"
    if "marlin-24" in _texts(found):
        yield "format marlin-24", _KERNEL
    # rotations of two weights cancel each other, and so do those of queries and keys
    # (compressed_tensors/transform/transform_args.py of compressed-tensors 0.20)
    if not {"input", "output"}.isdisjoint(_texts(found.get("transform_config"))):
        yield "transform_config that rotates activations", _ROTATED
    for key in ("rotation", "rotation_config"):  # of GPTQModel, of AutoRound
        if found.get(key):
            yield key, _ROTATED
    # the first AWQ is named as a backend alone. AMD's Quark writes pack_method, and codes in two's
    # complement where there are no zero points
    # (quark/torch/export/main_export/quant_config_parser.py of Quark 0.13)
    if found.get("backend") == "llm-awq":
        yield "backend 'llm-awq'", _KERNEL
    order = found.get("pack_method", "reorder")
    if order != "reorder" or ("pack_method" in found and found.get("zero_point") is False):
        yield f"pack_method {order!r:.40}", "nf4conv decodes reorder with zero points"
    if method == "auto-round":
        yield from _refusals_of_auto_round(found)
    if method == "torchao":
        yield from _refusals_of_torchao(found)
    if method == "quark":
        yield from _refusals_of_quark(found)
    if method in _PACKINGS and _packing(method, found) is None:
        key, named = _named_packing(method, found)
        decoded = ", ".join(dict.fromkeys(_PACKINGS[method].values()))
        yield f"{key} {named!r:.40}", f"nf4conv decodes the words of {decoded}"


def _named_packing(method: str, found: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the key under which a description says how words lie, and what it says."""
    if method == "auto-round":
        key = "packing_format" if "packing_format" in found else "backend"
        return key, str(found.get(key) or "auto").lower()
    if found.get("is_marlin_format") is True:
        return "checkpoint_format", "marlin"
    for key in ("checkpoint_format", "version", "format"):
        if isinstance(found.get(key), str):
            return key, found[key].lower()
    return "checkpoint_format", next(iter(_PACKINGS[method]))


def _packing(method: str, found: Mapping[str, Any]) -> str | None:
    """Returns how words lie; None if the description does not say, or names another way."""
    if method not in _PACKINGS:
        return None
    _, named = _named_packing(method, found)
    family, _, rest = named.partition(":")
    if method == "auto-round" and family in ("auto_round", "autoround"):
        named = rest.partition(":")[0]
    return _PACKINGS[method].get(named)


def _refusals_of_auto_round(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what AutoRound writes beside integers of few bits, FP8, MXFP4, MXFP8 and NVFP4."""
    values = found.get("data_type", "int")
    # small floats lie as those of compressed-tensors, or in a way of their own
    is_as_compressed = found.get("packing_format") == "auto_round:llm_compressor"
    is_small_float = is_as_compressed and values in ("mx_fp", "nv_fp")
    of_integers = values in ("int", "int_sym", "int_asym_dq")
    if not of_integers and values not in ("fp", "fp8") and not is_small_float:
        yield f"data_type {values!r:.40}", "nf4conv decodes int, fp, mx_fp and nv_fp"
    # with rounded activations, its own layout has zero points one too small as well
    # (qlinear_triton_act.py, from 0.4 on), and more tensors beside
    bits = _first_int(found, "act_bits")
    is_own = (
        _packing("auto-round", found) == "GPTQ v2"
        and "gptqmodel" not in _named_packing("auto-round", found)[1]
    )
    if is_own and of_integers and bits is not None and bits <= 8:
        yield "act_bits '8 or fewer'", "nf4conv decodes rounded weights, not activations"


def _refusals_of_torchao(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields classes of torchao whose words lie as kernels read them."""
    named = [text for text in _texts(found) if _IS_CLASS_OF_TORCHAO.fullmatch(text)]
    for name in named or ["nothing"]:
        if name not in _CLASSES_OF_TORCHAO:
            yield (
                f"quant_type {name:.60}",
                f"nf4conv decodes {', '.join(_CLASSES_OF_TORCHAO[:3])} …",
            )
    for node in _mappings_in(found):
        for key in ("int4_packing_format", "intx_packing_format"):
            packing = node.get(key)
            if isinstance(packing, Mapping):
                packing = packing.get("_data")
            in_order = ("plain", "plain_int32", "unpacked_to_int8")
            if isinstance(packing, str) and packing.lower() not in in_order:
                yield f"packing format {packing.lower()!r:.40}", f"its {_KERNEL}"


def _refusals_of_quark(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what AMD's Quark stores beside FP8, INT8 and MXFP4.

    So quark/torch/export/nn/modules/realquantizer.py and quark/torch/utils/pack.py of Quark 0.13
    write them.
    """
    for weight in _weights_of_quark(found):
        if not isinstance(weight, Mapping):
            yield "weights of two stages", "they have scales of scales"
            continue
        dtype, scheme = str(weight.get("dtype")), str(weight.get("qscheme"))
        axis = weight.get("ch_axis")
        is_decoded = scheme in _DECODED_OF_QUARK.get(dtype, ())
        if not is_decoded or axis not in _AXES_OF_QUARK.get(scheme, (axis,)):
            yield f"weights in {dtype:.20} {scheme:.20}", "they lie in another way"
        scales = weight.get("scale_format")
        if dtype == "fp4" and scales not in ("e8m0", "float32", None):
            yield f"scale_format {scales!r:.40}", "its scales are no powers of two"
    exported = found.get("export")
    stored = exported.get("weight_format") if isinstance(exported, Mapping) else None
    if stored not in ("real_quantized", None):
        yield f"weight_format {stored!r:.40}", "its weights are stored as floats"
    for node in _mappings_in(found.get("algo_config")):
        if str(node.get("name")).lower() in ("rotation", "quarot"):
            yield "algo_config rotation", _ROTATED


def _weights_of_quark(found: Mapping[str, Any]) -> Iterator[Any]:
    """Yields what a config of Quark says of weights: of all layers, and of some."""
    layers = [found.get("global_quant_config")]
    for key in ("layer_quant_config", "layer_type_quant_config"):
        special = found.get(key)
        if isinstance(special, Mapping):
            layers += special.values()
    for layer in layers:
        if isinstance(layer, Mapping) and layer.get("weight") is not None:
            yield layer["weight"]


def _blocks(found: Mapping[str, Any]) -> Iterator[Block]:
    """Yields the shapes of blocks that share a scale, as far as a description names any."""
    # transformers has a default; AutoRound writes the key under its own method
    default = (128, 128) if str(found.get("quant_method")) == "fp8" else None
    named = [found.get("weight_block_size", default), (1, found.get("group_size"))]
    for weights in (*_weights_of_quark(found), *_weights_of_groups(found)):
        if isinstance(weights, Mapping):
            named += [weights.get("block_size"), weights.get("block_structure")]
            named.append((1, weights.get("group_size")))
    for block in named:
        is_pair = isinstance(block, (list, tuple)) and len(block) == 2
        if is_pair and all(type(size) is int and size > 0 for size in block):
            yield block[0], block[1]


def _schemes(found: Mapping[str, Any]) -> Iterator[Scheme]:
    """Yields how integers may be packed, as far as a description says."""
    weights = [found]
    for key in ("dynamic", "extra_config"):  # of GPTQModel, of AutoRound
        of_layers = found.get(key)
        if isinstance(of_layers, Mapping):
            weights += [each for each in of_layers.values() if isinstance(each, Mapping)]
    weights += _weights_of_groups(found)
    for each in weights:
        bits = _first_int(each, "bits", "num_bits", "w_bit")
        if bits is None and each is not found:
            bits = _first_int(found, "bits", "w_bit")
        size = _first_int(each, "group_size", "q_group_size")
        if bits is not None:
            yield bits, size if size is not None and size > 0 else None


def _weights_of_groups(found: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the weights of the groups of layers that a config of compressed-tensors describes."""
    groups = found.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping):
            yield group["weights"]


def _all_have_zeros(found: Mapping[str, Any]) -> bool:
    """Returns True if all groups of layers of compressed-tensors have zero points."""
    are_symmetric = [weights.get("symmetric", True) for weights in _weights_of_groups(found)]
    return bool(are_symmetric) and not any(are_symmetric)


def _schemes_of_torchao(found: Mapping[str, Any]) -> Iterator[Scheme]:
    """Yields the groups of integers of 4 bits that the configs of torchao name."""
    for node in _mappings_in(found):
        if node.get("_type") not in _INT4_OF_TORCHAO:
            continue
        fields = node.get("_data")
        size = _first_int(fields, "group_size") if isinstance(fields, Mapping) else None
        yield 4, 128 if size is None else size  # the size that both have by default


def _first_int(fields: Mapping[str, Any], *keys: str) -> int | None:
    """Returns the first whole number that there is under these keys."""
    for key in keys:
        if type(fields.get(key)) is int:
            return int(fields[key])
    return None


def _texts(tree: Any) -> Iterator[str]:
    """Yields every text in a JSON value but keys."""
    return (node for node in _nodes(tree) if isinstance(node, str))


def _mappings_in(tree: Any) -> Iterator[Mapping[str, Any]]:
    """Yields every object in a JSON value, itself included."""
    return (node for node in _nodes(tree) if isinstance(node, Mapping))


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
