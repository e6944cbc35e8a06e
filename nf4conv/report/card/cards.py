"""Composes the cards of checkpoints, merged models and diffusers pipelines."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import nf4conv.report.card.sections as sections
from nf4conv.plan.jobs import CopyJob
from nf4conv.plan.provenance import Provenance, not_packed
from nf4conv.plan.writing import WritingPlan
from nf4conv.report.card.front_matter import merged_front_matter, quantized_front_matter
from nf4conv.report.card.subject import Figures, OriginalName, Subject, name_original
from nf4conv.report.loading import Loading
from nf4conv.report.rows.weights import VerificationSummary
from nf4conv.sources.original_card import OriginalCard
from nf4conv.sources.record import name_of
from nf4conv.sources.source import Source

_TASKS: Final = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
    "SentenceTransformer": "sentence-similarity",
}
"""The Hub's task for each class that loads models of one task."""


def model_card(
    plan: WritingPlan,
    figures: Figures,
    loading: Loading | None,
    base_model: str | None = None,
    repo: str | None = None,
) -> str:
    """Composes the card of a quantized checkpoint.

    Args:
        plan: what was written, and from what.
        figures: sizes, and what was verified.
        loading: how the result is loaded. None if nothing says how.
        base_model: what the user calls the original. None to find that out.
        repo: the repository that the result is pushed to. None if it is not.

    Returns:
        The content of README.md.
    """
    source = plan.source
    if loading is not None:
        library = loading.library
    else:
        library = "transformers" if source.stem == "model" else "diffusers"
    subject = Subject(
        name=name_original(source, plan.front, base_model),
        original=plan.front,
        library=library,
        weights=Counter(plan.weights.values()).most_common(),
        jobs=list(plan.whole.jobs),
        not_packed=list(not_packed(plan.whole, plan.weights)),
        figures=figures,
        adapters=source.adapters,
        pipeline_tag=_pipeline_tag(loading),
    )
    compute_dtype = _compute_dtype(plan.config)
    parts = [
        sections.settings(subject, compute_dtype),
        sections.kept_table(subject.jobs),
        sections.use(loading, plan.readers, repo),
    ]
    return _quantized_card(subject, parts)


def _pipeline_tag(loading: Loading | None) -> str:
    """Returns the Hub's task for the class that loads a model; empty for classes of many tasks."""
    return "" if loading is None else _TASKS.get(loading.class_name, "")


def _compute_dtype(config: Mapping[str, Any] | None) -> str | None:
    quantization = (config or {}).get("quantization_config") or {}
    dtype = quantization.get("bnb_4bit_compute_dtype")
    return None if dtype is None else str(dtype)


def _quantized_card(subject: Subject, parts: Sequence[str]) -> str:
    """Puts the parts that cards of quantized models share around those of one card."""
    return "\n".join(
        [
            quantized_front_matter(subject),
            sections.introduction(subject),
            *parts,
            sections.check(subject),
            sections.original_text(subject.original),
        ]
    )


def merged_card(plan: WritingPlan, loading: Loading | None) -> str:
    """Composes the card of a model that adapters are merged into, and that is not packed.

    Args:
        plan: what was written, and from what. Some weights may have stayed in 4 bits.
        loading: how the result is loaded. None if nothing says how.

    Returns:
        The content of README.md.
    """
    source = plan.source
    subject = Subject(
        name=name_original(source, plan.front, None),
        original=plan.front,
        library="transformers",
        weights=Counter(plan.weights.values()).most_common(),
        jobs=[],
        not_packed=[],
        figures=Figures(0, 0),
        adapters=source.adapters,
        pipeline_tag=_pipeline_tag(loading),
    )
    parts = [
        merged_front_matter(subject),
        sections.merged_introduction(subject, source.folder.name),
        sections.use(loading),
        sections.original_text(subject.original),
    ]
    return "\n".join(parts)


def diffusers_card(
    original: OriginalCard,
    loading: Loading,
    submodels: Mapping[str, WritingPlan],
    figures: Mapping[str, Figures],
    verified: VerificationSummary | None,
    base_model: str | None = None,
    repo: str | None = None,
) -> str:
    """Composes the card of a quantized diffusers pipeline.

    Args:
        original: the original's own card, from which license and language are taken over.
        loading: how the result is loaded.
        submodels: what was written of each submodel, and from what, by its name.
        figures: the sizes of each submodel, by its name.
        verified: what `--verify` measured of all submodels. None without it.
        base_model: what the user calls the original. None to find that out.
        repo: the repository that the result is pushed to. None if it is not.

    Returns:
        The content of README.md.
    """
    weights: Counter[Provenance] = Counter()
    kept: list[CopyJob] = []
    for plan in submodels.values():
        weights.update(plan.weights.values())
        kept += not_packed(plan.output, plan.weights)
    plans = {name: plan.output for name, plan in submodels.items()}
    jobs = [job for plan in plans.values() for job in plan.jobs]
    bytes_before = sum(part.bytes_before for part in figures.values())
    bytes_after = sum(part.bytes_after for part in figures.values())
    first = next(iter(submodels.values()))
    subject = Subject(
        name=_name_pipeline(first.source, base_model or original.base_of_ours),
        original=original,
        library="diffusers",
        weights=weights.most_common(),
        jobs=jobs,
        not_packed=kept,
        figures=Figures(bytes_before, bytes_after, verified),
    )
    parts = [
        sections.settings(subject, None),
        sections.submodels_table(plans, figures),
        sections.kept_table(jobs),
        sections.use(loading, repo=repo),
    ]
    return _quantized_card(subject, parts)


def _name_pipeline(source: Source, base_model: str | None) -> OriginalName:
    """Finds out how to name a pipeline, given one of its submodels."""
    origin = None
    if source.fetched is not None:
        part = source.fetched.origin
        origin = replace(part, subfolder=part.subfolder.rpartition("/")[0])
    if base_model is None and origin is not None:
        base_model = origin.repo
    name = base_model or name_of(source.folder.parent)
    return OriginalName(origin, base_model, name.rpartition("/")[2])
