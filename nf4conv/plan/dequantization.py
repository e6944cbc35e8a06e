"""Plans the dequantization of one checkpoint, from its headers, quant states and config.

The source presents quantized weights as the float tensors that they stand for: sources/foreign/.
So all that is left to do is to store them as such, and to take the quantization out of config.json.
Weights of bitsandbytes that are to stay in 4 bits are copied as they are, all their tensors into
one shard.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from nf4conv.choose.decisions import Keep, Pack, PackedMatrix
from nf4conv.choose.evidence import Evidence
from nf4conv.choose.experts import check_whole
from nf4conv.choose.formats import dominant_dtype
from nf4conv.choose.selection import is_wanted, select, with_skip_list
from nf4conv.errors import PlanError
from nf4conv.format.dtypes import FLOAT_TAGS, TAGS
from nf4conv.format.layout import Format
from nf4conv.models.config import checkpoint_dtype, plain_config, without_quantization
from nf4conv.models.module_names import ModuleNames
from nf4conv.options import DequantizeOptions, QuantizeOptions
from nf4conv.plan.arrange import arrange
from nf4conv.plan.fp8 import fp8_config, fp8_groups
from nf4conv.plan.jobs import CopyJob, Job
from nf4conv.plan.joining import join_experts
from nf4conv.plan.writing import WritingPlan, notes_on_files, plan_unchanged
from nf4conv.sources.arranged import StackedExperts
from nf4conv.sources.foreign.bitsandbytes import is_in_4_bits
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo

_STAYS: Final = "stays in 4 bits"
_KEPT: Final = "not quantized"
_MERGED: Final = "merged with an adapter"
_DECODED: Final = "decoded"
_STACKED: Final = "decoded, and stacked as its family stores experts"


@dataclass(frozen=True)
class DequantizationPlan(WritingPlan):
    """Plans what becomes of a checkpoint that is decoded: the result of `plan_dequantization`.

    Attributes:
        options: the options that the user gave.
    """

    command: ClassVar[str] = "dequantize"

    options: DequantizeOptions

    def dtype_of(self, job: Job) -> str:
        assert isinstance(job, CopyJob)
        return job.dtype

    def action_of(self, job: Job) -> str:
        if job.source.unmerged is not job.source:
            return "merge"
        return super().action_of(job) if job.source.encoding is None else "decode"


def plan_source(place: object, source: Source, options: DequantizeOptions) -> DequantizationPlan:
    """Plans the dequantization of one opened checkpoint."""
    packed = {tensor.name for tensor in source.tensors if tensor.is_quantized}
    # a GGUF file becomes a folder of transformers even if nothing in it is decoded
    if not packed and not options.lora and not source.is_gguf:
        raise PlanError(f"{place}: no tensor of this checkpoint is quantized")
    wanted = {name for name in packed if is_wanted(name, options.include, options.exclude)}
    _check_stays(source, packed - wanted)
    if packed and not wanted:
        raise PlanError(f"{place}: --include and --exclude leave no weight to decode")
    if options.dtype == "fp8":
        return _as_fp8(place, source, options)
    config, still_packed = _partly_packed(source, packed - wanted, options)
    tensors = join_experts(source.tensors, source.config or {}, still_packed)
    check_whole(tensors, source.config or {})
    groups = list(_groups(replace(source, tensors=tensors), still_packed, options))
    sources = [job.source for group in groups for job in group]
    dtype = options.dtype or _dtype_of_model(source.config or {}, sources)
    output = arrange(
        groups,
        Format("nf4", 64, False, dtype),
        max_shard_size=options.max_shard_size,
        stem=source.stem,
    )
    if config is not None and not still_packed:
        is_of_diffusers = "_class_name" in config  # whose configs name no dtype
        config = without_quantization(config) if is_of_diffusers else plain_config(config, dtype)
    notes = tuple(notes_on_files(source, output))
    is_of_others = any(tensor.is_quantized and not is_in_4_bits(tensor) for tensor in tensors)
    if options.lora or is_of_others or source.is_gguf:
        notes = (*source.notes, *notes)
    return DequantizationPlan(options, source, output, config, notes)


def _as_fp8(place: object, source: Source, options: DequantizeOptions) -> DequantizationPlan:
    """Plans to store MXFP4 as FP8, and to copy the rest."""
    output = arrange(
        list(fp8_groups(place, source)),
        Format("nf4", 64, False, "bfloat16"),  # nothing is packed
        max_shard_size=options.max_shard_size,
        stem=source.stem,
    )
    notes = (*source.notes, *notes_on_files(source, output))
    return DequantizationPlan(options, source, output, fp8_config(source.config or {}), notes)


def _check_stays(source: Source, names: set[str]) -> None:
    """Raises a PlanError if weights are to stay quantized that are not those of bitsandbytes.

    A config describes one quantization, and loaders of the others want every layer of it.
    """
    for tensor in source.tensors:
        encoding = tensor.unmerged.encoding
        if tensor.name in names and encoding is not None and not is_in_4_bits(tensor):
            raise PlanError(
                f"{tensor.name}: --include or --exclude leaves it as it is ({encoding.name}); "
                f"only weights in bitsandbytes' 4 bits can stay"
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


def plan_unchanged_submodel(source: Source, options: DequantizeOptions) -> DequantizationPlan:
    """Plans a submodel of a diffusers pipeline in which nothing is decoded."""
    format = Format("nf4", 64, False, dominant_dtype(source.tensors))
    output = plan_unchanged(source, format, options.max_shard_size)
    notes = tuple(notes_on_files(source, output))
    return DequantizationPlan(options, source, output, source.config, notes)


def has_wanted_weights(source: Source, options: DequantizeOptions) -> bool:
    """Returns True if the source has a quantized weight that the options ask to decode."""
    for tensor in source.tensors:
        if tensor.is_quantized and is_wanted(tensor.name, options.include, options.exclude):
            return True
    return False


def _partly_packed(
    source: Source, packed: set[str], options: DequantizeOptions
) -> tuple[Mapping[str, Any] | None, frozenset[str]]:
    """Returns the config with a skip list for what stays packed, and the names that stay packed.

    Weights that a loader could not tell from others are decoded too.
    """
    if source.config is None or not packed:
        return source.config, frozenset(packed)
    if options.dtype is not None:
        raise PlanError(
            "--dtype changes all tensors, but --include or --exclude leaves weights in 4 bits"
        )
    rules = select(source.tensors, source.config, QuantizeOptions()).decisions
    decisions: dict[str, Pack | Keep] = {}
    for tensor in source.tensors:
        rule = rules[tensor.name]
        if tensor.name in packed:
            rows = tensor.shape[0]
            matrix = PackedMatrix(tensor.name, (rows, tensor.elements // rows))
            decisions[tensor.name] = Pack((matrix,), _STAYS)
        elif isinstance(rule, Pack) or is_in_4_bits(tensor):
            decisions[tensor.name] = Keep(_KEPT, is_linear=True)
        else:
            decisions[tensor.name] = rule
    selection = with_skip_list(decisions, ModuleNames.of(source.config), ())
    config = dict(source.config)
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        skip_modules = list(selection.skip_modules)
        config["quantization_config"] = {**quantization, "llm_int8_skip_modules": skip_modules}
    still_packed = set()
    for name, decision in selection.decisions.items():
        if isinstance(decision, Pack):
            still_packed.add(name)
    return config, frozenset(still_packed)


def _groups(
    source: Source, still_packed: frozenset[str], options: DequantizeOptions
) -> Iterator[list[CopyJob]]:
    """Yields the jobs of each source tensor, which must be in one shard."""
    evidence = Evidence.gather(source.tensors, source.config or {})
    for tensor in source.tensors:
        if tensor.name in still_packed and tensor.encoding is not None:
            if tensor.unmerged is not tensor:
                raise PlanError(
                    f"{tensor.name}: --include or --exclude leaves it in 4 bits, but an adapter "
                    f"changes it"
                )
            yield [CopyJob(part, part.dtype, _STAYS) for _, part in tensor.encoding.parts]
        else:
            yield [_decode_or_keep(tensor, _output_dtype(tensor, evidence, options))]


def _output_dtype(tensor: TensorInfo, evidence: Evidence, options: DequantizeOptions) -> str:
    """Returns the dtype tag that a tensor is stored in."""
    if options.dtype is None or tensor.dtype not in FLOAT_TAGS:
        return tensor.dtype
    if evidence.is_float32_by_design(tensor):
        return tensor.dtype
    return TAGS[options.dtype]


def _decode_or_keep(tensor: TensorInfo, dtype: str) -> CopyJob:
    """Returns the job of a tensor that does not stay in 4 bits."""
    if tensor.encoding is None:
        return CopyJob(tensor, dtype, _KEPT)
    reason = _DECODED if tensor.unmerged is tensor else _MERGED
    if isinstance(tensor.encoding, StackedExperts):
        reason = _STACKED
    # decoded to what it is stored in, not by way of another dtype, which would round twice
    if dtype != tensor.dtype:
        tensor = tensor._replace(dtype=dtype)
    return CopyJob(tensor, dtype, reason)
