"""Reads what a config says about the quantization of a checkpoint, and refuses by it.

A config says who quantized and, where shapes do not tell, how large the blocks are that share a
scale, and how words lie. What it names that nf4conv does not decode is refused before anything is
read; docs/sources.md says why each of these is.
"""

import re
from collections.abc import Iterator, Mapping
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

_PACKINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "gptq": {"gptq": "GPTQ", "gptq_v2": "GPTQ v2"},
    # what runs the last two is stored as the first is
    "awq": {"gemm": "AWQ", "exllama": "AWQ", "ipex": "AWQ"},
    # dynamic_import_quant_linear_for_packing of AutoRound 0.16 packs zero points one too small for
    # GPTQ, and as they are for GPTQModel and in its own layout, whatever kernel is named. Floats
    # have no words
    "auto-round": {
        **dict.fromkeys(
            ("auto", "auto_gptq", "gptq", "fp8", "fp8_static", "llm_compressor"), "GPTQ"
        ),
        **dict.fromkeys(("auto_awq", "awq"), "AWQ"),
        **dict.fromkeys(
            ("gptqmodel", "", "exllamav2", "exllamav1", "triton", "tritonv2", "torch"), "GPTQ v2"
        ),
    },
}
"""How words lie, by quant_method and by what a config calls it; the first is what a config means
that does not say."""

_INT4_OF_TORCHAO: Final = ("Int4WeightOnlyConfig", "Float8DynamicActivationInt4WeightConfig")
"""Configs of torchao that store two integers a byte."""

_CLASSES_OF_TORCHAO: Final = (
    "Int8WeightOnlyConfig",
    "Float8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    *_INT4_OF_TORCHAO,
    "FqnToConfig",
    "ModuleFqnToConfig",
    "int8_weight_only",
)
"""Configs of torchao whose weights are stored as values and scales, and those that hold others."""

_IS_CLASS_OF_TORCHAO: Final = re.compile(r"\w+Config|\w+_weight_only|\w+_weight")

_OF_QUARK: Final[Mapping[str, tuple[tuple[str, ...], tuple[int | None, ...]]]] = {
    "per_tensor": (("fp8_e4m3", "fp8_e5m2", "int8"), ()),
    "per_channel": (("fp8_e4m3", "fp8_e5m2", "int8"), (0, None)),
    "per_block": (("fp8_e4m3", "fp8_e5m2"), ()),
    "per_group": (("fp4",), (1, -1, None)),
}
"""The weights of AMD's Quark that are decoded: dtypes and values of ch_axis by qscheme; no values
where they do not matter."""

_NOT_OF_WEIGHTS: Final = (
    "input_activations", "output_activations", "kv_cache_scheme",  # of compressed-tensors
    "input_tensors", "output_tensors", "bias", "softmax_quant_spec",  # of Quark
)  # fmt: skip
"""Keys under which a config describes what is no weight."""

Block = tuple[int, int]  # (rows, columns) that share a scale

Scheme = tuple[int, int | None]
"""(bits of an integer, columns that share a scale; None for all columns of a row)"""


@dataclass(frozen=True)
class Description:
    """The quantization of a checkpoint, as its config describes it."""

    method: str | None  # quant_method, in lower case; None if nothing is described
    blocks: tuple[Block, ...] = ()  # blocks that may share a scale, the most likely first
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
        raise _undecodable("by MLX")
    if config.get("quantization_bit"):  # 0 in models that are not quantized
        raise _undecodable(f"quantization_bit {config['quantization_bit']!r:.20} of ChatGLM")
    found = quantization_of(config)
    of_modelopt = exported.get("quantization")
    if found is None and isinstance(of_modelopt, Mapping):
        found = {"quant_method": "modelopt", **of_modelopt}
    if found is None:
        return Description(None)
    method = str(found.get("quant_method") or "compressed-tensors").lower()
    method = _ALIASES.get(method, method)
    if method not in METHODS and not method.startswith(_WITH_VARIANTS):
        raise _undecodable("quant_method " + " ".join(method.split())[:60])
    for what in _refused(method, found):
        raise _undecodable(f"quant_method {method}, {what}")
    symmetry = [node.get("symmetric", True) for node in _objects(found) if "num_bits" in node]
    return Description(
        method,
        blocks=tuple(_blocks(found)),
        schemes=tuple(_schemes(found)),
        packing=_packing(method, found),
        is_reordered=found.get("desc_act") is True,
        names_block=found.get("weight_block_size") is not None,
        has_zeros=bool(symmetry) and not any(symmetry),
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


def _undecodable(what: str) -> UndecodableError:
    return UndecodableError(
        f"already quantized: {what}, which nf4conv does not decode; give the checkpoint that it "
        f"was made from"
    )


def _refused(method: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a description names that is not decoded."""
    # scales of GPTQModel divide (dequantize_weight of gptqmodel/nn_modules/qlinear/fp8.py, 7.7.0);
    # it and AutoRound name rotations
    for key in ("weight_scale_semantics", "rotation", "rotation_config"):
        if found.get(key):
            yield key
    texts = {node.lower() for node in _nodes(found) if isinstance(node, str)}
    for word in ("marlin-24", "llm-awq", "rotation", "quarot", "fake_quantized"):
        if word in texts:
            yield word
    # rotations of two weights cancel each other, and so do those of queries and keys
    # (compressed_tensors/transform/transform_args.py of compressed-tensors 0.20)
    if any(node in ("input", "output") for node in _nodes(found.get("transform_config"))):
        yield "transform_config that rotates activations"
    # Quark writes pack_method, and codes in two's complement where there are no zero points
    # (quark/torch/export/main_export/quant_config_parser.py of Quark 0.13)
    order = found.get("pack_method", "reorder")
    if order != "reorder" or ("pack_method" in found and found.get("zero_point") is False):
        yield f"pack_method {order!r:.40}"
    if method == "auto-round":
        yield from _refused_of_auto_round(found)
    if method == "torchao":
        yield from _refused_of_torchao(found)
    if method == "quark":
        yield from _refused_of_quark(found)


def _packing(method: str, found: Mapping[str, Any]) -> str | None:
    """Returns how words lie; None for methods without any. Raises an UndecodableError if the
    description names another way.
    """
    known = _PACKINGS.get(method)
    if known is None:
        return None
    if method == "auto-round":
        words = str(found.get("packing_format") or found.get("backend") or "auto").lower()
        family, _, rest = words.partition(":")
        if family in ("auto_round", "autoround"):
            words = rest.partition(":")[0]
    elif found.get("is_marlin_format") is True:
        words = "marlin"
    else:
        named = [found.get(key) for key in ("checkpoint_format", "version", "format")]
        texts = [text.lower() for text in named if isinstance(text, str)]
        words = texts[0] if texts else next(iter(known))
    if words not in known:
        raise _undecodable(f"quant_method {method}, words of {words!r:.40}")
    return known[words]


def _refused_of_auto_round(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields what AutoRound writes beside integers of few bits, FP8, MXFP4, MXFP8 and NVFP4."""
    kind = found.get("data_type", "int")
    is_integer = kind in ("int", "int_sym", "int_asym_dq")
    # small floats lie as those of compressed-tensors, or in a way of their own
    is_as_compressed = found.get("packing_format") == "auto_round:llm_compressor"
    is_small_float = is_as_compressed and kind in ("mx_fp", "nv_fp")
    if not is_integer and not is_small_float and kind not in ("fp", "fp8"):
        yield f"data_type {kind!r:.40}"
    # then its own layout has zero points one too small (qlinear_triton_act.py, from 0.4 on)
    bits = _first_int(found, "act_bits")
    if is_integer and bits is not None and bits <= 8 and _packing("auto-round", found) != "GPTQ":
        yield f"act_bits {bits}"


def _refused_of_torchao(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields classes of torchao whose words lie as kernels read them."""
    texts = [node for node in _nodes(found) if isinstance(node, str)]
    named = [text for text in texts if _IS_CLASS_OF_TORCHAO.fullmatch(text)]
    for name in named or ["nothing"]:
        if name not in _CLASSES_OF_TORCHAO:
            yield f"quant_type {name:.60}"
    for node in _objects(found):
        packing = node.get("int4_packing_format")
        if isinstance(packing, Mapping):
            packing = packing.get("_data")
        if isinstance(packing, str) and packing.lower() != "plain":
            yield f"packing format {packing.lower()!r:.40}"


def _refused_of_quark(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields what AMD's Quark stores beside FP8, INT8 and MXFP4.

    So quark/torch/export/nn/modules/realquantizer.py and quark/torch/utils/pack.py of Quark 0.13
    write them.
    """
    for node in _objects(found):
        scheme = node.get("qscheme")
        if scheme is None:
            continue
        dtypes, axes = _OF_QUARK.get(str(scheme), ((), ()))
        if node.get("dtype") not in dtypes or (axes and node.get("ch_axis") not in axes):
            kind = f"{node.get('dtype')} {scheme}"
            yield f"weights in {kind:.40}"
        # other scales of FP4 are no powers of two
        scales = node.get("scale_format")
        if scheme == "per_group" and scales not in ("e8m0", "float32", None):
            yield f"scale_format {scales!r:.40}"


def _blocks(found: Mapping[str, Any]) -> Iterator[Block]:
    """Yields the shapes of blocks that share a scale, as far as a description names any."""
    named: list[Any] = []
    if found.get("quant_method") == "fp8" and "weight_block_size" not in found:
        named.append((128, 128))  # the default of transformers; AutoRound writes the key
    for node in _objects(found):
        named += [node.get(key) for key in ("weight_block_size", "block_structure", "block_size")]
        named.append((1, node.get("group_size")))
    for block in named:
        is_pair = isinstance(block, (list, tuple)) and len(block) == 2
        if is_pair and all(type(size) is int and size > 0 for size in block):
            yield block[0], block[1]


def _schemes(found: Mapping[str, Any]) -> Iterator[Scheme]:
    """Yields how integers may be packed, as far as a description says."""
    for node in _objects(found):
        bits = _first_int(node, "bits", "num_bits", "w_bit")
        size = _first_int(node, "group_size", "q_group_size")
        if node.get("_type") in _INT4_OF_TORCHAO:
            fields = node.get("_data")
            bits, size = 4, 128  # the size that both have by default
            if isinstance(fields, Mapping):
                size = _first_int(fields, "group_size") or size
        elif bits is None and size is not None:  # of layers that differ
            bits = _first_int(found, "bits", "w_bit")
        if bits is not None:
            yield bits, size if size is not None and size > 0 else None


def _first_int(fields: Mapping[str, Any], *keys: str) -> int | None:
    """Returns the first whole number that there is under these keys."""
    for key in keys:
        if type(fields.get(key)) is int:
            return int(fields[key])
    return None


def _objects(tree: Any) -> Iterator[Mapping[str, Any]]:
    """Yields every object in a JSON value that describes weights, itself first."""
    return (node for node in _nodes(tree) if isinstance(node, Mapping))


def _nodes(tree: Any) -> Iterator[Any]:
    """Yields every value in a JSON value that describes weights, itself first."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        inner: list[Any] = []
        if isinstance(node, Mapping):
            inner = [value for key, value in node.items() if key not in _NOT_OF_WEIGHTS]
        elif isinstance(node, list):
            inner = node
        waiting += reversed(inner)
