"""Shows what `evaluate` found: of one form of a model in full, of several side by side."""

import math
from collections.abc import Iterator
from typing import Final

from nf4conv.format.units import size
from nf4conv.report.page import folder_name
from nf4conv.report.results.contents import Evaluation, Evaluations
from nf4conv.report.text.tables import table
from nf4conv.report.text.terminal import printable

_TOKENS: Final = ("model", "size", "bits", "KL", "±", "of first", "same token", "perplexity")
_STATES: Final = ("model", "size", "bits", "1 - cosine", "of first", "pooled", "least cosine")


def evaluation_lines(compared: Evaluations, width: int | None) -> Iterator[str]:
    """Yields all figures of one form of a model; of several forms a table, and how it was made.

    Args:
        compared: what `evaluate` found.
        width: the longest line of a table, in characters. None for any.
    """
    first = compared.evaluations[0]
    if len(compared.evaluations) == 1:
        for name, value in first.rows().items():
            yield f"{name:<20}{value}"
        return
    head, *body = comparison_cells(compared)
    yield from table(head, [[printable(cell) for cell in cells] for cells in body], width)
    yield ""
    if "perplexity_source" in first.figures:
        source = printable(folder_name(first.source))
        yield f"{source} itself: perplexity {first.figures['perplexity_source']:.5g}"
        yield "KL in nats a token, ± the 95 % interval of its mean"
    yield f"{first.tokens:,} tokens of {printable(first.text)}"
    yield f"on {first.device}, {first.arithmetic}"


def comparison_cells(compared: Evaluations) -> list[list[str]]:
    """Returns the rows of a table of several forms, the titles of its columns first."""
    first = compared.evaluations[0]
    if "kl" in first.figures:
        cells = [_token_cells(one, first) for one in compared.evaluations]
        return [list(_TOKENS), *cells]
    return [list(_STATES), *(_state_cells(one, first) for one in compared.evaluations)]


def _token_cells(one: Evaluation, first: Evaluation) -> list[str]:
    """Returns the cells of a model that predicts tokens; `first` is the one to compare with."""
    figures = one.figures
    divergence = figures["kl"]
    half = ""
    if "kl_high" in figures:
        half = f"{figures['kl_high'] - divergence:.2g}"
    return [
        *_storage_cells(one),
        f"{divergence:.5f}",
        half,
        _ratio(divergence, first.figures["kl"]),
        f"{figures['agreement']:.2%}",
        f"{figures['perplexity']:.5g}",
    ]


def _state_cells(one: Evaluation, first: Evaluation) -> list[str]:
    distance = 1 - one.figures["cosine"]
    return [
        *_storage_cells(one),
        f"{distance:.5f}",
        _ratio(distance, 1 - first.figures["cosine"]),
        f"{1 - one.figures['cosine_pooled']:.5f}",
        f"{one.figures['cosine_least']:.4f}",
    ]


def _storage_cells(one: Evaluation) -> list[str]:
    bits = "" if one.bits_per_weight is None else f"{one.bits_per_weight:.3f}"
    return [folder_name(one.out), size(one.bytes), bits]


def _ratio(value: float, first: float) -> str:
    if first <= 0 or not math.isfinite(value / first):
        return ""
    return f"{value / first:.3f}"
