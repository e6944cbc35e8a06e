"""Finds out how a checkpoint was made from its source, by what it says of itself.

nf4conv.json says it, or the config, or weights in 4 bits do.
"""

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from nf4conv.check.structure import Structure
from nf4conv.errors import OptionError, PlanError
from nf4conv.format.layout import split_component
from nf4conv.options import DequantizeOptions, VerifyOptions
from nf4conv.sources.record import MAKING


class Relation(StrEnum):
    """Names how a checkpoint was made from its source."""

    QUANTIZED = "quantized"
    DECODED = "decoded"
    NONE = "none"  # nothing says it


def relation_of(structure: Structure) -> Relation:
    """Returns what a checkpoint says of its making; QUANTIZED if it has weights in 4 bits."""
    if structure.weights:
        return Relation.QUANTIZED
    command = (structure.record or {}).get("command")
    if command == "dequantize":
        return Relation.DECODED
    # such as weights in 4 bits that cannot be decoded, or codes without what stands beside them
    has_parts = any(split_component(name)[1] for name in structure.tensors)
    has_lost_tensors = any(finding.check == "components" for finding in structure.findings)
    if command == "quantize" or has_parts or has_lost_tensors:
        return Relation.QUANTIZED
    said = (structure.config or {}).get("quantization_config")
    is_in_4_bits = isinstance(said, Mapping) and said.get("load_in_4bit") is True
    return Relation.QUANTIZED if is_in_4_bits else Relation.NONE


def decoding_options(structure: Structure, options: VerifyOptions) -> DequantizeOptions:
    """Returns the options by which nf4conv.json says that a checkpoint was decoded; notes those
    that cannot be.
    """
    record = structure.record
    assert record is not None
    adapters = record["source"].get("adapters")
    if isinstance(adapters, list) and adapters and not options.lora:
        names = [str(adapter.get("id")) for adapter in adapters if isinstance(adapter, Mapping)]
        raise PlanError(
            f"{structure.folder}: adapters were merged into it ({', '.join(names):.200}); "
            f"name them with --lora, in this order",
            path=structure.folder,
        )
    asked = DequantizeOptions(lora=options.lora)
    try:
        recorded = record["options"]
        return replace(asked, dtype=recorded.get("dtype"), fp8_scales=recorded.get("fp8_scales"))
    except OptionError as error:
        text = f"its options are none that dequantize takes: {error}"
        structure.note("record", MAKING, "", text)
        return asked
