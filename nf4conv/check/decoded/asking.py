"""Finds out what was asked for when a checkpoint was decoded.

nf4conv.json says it. Of a checkpoint without one, the dtypes of its tensors do.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from nf4conv.choose.formats import dominant_dtype
from nf4conv.errors import OptionError, PlanError
from nf4conv.options import DTYPES, DequantizeOptions, VerifyOptions
from nf4conv.plan.dequantization import DequantizationPlan
from nf4conv.plan.jobs import FLOAT_TAGS
from nf4conv.sources.record import MAKING
from nf4conv.sources.stored_weights import Structure

_PATTERNS: Final = ("include", "exclude")


def is_decoded(structure: Structure, *, has_source: bool) -> bool:
    """Returns True if a checkpoint was decoded, by what it says and holds.

    Where nothing says how it was made, a source is needed to tell. One that has lost the tensors
    beside its packed codes does not count.

    Args:
        structure: the checkpoint.
        has_source: True if it is to be compared with a source.
    """
    if structure.weights:
        return False
    if structure.record is not None:
        return structure.record.get("command") == "dequantize"
    if any(finding.check == "components" for finding in structure.findings):
        return False
    return has_source and bool(structure.tensors)


def is_plain(structure: Structure) -> bool:
    """Returns True if a checkpoint is in floats of 16 bits or more, and has no nf4conv.json."""
    if structure.weights or structure.record is not None:
        return False
    matrices = [tensor for tensor in structure.tensors.values() if len(tensor.shape) > 1]
    return bool(matrices) and all(tensor.dtype in FLOAT_TAGS for tensor in matrices)


def decoding_options(structure: Structure, options: VerifyOptions) -> DequantizeOptions:
    """Returns the options by which a checkpoint was decoded, and notes those that cannot be.

    Args:
        structure: the checkpoint.
        options: those of its verification, which name the adapters.

    Raises:
        PlanError: nf4conv.json says that adapters were merged, and none is named.
    """
    asked = DequantizeOptions(lora=options.lora)
    if structure.record is None:
        return asked
    _require_adapters(structure, structure.record, options)
    try:
        return replace(asked, **_recorded(structure.record["options"]))
    except OptionError as error:
        text = f"its options are none that dequantize takes: {error}"
        structure.note("record", MAKING, "", text)
        return asked


def _require_adapters(
    structure: Structure, record: Mapping[str, Any], options: VerifyOptions
) -> None:
    adapters = record["source"].get("adapters")
    if not isinstance(adapters, list) or not adapters or options.lora:
        return
    names = [str(adapter.get("id")) for adapter in adapters if isinstance(adapter, Mapping)]
    raise PlanError(
        f"{structure.folder}: adapters were merged into it ({', '.join(names):.200}); "
        f"name them with --lora, in this order",
        path=structure.folder,
    )


def _recorded(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a record that decide what is decoded, and to what."""
    found: dict[str, Any] = {}
    if options.get("dtype") is not None:
        found["dtype"] = options["dtype"]
    for name in _PATTERNS:
        patterns = options.get(name)
        if isinstance(patterns, list):
            found[name] = tuple(patterns)
    return found


def with_other_dtype(structure: Structure, plan: DequantizationPlan) -> DequantizeOptions | None:
    """Returns the options by which a checkpoint without nf4conv.json must have been decoded.

    Args:
        structure: the checkpoint.
        plan: of decoding its source without any wish.

    Returns:
        The plan's options, with the dtype of most of the checkpoint's bytes. None if its floats are
        in the dtypes planned, or in one that nothing is decoded to.
    """
    if structure.record is not None:
        return None
    for job in plan.output.jobs:
        found = structure.tensors.get(job.name)
        if found is None or found.dtype not in FLOAT_TAGS:
            continue
        if found.dtype != job.source.dtype:
            return _with_dtype(plan.options, dominant_dtype(structure.tensors.values()))
    return None


def _with_dtype(options: DequantizeOptions, name: str) -> DequantizeOptions | None:
    for dtype in DTYPES:
        if dtype == name:
            return replace(options, dtype=dtype)
    return None
