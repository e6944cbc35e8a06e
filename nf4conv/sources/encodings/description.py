"""Reads what a config says about the quantization of a checkpoint."""

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
    "hqq",
)
"""Values of quant_method whose tensors are decoded. ModelOpt has variants, such as modelopt_fp4."""

_REFUSED: Final = {
    **dict.fromkeys(
        ("auto-round", "intel/auto-round", "autoround", "sinq"),
        "packed integers in a layout of its own",
    ),
    **dict.fromkeys(
        ("aqlm", "vptq", "spqr", "higgs", "quip", "exl2", "exl3", "fp_quant"),
        "a codebook of its own",
    ),
    "bitnet": "ternary weights, which 4 bits would only enlarge",
    "gguf": "llama.cpp's block formats",
    "torchao": "pickled tensor classes",
}
"""Values of quant_method that are refused, with the reason."""

_LAYOUTS: Final = {
    "gptq": ("gptq", "gptq_v2"),
    "awq": ("gemm", "exllama", "ipex"),  # what runs the last two is stored as the first is
}
"""How the words of a method may lie, by quant_method; the first is what a config means that does
not say."""

_LAYOUT_KEYS: Final = ("checkpoint_format", "version", "format")
"""Where configs of GPTQ and AWQ say how words lie."""

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
        layout: how the words of GPTQ or AWQ lie; None for other methods.
    """

    method: str | None
    blocks: tuple[Block, ...]
    schemes: tuple[Scheme, ...] = ()
    layout: str | None = None


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
    if not method.startswith(_ACCEPTED):
        reason = _REFUSED.get(method, "a format that nf4conv does not decode")
        raise UndecodableError(
            f"already quantized: quant_method {method}; give the checkpoint that it was made "
            f"from: {reason}"
        )
    if method == "compressed-tensors":
        _check_formats(found)
    layout = _layout(method, found)
    return Description(method, tuple(_blocks(found)), tuple(_schemes(found)), layout)


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


def _layout(method: str, description: Mapping[str, Any]) -> str | None:
    """Returns how the words of GPTQ or AWQ lie.

    Raises:
        UndecodableError: in a way that nf4conv does not decode.
    """
    known = _LAYOUTS.get(method)
    if known is None:
        return None
    if description.get("is_marlin_format") is True:
        description = {"checkpoint_format": "marlin"}
    for key in _LAYOUT_KEYS:
        named = description.get(key)
        if not isinstance(named, str):
            continue
        layout = named.lower()
        if layout not in known:
            raise UndecodableError(
                f"already quantized: quant_method {method}, {key} {layout!r:.40}; nf4conv decodes "
                f"{' and '.join(known[:2])}, so give the checkpoint that it was made from"
            )
        return layout
    return known[0]


def _schemes(description: Mapping[str, Any]) -> Iterator[Scheme]:
    """Yields how integers may be packed, as far as a description says."""
    weights = [description]
    weights += [found for found in _dynamic(description) if isinstance(found, Mapping)]
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


def _dynamic(description: Mapping[str, Any]) -> Iterator[Any]:
    """Yields what GPTQModel says of layers that differ from the others."""
    dynamic = description.get("dynamic")
    if isinstance(dynamic, Mapping):
        yield from dynamic.values()


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
