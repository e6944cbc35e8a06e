"""Refuses models that cannot be what their files hold, before transformers makes room for them."""

from itertools import chain
from typing import Any, Final

import torch

from nf4conv.commands.evaluating.question import Question
from nf4conv.errors import SourceError, first_line
from nf4conv.models.config import without_quantization
from nf4conv.models.parsing import excess_of, parse_config
from nf4conv.sources.source import Source

_VALUES_OF_A_BYTE: Final = 4  # twice as many as in 4 bits; layers may share weights
_ALWAYS_ALLOWED: Final = 2**26  # values: what is computed, and not stored


def require_stored(question: Question, model: Source) -> None:
    """Checks that a checkpoint may hold the model that its config describes.

    transformers fills with random values what it does not find in the files.

    Raises:
        SourceError: it cannot, or transformers cannot build the model.
    """
    config = model.config or {}
    names = [tensor.name for tensor in model.tensors]
    excess = excess_of(config, names)
    if excess is not None:
        raise SourceError(f"{model.folder}: its config.json cannot be right: {excess}")
    try:
        parsed = parse_config(without_quantization(config), question.config_class)
        with torch.device("meta"):
            built = _build(question.loader, parsed)
    except Exception as error:  # transformers raises anything
        raise SourceError(
            f"{model.folder}: transformers cannot build what its config.json describes: "
            f"{first_line(error)}"
        ) from error
    values = sum(part.numel() for part in chain(built.parameters(), built.buffers()))
    stored = sum(tensor.nbytes for tensor in model.tensors)
    if values > _VALUES_OF_A_BYTE * stored + _ALWAYS_ALLOWED:
        raise SourceError(
            f"{model.folder}: its config.json describes a model of {values:,} values, and its "
            f"files hold {stored:,} bytes; nf4conv verify says more"
        )


def _build(loader: Any, parsed: Any) -> torch.nn.Module:
    """Builds a model without weights, by one of the classes of transformers or by AutoModel."""
    build = getattr(loader, "_from_config", None) or loader.from_config
    model: torch.nn.Module = build(parsed)
    return model
