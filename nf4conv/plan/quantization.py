"""Plans the quantization of one checkpoint, from its headers and its config alone.

choose what is packed → choose the format → find what stays as it is → place every output tensor
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nf4conv.choose.decisions import Pack, Selection
from nf4conv.choose.formats import choose_format, weights_that_stay
from nf4conv.choose.selection import select
from nf4conv.errors import PlanError
from nf4conv.format.layout import Format
from nf4conv.models.config import quantized_config
from nf4conv.options import DTYPES, QuantizeOptions
from nf4conv.plan.arrange import make_plan
from nf4conv.plan.jobs import PackJob, Plan
from nf4conv.plan.writing import NO_CONFIG, WritingPlan, notes_on_files
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.foreign.config import quantization_of
from nf4conv.sources.source import Source


def plan_source(source: Source, options: QuantizeOptions) -> WritingPlan:
    """Plans the quantization of one opened checkpoint."""
    format = choose_format(source, options)
    selection = select(source.tensors, source.config or {}, options, format=format)
    if options.dtype is None:
        _check_float64(source, selection)
    unchanged = weights_that_stay(source, selection.decisions, format, options)
    output = make_plan(
        source.tensors,
        selection.decisions,
        format,
        max_shard_size=options.max_shard_size,
        stem=source.stem,
        unchanged=unchanged,
    )
    config = _config(source, format, selection.skip_modules, options)
    notes = (
        *source.notes,
        *selection.notes,
        *_notes_on_unchanged(unchanged, options),
        *_notes_on_few_bits(output),
        *notes_on_files(source, output),
    )
    if source.config is None:
        notes = (NO_CONFIG, *notes)
    return WritingPlan(options, source, output, config, notes)


def _check_float64(source: Source, selection: Selection) -> None:
    """Raises a PlanError if a weight in float64 is to be packed."""
    for tensor in source.tensors:
        if tensor.dtype == "F64" and isinstance(selection.decisions[tensor.name], Pack):
            raise PlanError.about(
                tensor.file,
                tensor.name,
                f"float64 cannot be packed; say what to cast it to: --dtype {', '.join(DTYPES)}",
            )


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
        if isinstance(stored, Bitsandbytes4bit) and stored.scales != "search":
            unsearched.append(name)
    if unsearched:
        yield (
            f"{len(unsearched):,} weights keep scales that were not searched, such as "
            f"{unsearched[0]}: a search needs the 16-bit model, and they are in 4 bits already"
        )


def _notes_on_few_bits(output: Plan) -> Iterator[str]:
    """Says what packing costs that begins with integers of few bits."""
    count = 0
    for job in output.jobs:
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
    is_of_diffusers = "_class_name" in source.config
    return quantized_config(
        source.config,
        format,
        compute_dtype=options.compute_dtype or _compute_dtype(source.config, format),
        skip_modules=skip_modules,
        dtype=None if is_of_diffusers else format.dtype,  # diffusers does not know the key
    )


def _compute_dtype(config: Mapping[str, Any], format: Format) -> str:
    """Returns the dtype that loaders compute in, where the user leaves it open."""
    before = (quantization_of(config) or {}).get("bnb_4bit_compute_dtype")
    if before in DTYPES:
        return str(before)
    if format.dtype == "float32":
        return "bfloat16"  # computing in float32 would be slow
    return format.dtype
