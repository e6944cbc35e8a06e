"""Reads what a config says about the quantization of a checkpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nf4conv.errors import UndecodableError
from nf4conv.models.config import LEFTOVERS, levels
from nf4conv.sources.encodings.quark import integers_of_quark, weights_of_quark
from nf4conv.sources.encodings.refused import (
    INT4_OF_TORCHAO,
    check_decodable,
    check_no_mlx,
    linear_class_of,
    mappings_in,
)

_ALIASES: Final = {
    "compressed_tensors": "compressed-tensors",
    "intel/auto-round": "auto-round",
    "autoround": "auto-round",
}
"""Other spellings of values of quant_method."""

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

_KERNELS_OF_AUTO_GPTQ: Final = ("exllamav2", "exllamav1", "triton", "cuda")
"""Kernels that configs of AutoRound 0.2 name after "gptq:". It packed with AutoGPTQ."""

_REORDERED: Final = "reorder"
"""The value of pack_method that AMD's Quark writes for words of AWQ."""

_BITS_OF_DTYPES: Final = {f"int{bits}": bits for bits in range(1, 8)}
"""Bits by the dtype of weights in a config of torchao."""

_HOLDS_OTHERS: Final = "fqn_to_config"
"""The field of torchao's FqnToConfig that has the configs of layers."""

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
        packing: how words lie: "GPTQ", "GPTQ v2" or "AWQ"; of Quark "int4" or "uint4", which lie as
            those of AWQ; of BitNet the class of its layers; None for methods without a choice.
        bits_in_bytes: how many bits integers were rounded to that take a byte each: fewer than 8
            where torchao's config names as many for all.
        is_reordered: True if the config says that columns are not in the order of their groups.
        names_release: True if the config says which release of its tool wrote it.
    """

    method: str | None
    blocks: tuple[Block, ...]
    schemes: tuple[Scheme, ...] = ()
    packing: str | None = None
    bits_in_bytes: int = 8
    is_reordered: bool = False
    names_release: bool = False


def describe(config: Mapping[str, Any], exported: Mapping[str, Any]) -> Description:
    """Returns what is known about the quantization of a checkpoint.

    Args:
        config: the content of config.json.
        exported: the content of hf_quant_config.json, which ModelOpt writes; empty if there is
            none.

    Raises:
        UndecodableError: nf4conv does not decode the method.
    """
    check_no_mlx(config)
    found = quantization_of(config)
    of_modelopt = exported.get("quantization")
    if found is None and isinstance(of_modelopt, Mapping):
        found = {"quant_method": "modelopt", **of_modelopt}
    if found is None:
        return Description(None, tuple(_blocks({})))
    method = str(found.get("quant_method") or "compressed-tensors").lower()
    method = _ALIASES.get(method, method)
    check_decodable(method, found)
    packing = _packing(method, found)
    if method == "torchao":
        schemes = tuple(_schemes_of_torchao(found))
        return Description(method, (), schemes, packing, _bits_in_bytes(found))
    return Description(
        method,
        blocks=tuple(_blocks(found)),
        schemes=tuple(_schemes(found)),
        packing=packing,
        is_reordered=found.get("desc_act") is True,
        names_release=isinstance(found.get("version"), str),
    )


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
    else:
        yield description.get("weight_block_size")  # of AutoRound
    yield 1, description.get("group_size")
    if description.get("quant_method") == "quark":
        for layers in weights_of_quark(description):
            yield layers.get("block_size")
    for group in _config_groups(description):
        weights = group.get("weights")
        if isinstance(weights, Mapping):
            yield weights.get("block_structure")
            yield 1, weights.get("group_size")


def _packing(method: str, description: Mapping[str, Any]) -> str | None:
    """Returns how the words of GPTQ, AWQ, AutoRound or Quark lie, or the class of BitNet's layers.

    Raises:
        UndecodableError: in a way that nf4conv does not decode.
    """
    if method == "auto-round":
        return _packing_of_auto_round(description)
    if method == "quark":
        return integers_of_quark(description)
    if method == "bitnet":
        return linear_class_of(description)
    known = _PACKINGS.get(method)
    if known is None:
        return None
    if method == "awq":
        _check_awq(description)
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


def _check_awq(description: Mapping[str, Any]) -> None:
    """Refuses words that are called AWQ's and are not.

    The first AWQ, llm-awq, is named as a backend alone. AMD's Quark writes pack_method too, and
    codes in two's complement where there are no zero points
    (quark/torch/export/main_export/quant_config_parser.py of Quark 0.13).

    Raises:
        UndecodableError: the description names such words.
    """
    if description.get("backend") == "llm-awq":
        raise _other_packing("awq", "backend", "llm-awq", "gemm and exllama")
    order = description.get("pack_method", _REORDERED)
    if order != _REORDERED:
        raise _other_packing("awq", "pack_method", str(order), _REORDERED)
    if "pack_method" in description and description.get("zero_point") is False:
        raise _other_packing("awq", "zero_point", "false", "those of Quark that have them")


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
    if family == "gptq" and rest in _KERNELS_OF_AUTO_GPTQ:
        return "GPTQ"
    if family in ("auto_round", "autoround"):
        layout = rest.partition(":")[0]
        if layout in ("auto_awq", "awq"):
            return "AWQ"
        # floats have no words
        if layout in ("auto_gptq", "gptq", "fp8", "fp8_static", "llm_compressor"):
            return "GPTQ"
        if layout in _KERNELS_OF_AUTO_ROUND and _rounds_activations(description):
            raise _other_packing("auto-round", "act_bits", "8 or fewer", "weights alone")
        if layout == "gptqmodel" or layout in _KERNELS_OF_AUTO_ROUND:
            return "GPTQ v2"
    known = "auto_round:auto_gptq, auto_round:gptqmodel and auto_round:auto_awq"
    raise _other_packing("auto-round", key, named, known)


def _rounds_activations(description: Mapping[str, Any]) -> bool:
    """Returns True if AutoRound rounds activations to integers, too.

    Then its own layout has zero points one too small as well, as qlinear_triton_act.py of releases
    from 0.4 on packs them (auto_round/export/export_to_autoround/), and more tensors beside.
    """
    bits = _first_int(description, "act_bits")
    is_of_integers = description.get("data_type", "int") in ("int", "int_sym", "int_asym_dq")
    return bits is not None and bits <= 8 and is_of_integers


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


def _schemes_of_torchao(description: Mapping[str, Any]) -> Iterator[Scheme]:
    """Yields the groups of integers of 4 bits that the configs of torchao name."""
    for node in mappings_in(description):
        if node.get("_type") not in INT4_OF_TORCHAO:
            continue
        fields = node.get("_data")
        size = _first_int(fields, "group_size") if isinstance(fields, Mapping) else None
        yield 4, 128 if size is None else size  # the size that both have by default


def _bits_in_bytes(description: Mapping[str, Any]) -> int:
    """Returns how many bits the integers have that torchao stores in a byte each.

    Returns:
        8, unless all configs of layers name the same dtype of fewer bits.
    """
    named = set()
    for node in mappings_in(description):
        fields = node.get("_data")
        is_of_layers = str(node.get("_type")).endswith("Config")
        if not is_of_layers or not isinstance(fields, Mapping) or _HOLDS_OTHERS in fields:
            continue
        dtype = fields.get("weight_dtype")
        named.add(str(dtype.get("_data")) if isinstance(dtype, Mapping) else "int8")
    if len(named) != 1:
        return 8
    return _BITS_OF_DTYPES.get(named.pop(), 8)


def _config_groups(description: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the groups of layers that a config of compressed-tensors describes."""
    groups = description.get("config_groups")
    if isinstance(groups, Mapping):
        yield from (group for group in groups.values() if isinstance(group, Mapping))


def _first_int(fields: Mapping[str, Any], *keys: str) -> int | None:
    """Returns the first whole number that there is under these keys."""
    for key in keys:
        if type(fields.get(key)) is int:
            return int(fields[key])
    return None
