"""Plans the dequantization of one checkpoint, from its headers, quant states and config.

The source presents quantized weights as the float tensors that they stand for: sources/foreign/.
So all that is left to do is to store them as such, and to take the quantization out of config.json.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nf4conv.choose.evidence import Evidence
from nf4conv.choose.experts import Experts
from nf4conv.choose.formats import dominant_dtype
from nf4conv.errors import PlanError, UndecodableError
from nf4conv.format.dtypes import FLOAT_TAGS, TAGS
from nf4conv.format.layout import Format
from nf4conv.models.config import checkpoint_dtype, plain_config, without_quantization
from nf4conv.options import DequantizeOptions, SourceOptions
from nf4conv.plan.fp8 import fp8_config, fp8_groups
from nf4conv.plan.jobs import CopyJob
from nf4conv.plan.joining import join_experts
from nf4conv.plan.writing import WritingPlan, plan_unchanged, plan_writing
from nf4conv.sources.adapters.merging import open_merged
from nf4conv.sources.arranged import StackedExperts
from nf4conv.sources.foreign.bitsandbytes import is_in_4_bits
from nf4conv.sources.opening import open_stored, present_encoded
from nf4conv.sources.original_card import read_front_matter
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo
from nf4conv.system.machine import uncollected


@uncollected()
def plan_checkpoint(
    place: str | Path, options: DequantizeOptions, where: SourceOptions
) -> WritingPlan:
    """Plans one checkpoint, or a submodel that is `where` in a pipeline.

    Raises:
        DiffusersFolderError: the source is a diffusers pipeline.
        PlanError: nothing in the source is quantized, or the request cannot be met for it.
    """
    plan = _plan_source(place, open_merged(place, where, options.lora), options)
    if not options.lora:
        return plan  # it gets no card, because its original's card says all there is
    front, complaints = read_front_matter(plan.source.card)
    return replace(plan, front=front, notes=(*plan.notes, *complaints))


@uncollected()
def plan_submodel(
    place: str | Path, options: DequantizeOptions, where: SourceOptions
) -> WritingPlan:
    """Plans a submodel; keeps its tensors as they are if nothing in it is decoded."""
    opened = open_stored(place, where)
    with suppress(UndecodableError):
        opened = present_encoded(opened)
    if any(tensor.is_quantized for tensor in opened.tensors):
        return _plan_source(place, opened, options)
    return plan_unchanged(opened, options)


def _plan_source(place: object, source: Source, options: DequantizeOptions) -> WritingPlan:
    """Plans the dequantization of one opened checkpoint."""
    if options.fp8_scales is not None and options.dtype != "fp8":
        raise PlanError("--fp8-scales means nothing without --dtype fp8")
    is_encoded = any(tensor.is_quantized for tensor in source.tensors)
    # a GGUF file becomes a folder of transformers even if nothing in it is decoded
    if not is_encoded and not options.lora and not source.is_gguf:
        raise PlanError(f"{place}: no tensor of this checkpoint is quantized")
    config: Mapping[str, Any] = source.config or {}
    if options.dtype == "fp8":
        groups = list(fp8_groups(place, source, options))
        format = Format("nf4", 64, False, "bfloat16")  # nothing is packed
        return plan_writing(options, source, groups, format, fp8_config(config), source.notes)
    tensors = join_experts(source.tensors, config)
    Experts.gather(tensors, config).check_layers()
    evidence = Evidence.gather(tensors, config)
    jobs = [_decode_or_keep(tensor, evidence, options) for tensor in tensors]
    dtype = options.dtype or _dtype_of_model(config, [job.source for job in jobs])
    if "_class_name" in config:  # of diffusers, whose configs name no dtype
        config = without_quantization(config)
    else:
        config = plain_config(config, dtype)
    is_of_others = any(tensor.is_quantized and not is_in_4_bits(tensor) for tensor in tensors)
    tells_of_source = options.lora or is_of_others or source.is_gguf
    return plan_writing(
        options,
        source,
        [[job] for job in jobs],
        Format("nf4", 64, False, dtype),  # nothing is packed
        None if source.config is None else config,
        source.notes if tells_of_source else (),
    )


def _dtype_of_model(config: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> str:
    """Returns the name of the dtype that a decoded model is loaded in.

    It is that of most bytes. But a model whose config and other weights are in bfloat16 stays one
    although its method stores scales in float16: activations may be too large for float16.
    """
    dominant = dominant_dtype(tensors)
    if dominant != "float16" or checkpoint_dtype(config) != "bfloat16":
        return dominant
    has_kept = any(tensor.dtype == "BF16" and tensor.encoding is None for tensor in tensors)
    return "bfloat16" if has_kept else dominant


def _decode_or_keep(tensor: TensorInfo, evidence: Evidence, options: DequantizeOptions) -> CopyJob:
    """Returns the job of a tensor."""
    dtype = tensor.dtype
    if options.dtype is not None and dtype in FLOAT_TAGS:
        dtype = dtype if evidence.is_float32_by_design(tensor) else TAGS[options.dtype]
    if tensor.encoding is None:
        return CopyJob(tensor, dtype, "not quantized")
    reason = "decoded" if tensor.unmerged is tensor else "merged with an adapter"
    if isinstance(tensor.encoding, StackedExperts):
        reason = "decoded, and stacked as its family stores experts"
    # decoded to what it is stored in, not by way of another dtype, which would round twice
    if dtype != tensor.dtype:
        tensor = tensor._replace(dtype=dtype)
    return CopyJob(tensor, dtype, reason)
