"""Plans the quantization of one checkpoint, from its headers and its config alone.

choose what is packed → choose the format → find what stays as it is → place every output tensor
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nf4conv.choose.decisions import Keep, Pack
from nf4conv.choose.formats import choose_format, weights_that_stay
from nf4conv.choose.selection import select
from nf4conv.errors import PlanError
from nf4conv.format.dtypes import DTYPE_NAMES, FLOAT_TAGS, TAGS
from nf4conv.format.layout import Format
from nf4conv.models.config import quantized_config
from nf4conv.options import DTYPES, QuantizeOptions
from nf4conv.plan.jobs import CopyJob, Job, PackJob
from nf4conv.plan.writing import NO_CONFIG, WritingPlan, plan_writing
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.foreign.config import quantization_of
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo


def plan_source(source: Source, options: QuantizeOptions) -> WritingPlan:
    """Plans the quantization of one opened checkpoint."""
    format = choose_format(source, options)
    selection = select(source.tensors, source.config or {}, options)
    unchanged = weights_that_stay(source, selection.decisions, format, options)
    jobs: list[Job] = []
    for tensor in source.tensors:
        decision = selection.decisions[tensor.name]
        jobs += jobs_of(tensor, decision, format, unchanged.get(tensor.name))
    config = _config(source, format, selection.skip_modules, options)
    notes = [
        *source.notes,
        *selection.notes,
        *_notes_on_unchanged(unchanged, options),
        *_notes_on_few_bits(jobs),
    ]
    if source.config is None:
        notes = [NO_CONFIG, *notes]
    return plan_writing(options, source, [[job] for job in jobs], format, config, notes)


def jobs_of(
    tensor: TensorInfo,
    decision: Pack | Keep,
    format: Format,
    stored: Bitsandbytes4bit | str | None = None,
) -> list[Job]:
    """Returns what is to be done for one tensor of the source.

    `stored` tells what a weight in 4 bits is copied from, or why it is packed anew.
    """
    reason = decision.reason
    if tensor.unmerged is not tensor:
        reason = f"{reason}, merged with an adapter"
    if isinstance(decision, Keep):
        is_cast = tensor.dtype in FLOAT_TAGS and not decision.keep_dtype
        return [CopyJob(tensor, TAGS[format.dtype] if is_cast else tensor.dtype, reason)]
    if tensor.dtype not in FLOAT_TAGS:
        raise PlanError.about(
            tensor.file, tensor.name, f"{tensor.dtype} cannot be packed; expected a float dtype"
        )
    if not all(format.holds(matrix.shape) for matrix in decision.matrices):
        text = f"its packed bytes do not divide into {format.quant_storage}; --exclude keeps it"
        raise PlanError.about(tensor.file, tensor.name, text)
    if isinstance(stored, Bitsandbytes4bit):
        [matrix] = decision.matrices
        own = replace(format, dtype=DTYPE_NAMES[tensor.dtype], scales=stored.format.scales)
        return [PackJob(tensor, matrix, "stays as it is", own, stored)]
    if stored is not None:
        reason = f"{reason}, packed anew: {stored}"
    return [PackJob(tensor, matrix, reason, format) for matrix in decision.matrices]


def require_searched(
    source: object, plans: Sequence[WritingPlan], options: QuantizeOptions
) -> None:
    """Refuses a search from which no weight of any plan would have its scales."""
    if options.scales != "search":
        return
    scales = {weight.format.scales for plan in plans for weight in plan.weights.values()}
    if scales == {"absmax"}:
        raise PlanError(
            f"{source}: --scales search needs the 16-bit model: its weights are in 4 bits already, "
            f"and no search finds what they lost. Quantize the original, or leave --scales out to "
            f"keep them as they are"
        )


def _notes_on_unchanged(
    unchanged: Mapping[str, Bitsandbytes4bit | str], options: QuantizeOptions
) -> Iterator[str]:
    """Says which weights of a 4-bit source stay as they are, and which are packed anew."""
    if not unchanged:
        return
    packed_anew = [(name, why) for name, why in unchanged.items() if isinstance(why, str)]
    stay = len(unchanged) - len(packed_anew)
    yield f"of {len(unchanged):,} weights in 4 bits {stay:,} stay as they are, bit for bit"
    if packed_anew:
        name, why = packed_anew[0]
        yield f"{len(packed_anew):,} weights are packed anew, such as {name}: {why}"
    if options.scales != "search":
        return
    unsearched = []
    for name, stored in unchanged.items():
        if isinstance(stored, Bitsandbytes4bit) and stored.format.scales != "search":
            unsearched.append(name)
    if unsearched:
        yield (
            f"{len(unsearched):,} weights keep scales that were not searched, such as "
            f"{unsearched[0]}: a search needs the 16-bit model, and they are in 4 bits already"
        )


def _notes_on_few_bits(jobs: Sequence[Job]) -> Iterator[str]:
    """Says what packing costs that begins with integers of few bits."""
    count = 0
    for job in jobs:
        encoding = job.source.unmerged.encoding
        if isinstance(job, PackJob) and encoding is not None and encoding.has_few_bits:
            count += 1
    if count:
        yield (
            f"{count:,} weights were rounded to integers of few bits before, and are rounded once "
            f"more: the 16-bit model that they were made from gives a better result, "
            f"docs/sources.md"
        )


def _config(
    source: Source, format: Format, skip_modules: Sequence[str], options: QuantizeOptions
) -> Mapping[str, Any] | None:
    """Returns the content of the output's config.json; None when the source has none."""
    if source.config is None:
        return None
    before = (quantization_of(source.config) or {}).get("bnb_4bit_compute_dtype")
    usual = "bfloat16" if format.dtype == "float32" else format.dtype  # float32 would be slow
    is_of_diffusers = "_class_name" in source.config
    return quantized_config(
        source.config,
        format,
        compute_dtype=options.compute_dtype or (str(before) if before in DTYPES else usual),
        skip_modules=skip_modules,
        dtype=None if is_of_diffusers else format.dtype,  # diffusers does not know the key
    )
