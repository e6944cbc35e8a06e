"""Chooses everything about the quantization of one checkpoint: what is packed, how, what stays."""

from collections.abc import Mapping
from dataclasses import dataclass

from nf4conv.choose.decisions import Selection
from nf4conv.choose.formats import choose_dtype, choose_format, without_odd_sizes
from nf4conv.choose.selection import select
from nf4conv.choose.unchanged import Stored, weights_that_stay
from nf4conv.format.layout import Format
from nf4conv.options import QuantizeOptions
from nf4conv.sources.source import Source


@dataclass(frozen=True)
class Choice:
    """Holds what was chosen for one checkpoint."""

    # what becomes of each tensor, and the modules that loaders must skip
    selection: Selection
    # how weights are packed
    format: Format
    # for weights that are in 4 bits already and are to be packed, by name: what their components
    # are copied from, or a text that says why they are packed anew
    unchanged: Mapping[str, Stored | str]


def choose(source: Source, options: QuantizeOptions) -> Choice:
    """Chooses what is packed, in which format, and what stays as it is.

    Args:
        source: the checkpoint.
        options: what the user asked for.

    Raises:
        PlanError: the request cannot be met for this checkpoint.
    """
    config = source.config or {}
    selection = select(source.tensors, config, options)
    dtype = choose_dtype(source, selection, options)
    format = choose_format(source, dtype, options)
    selection = without_odd_sizes(source, selection, format)
    unchanged = weights_that_stay(source, selection.decisions, format, options)
    return Choice(selection, format, unchanged)
