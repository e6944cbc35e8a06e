"""Calibrates the weights of one block, stage by stage."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from nf4conv.calibrate.hidden import give_back
from nf4conv.calibrate.kept import Tensors, components_of, digest_of_components
from nf4conv.calibrate.model.filling import matrix_in
from nf4conv.calibrate.moments import BlockAtWork, moments_of
from nf4conv.calibrate.rounding.calibrated import round_calibrated
from nf4conv.calibrate.rounding.factor import factor
from nf4conv.calibrate.rounding.rounded import Rounded, layer_cost, search
from nf4conv.calibrate.rounding.two_sided import round_two_sided, two_sided_cost
from nf4conv.calibrate.stages import Stage, Target, find_stages
from nf4conv.codec.quant_state import DTYPES, QuantState
from nf4conv.errors import SourceError
from nf4conv.format.layout import parts_of
from nf4conv.report.tolerance import FOREIGN_ERROR

_FARTHEST: Final = 0.95 * FOREIGN_ERROR
"""The relative error that a rounded weight may have. Where few inputs have nearly all the energy,
rounding moves the weights of the others so far that nobody could tell them from a foreign weight.
"""


def calibrate_block(
    block: BlockAtWork, outputs: Mapping[str, torch.Tensor]
) -> tuple[Tensors, dict[str, Any]]:
    """Rounds the weights of a block; each stage sees what comes out of those before it in 4 bits.

    `outputs` holds the mean of g·gᵀ at the outputs of some weights, by the weight's name.

    Returns:
        The components of all weights, and what nf4conv.json says of them.
    """
    first = next(block.hidden.batches())
    weights: dict[str, Rounded] = {}
    gains: dict[str, float] = {}
    few_tokens: dict[str, int] = {}
    for stage in find_stages(block.module, block.calls[0], first, block.targets):
        chosen = []
        for target, rounded, gain, few in _rounded(block, stage, outputs):
            name = target.job.name
            chosen.append((target, rounded))
            weights[name] = rounded
            gains[name] = round(gain, 4)
            if few is not None:
                few_tokens[name] = few
        _put(block, chosen)
        give_back(block.contents.device)
    for target in block.targets:
        name = target.job.name
        if name not in weights:  # the block never uses it
            weights[name] = _searched(block, _original(block, target))
            gains[name] = 1.0
            few_tokens[name] = 0
    tensors = components_of(weights, block.format)
    described: dict[str, Any] = {"sha256": digest_of_components(tensors), "gains": gains}
    if few_tokens:
        described["few_tokens"] = few_tokens
    return tensors, described


def _rounded(
    block: BlockAtWork, stage: Stage, outputs: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Target, Rounded, float, int | None]]:
    """Yields the weights of a stage in 4 bits, what is gained for each, and its tokens if few.

    A gain is the cost on windows that did not calibrate, relative to the cost with searched scales.
    A weight keeps these if nothing is gained, or if it would be too far from the original.
    """
    for moments in moments_of(block, stage):
        targets = moments.targets
        few = moments.few_tokens
        judge = moments.judging.mean()
        calibrating = moments.calibrating.mean()
        del moments  # each of them is the largest tensor that there is
        of_inputs = factor(calibrating, block.format.blocksize)
        del calibrating
        give_back(block.contents.device)
        weights = [_original(block, target) for target in targets]
        searched = [_searched(block, weight) for weight in weights]
        gradients = [outputs.get(target.job.name) for target in targets]
        if gradients[0] is None:
            results = round_calibrated(weights, searched, of_inputs)
        else:
            results = []
            for weight, found, of_outputs in zip(weights, searched, gradients, strict=True):
                assert of_outputs is not None
                results.append(round_two_sided(weight, found, of_inputs, of_outputs))
        of_each = zip(targets, weights, searched, results, gradients, strict=True)
        for target, weight, found, result, of_outputs in of_each:
            before = _cost(weight, found, judge, of_outputs)
            after = _cost(weight, result, judge, of_outputs)
            distance = torch.linalg.vector_norm(result.errors(weight), dtype=torch.float64)
            length = torch.linalg.vector_norm(weight, dtype=torch.float64)
            if after < before and float(distance / length) < _FARTHEST:
                yield target, result, after / before, few
            else:
                yield target, found, 1.0, few


def _cost(
    weight: torch.Tensor, rounded: Rounded, inputs: torch.Tensor, outputs: torch.Tensor | None
) -> float:
    """Returns what a rounded weight costs, given the second moments at inputs, and at outputs."""
    if outputs is None:
        return layer_cost(weight, rounded, inputs)
    return two_sided_cost(weight, rounded, inputs, outputs)


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


def _put(block: BlockAtWork, weights: Sequence[tuple[Target, Rounded]]) -> None:
    """Puts decoded weights in the place of the original ones."""
    changed = set()
    for target, rounded in weights:
        name = target.job.source.name
        values = block.contents.values[name]
        matrix_in(values, target.job.matrix).copy_(rounded.values(values.dtype))
        changed.add(name)
    block.contents.renew(changed)


def restore_block(block: BlockAtWork, components: Tensors) -> None:
    """Fills a block with the weights that it was calibrated to, given by all their components."""
    device = block.contents.device
    weights = []
    for target in block.targets:
        name = target.job.name
        packed = components[name].to(device).view(-1).view(torch.uint8)[:, None]
        parts = {key: part.to(device) for key, part in parts_of(name, components).items()}
        weights.append((target, Rounded(packed, QuantState.from_components(parts))))
    _put(block, weights)
