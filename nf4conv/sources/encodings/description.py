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
)
"""Values of quant_method whose tensors are decoded. ModelOpt has variants, such as modelopt_fp4."""

PACKED_INTEGERS: Final = "4-bit integers, which would lose precision a second time"
"""The reason why checkpoints of GPTQ, AWQ and the like are refused."""

_REFUSED: Final = {
    **dict.fromkeys(
        ("gptq", "awq", "auto-round", "intel/auto-round", "autoround", "hqq", "sinq"),
        PACKED_INTEGERS,
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

Block = tuple[int, int]  # (rows, columns) that share a scale


@dataclass(frozen=True)
class Description:
    """The quantization of a checkpoint, as its config describes it.

    Attributes:
        method: quant_method, in lower case; None if the config describes no quantization.
        blocks: the shapes of blocks that may share a scale, the most likely one first.
    """

    method: str | None
    blocks: tuple[Block, ...]


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
    return Description(method, tuple(_blocks(found)))


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
    groups = description.get("config_groups")
    if not isinstance(groups, Mapping):
        return
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights.get("block_structure")
            yield 1, weights.get("group_size")
