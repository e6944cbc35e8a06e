"""Calibrates the weights of one block, stage by stage."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from nf4conv.calibrate.hidden import give_back
from nf4conv.calibrate.kept import Tensors, names_of_components
from nf4conv.calibrate.model.weights import matrix_in
from nf4conv.calibrate.moments import BlockAtWork, moments_of, moments_of_experts
from nf4conv.calibrate.rounding import (
    Factor,
    Rounded,
    factor,
    layer_cost,
    relative_error,
    round_calibrated,
    round_two_sided,
    search,
    two_sided_cost,
)
from nf4conv.calibrate.stages import Stage, Target, find_stages
from nf4conv.codec.quant_state import DTYPES, QuantState
from nf4conv.errors import SourceError
from nf4conv.report.tolerance import FOREIGN_ERROR

_FARTHEST: Final = 0.95 * FOREIGN_ERROR
"""The relative error that a rounded weight may have. Where few inputs have nearly all the energy,
rounding moves the weights of the others so far that nobody could tell them from a foreign weight.
"""


@dataclass(frozen=True)
class WeightGain:
    """Says what calibration gained for one weight.

    Attributes:
        gain: the error of the layer's outputs on windows that did not calibrate, relative to the
            error with searched scales. 1 for a weight that keeps the searched scales.
        tokens: the number of tokens that reached the weight, if that is too few. Otherwise None.
    """

    gain: float
    tokens: int | None = None


@dataclass(frozen=True)
class _Outcome:
    """Holds a rounded weight, and what rounding gained."""

    target: Target
    rounded: Rounded
    gain: WeightGain


def calibrate_block(
    block: BlockAtWork, outputs: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Rounded], dict[str, WeightGain]]:
    """Rounds the weights of a block; each stage sees what comes out of those before it in 4 bits.

    `outputs` holds the mean of g·gᵀ at the outputs of some weights. All is by the weight's name.
    """
    first = next(block.hidden.batches())
    weights: dict[str, Rounded] = {}
    gains: dict[str, WeightGain] = {}
    for stage in find_stages(block.module, block.calls[0], first, block.targets):
        found = _experts(block, stage) if stage.is_of_experts else _plain(block, stage, outputs)
        outcomes = list(found)
        for outcome in outcomes:
            weights[outcome.target.job.name] = outcome.rounded
            gains[outcome.target.job.name] = outcome.gain
        put_all(block, [(outcome.target, outcome.rounded) for outcome in outcomes])
        give_back(block.contents.device)
    for target in block.targets:
        if target.job.name not in weights:  # the block never uses it
            weights[target.job.name] = _searched(block, _original(block, target))
            gains[target.job.name] = WeightGain(1.0, 0)
    return weights, gains


def _plain(
    block: BlockAtWork, stage: Stage, outputs: Mapping[str, torch.Tensor]
) -> Iterator[_Outcome]:
    """Rounds the weights of a stage that multiplies one input."""
    moments = moments_of(block, stage)
    judge = moments.judging.mean()
    calibrating = moments.calibrating.mean()
    del moments  # each of them is the largest tensor that there is
    of_inputs = factor(calibrating, block.format.blocksize)
    del calibrating
    give_back(block.contents.device)
    alone = [target for target in stage.targets if target.job.name not in outputs]
    if alone:
        yield from _round(block, alone, of_inputs, judge, None)
    for target in stage.targets:
        if target.job.name in outputs:
            gradients = outputs[target.job.name]
            weight = _original(block, target)
            searched = _searched(block, weight)
            rounded = round_two_sided(weight, searched, of_inputs, gradients)
            before = two_sided_cost(weight, searched, judge, gradients)
            after = two_sided_cost(weight, rounded, judge, gradients)
            yield _judged(target, weight, searched, rounded, before, after, None)


def _experts(block: BlockAtWork, stage: Stage) -> Iterator[_Outcome]:
    """Rounds the weights of a stage of experts, each of which gets inputs of its own."""
    by_expert = stage.by_expert
    for found in moments_of_experts(block, stage):
        judge = found.moments.judging.mean()
        of_inputs = factor(found.moments.calibrating.mean(), block.format.blocksize)
        yield from _round(block, by_expert[found.expert], of_inputs, judge, found.few_tokens)


def _round(
    block: BlockAtWork,
    targets: Sequence[Target],
    of_inputs: Factor,
    judge: torch.Tensor,
    few_tokens: int | None,
) -> Iterator[_Outcome]:
    """Yields weights with the same inputs in 4 bits, and what is gained for each.

    `judge` are the second moments of inputs that did not calibrate; `few_tokens` is the number of
    tokens that reached the weights, if that is too few.
    """
    weights = [_original(block, target) for target in targets]
    searched = [_searched(block, weight) for weight in weights]
    results = round_calibrated(weights, searched, of_inputs)
    for target, weight, found, rounded in zip(targets, weights, searched, results, strict=True):
        before = layer_cost(weight, found, judge)
        after = layer_cost(weight, rounded, judge)
        yield _judged(target, weight, found, rounded, before, after, few_tokens)


def _judged(
    target: Target,
    weight: torch.Tensor,
    searched: Rounded,
    rounded: Rounded,
    before: float,
    after: float,
    few_tokens: int | None,
) -> _Outcome:
    """Returns the rounded weight, or the searched one if that costs no more on the judging text, or
    the rounded one is too far from the original.
    """
    if after < before and relative_error(weight, rounded) < _FARTHEST:
        return _Outcome(target, rounded, WeightGain(after / before, few_tokens))
    return _Outcome(target, searched, WeightGain(1.0, few_tokens))


def _original(block: BlockAtWork, target: Target) -> torch.Tensor:
    """Returns a weight as it is before it is packed, [out, in]; NaN or infinity is an error."""
    job = target.job
    view = matrix_in(block.contents.values[job.source.name], job.matrix)
    weight = view.to(DTYPES[block.format.dtype]).contiguous()
    if not bool(weight.isfinite().all()):
        raise SourceError.about(
            job.source.file,
            job.source.name,
            "holds NaN or infinity; repair the checkpoint, or leave it unquantized with --exclude",
        )
    return weight


def _searched(block: BlockAtWork, weight: torch.Tensor) -> Rounded:
    format = block.format
    return search(weight, format.quant_type, format.blocksize, format.double_quant)


def put_all(block: BlockAtWork, decoded: Sequence[tuple[Target, Rounded]]) -> None:
    """Puts decoded weights in the place of the original ones."""
    changed = set()
    for target, rounded in decoded:
        name = target.job.source.name
        values = block.contents.values[name]
        matrix_in(values, target.job.matrix).copy_(rounded.values(values.dtype))
        changed.add(name)
    block.contents.renew(changed)


def restore_block(block: BlockAtWork, components: Tensors) -> None:
    """Fills a block with the weights that it was calibrated to, given by all their components."""
    decoded = []
    for target in block.targets:
        parts = {}
        names = names_of_components(target.job.name, block.format, target.job.matrix.shape)
        for suffix, name in names.items():
            parts[suffix] = components[name].to(block.contents.device)
        packed = parts.pop("").view(-1).view(torch.uint8)[:, None]
        decoded.append((target, Rounded(packed, QuantState.from_components(parts))))
    put_all(block, decoded)
