"""Puts the results of an evaluation into the front matter of a card, in the Hub's form.

That is `model-index`: https://huggingface.co/docs/hub/model-cards#evaluation-results
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from nf4conv.report.results.contents import Evaluation

_TASKS: Final = {
    "causal": "text-generation",
    "seq2seq": "text2text-generation",
    "masked": "fill-mask",
    "encoder": "feature-extraction",
}
"""The Hub's task for each kind of model that `evaluate` tells apart."""

_OURS: Final = "nf4conv evaluate"
"""Ends the names of our metrics, by which our results are known from others."""

_METRICS: Final = {
    "kl": ("kl_divergence", "KL divergence from the original, nats a token"),
    "agreement": ("accuracy", "Same next token as the original"),
    "perplexity": ("perplexity", "Perplexity"),
    "perplexity_source": ("perplexity", "Perplexity of the original"),
    "cosine": ("cosine_similarity", "Cosine with the states of the original"),
}
"""Type and name of the metric for each figure that goes there."""

_FRONT_MATTER: Final = re.compile(
    r"\A---[ \t]*\n(.*?)^---[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE
)
_BLOCK: Final = re.compile(r"^model-index:.*\n(?:(?:[ -].*)?\n)*", re.MULTILINE)


def with_results(card: str, evaluation: Evaluation) -> str:
    """Puts results into the front matter of a card; those of an earlier evaluation are replaced.

    Args:
        card: the content of README.md.
        evaluation: what was found.

    Returns:
        The new content. The same, if others have put results there.
    """
    found = _FRONT_MATTER.match(card)
    fields = "" if found is None else found[1]
    body = card if found is None else card[found.end() :]
    before = _BLOCK.search(fields)
    if before is not None and _OURS not in before[0]:
        return card
    fields = _BLOCK.sub("", fields)
    index = {"model-index": [_entry(evaluation)]}
    block = yaml.safe_dump(index, sort_keys=False, allow_unicode=True)
    return f"---\n{fields}{block}---\n{body}"


def _entry(evaluation: Evaluation) -> dict[str, Any]:
    """Returns the results of one model."""
    result = {
        "task": {"type": _TASKS[evaluation.kind]},
        "dataset": {"type": "text", "name": evaluation.text},
        "metrics": list(_metrics(evaluation)),
    }
    return {"name": Path(evaluation.out).name, "results": [result]}


def _metrics(evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    for figure, (kind, name) in _METRICS.items():
        value = evaluation.figures.get(figure)
        if value is not None and math.isfinite(value):
            yield {"type": kind, "value": round(float(value), 6), "name": f"{name} ({_OURS})"}
