"""Plans what quantize and dequantize make of a checkpoint or a diffusers pipeline.

Everything is decided from headers and config alone; torch is not imported.
"""

import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from nf4conv.choose.experts import Experts
from nf4conv.choose.selection import unmatched
from nf4conv.errors import DiffusersFolderError, PlanError
from nf4conv.format.units import size
from nf4conv.options import DequantizeOptions, QuantizeOptions, SourceOptions, WritingOptions
from nf4conv.plan import dequantization, diffusers, quantization
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.writing import WritingPlan, plan_unchanged
from nf4conv.report.advice import advice
from nf4conv.sources.adapters.merging import open_merged
from nf4conv.sources.diffusers import DiffusersFolder, is_packed_by_default, open_diffusers
from nf4conv.sources.opening import open_stored
from nf4conv.sources.original_card import read_front_matter
from nf4conv.system.machine import uncollected

_log: Final = logging.getLogger(__name__)

AnyPlan: TypeAlias = WritingPlan | DiffusersPlan
"""Plan of one checkpoint, or of a diffusers pipeline."""


def planned(source: str | Path, options: WritingOptions) -> AnyPlan:
    """Plans a conversion, logs what the plan holds, and looks at every file that is to be copied.

    Raises a SourceError for a file beside the weights that is a link out of the source.
    """
    started = time.perf_counter()
    plan = make_plan(source, options)
    totals = plan.totals
    _log.info(
        "planned %d tensors in %.1f s: %d packed, %d decoded, %d kept; %d files, %s; %d others",
        totals.packed + totals.decoded + totals.copied,
        time.perf_counter() - started,
        totals.packed,
        totals.decoded,
        totals.copied,
        totals.shards,
        size(totals.bytes_after),
        sum(len(part.source.auxiliary) for part in plan.parts),
    )
    return plan


@uncollected()
def make_plan(source: str | Path, options: WritingOptions) -> AnyPlan:
    """Plans a checkpoint, or each submodel of a diffusers pipeline.

    In globs for a pipeline, the name of a submodel and a slash may stand first.
    """
    try:
        if isinstance(options, DequantizeOptions):
            plan = dequantization.plan_checkpoint(source, options, options)
        else:
            plan = _plan_quantized(source, options, options)
            quantization.require_searched(source, [plan], options)
            notes = (*advice(plan.jobs), *plan.notes, *unmatched(options, [("", plan.source)]))
            plan = replace(plan, notes=notes)
    except DiffusersFolderError as error:
        if isinstance(options, DequantizeOptions):
            return _plan_decoded_pipeline(open_diffusers(source, options), options)
        if options.calibrate is not None:
            raise PlanError(
                f"{source}: --calibrate is for models of transformers, one at a time: for a text "
                f"encoder --subfolder text_encoder; --scales search needs no text"
            ) from error
        return _plan_quantized_pipeline(open_diffusers(source, options), options)
    return replace(plan, again=partial(make_plan, source, replace(options, progress=None)))


def _plan_quantized(
    source: str | Path, options: QuantizeOptions, where: SourceOptions
) -> WritingPlan:
    """Plans one checkpoint, or a submodel that is `where` in a pipeline.

    If the result is to be pushed, experts stay in 16 bits unless the options, or a source in 4
    bits, say otherwise: most who find the result on the Hub do not have nf4conv.

    Raises:
        DiffusersFolderError: the source is a diffusers pipeline.
    """
    opened = open_merged(source, where, options.lora)
    if options.push_to_hub is not None and options.moe is None:
        experts = Experts.gather(opened.tensors, opened.config or {})
        if experts.packs_by_default():
            options = replace(options, moe="portable")
    front, complaints = read_front_matter(opened.card)
    if options.calibrate is None:
        plan = quantization.plan_source(opened, options)
    else:
        from nf4conv.calibrate.request import plan_calibrated  # few runs need to import it

        plan = plan_calibrated(opened, options)
    return replace(plan, front=front, notes=(*plan.notes, *complaints))


def _plan_quantized_pipeline(folder: DiffusersFolder, options: QuantizeOptions) -> DiffusersPlan:
    """Plans each submodel by its own rules; keeps one as it is if nothing in it is packed."""
    submodels = {}
    for name, where in folder.submodels.items():
        mine = diffusers.for_submodel(name, options)
        plan = None
        if is_packed_by_default(name) and (mine.include or not options.include):
            plan = _plan_quantized(folder.place, mine, where)
        if plan is None or not plan.totals.packed:
            plan = plan_unchanged(open_stored(folder.place, where), mine)
        submodels[name] = plan
    quantization.require_searched(folder.place, list(submodels.values()), options)
    front, complaints = read_front_matter(folder.folder / "README.md")
    parts = [(name, part.source) for name, part in submodels.items()]
    made = DiffusersPlan(folder, submodels, front)
    notes = (*complaints, *unmatched(options, parts), *advice(made.jobs))
    return replace(made, complaints=notes)


def _plan_decoded_pipeline(folder: DiffusersFolder, options: DequantizeOptions) -> DiffusersPlan:
    """Plans each submodel; raises a PlanError if nothing in any of them is quantized."""
    submodels = {}
    for name, where in folder.submodels.items():
        submodels[name] = dequantization.plan_submodel(folder.place, options, where)
    plan = DiffusersPlan(folder, submodels)
    if not plan.totals.decoded:
        raise PlanError(
            f"{folder.place}: no submodel of this diffusers pipeline has a quantized weight to "
            f"decode"
        )
    return plan
