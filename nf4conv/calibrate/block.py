"""Calibrates the weights of one block, stage by stage."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from nf4conv.calibrate.activations import Activations
from nf4conv.calibrate.finished import FinishedBlocks, WeightGain
from nf4conv.calibrate.flow import Call
from nf4conv.calibrate.stages import Stage, Target, find_stages, inputs_of
from nf4conv.calibrate.weights import Contents, matrix_in
from nf4conv.codec.ops import dequantize_4bit
from nf4conv.codec.quant_state import DTYPES, QuantState
from nf4conv.codec.rounding import (
    Rounded,
    SecondMoments,
    factor,
    layer_cost,
    round_calibrated,
    search,
)
from nf4conv.errors import SourceError
from nf4conv.format.layout import Format

_MOST_ENERGY: Final = 64.0
"""A token counts no more than one of this many times the median energy. The first tokens of a text
have activations in large models that would hide all others."""


@dataclass
class BlockAtWork:
    """Holds a block while its weights are in memory.

    Attributes:
        number: its place among the blocks.
        path: where it stands in the model, for errors.
        module: the block.
        contents: its weights.
        targets: those that are calibrated.
        calls: how it is called, by batch.
        activations: the hidden states of all windows.
        calibrating: how many batches calibrate; the others judge.
        format: of the weights in 4 bits.
    """

    number: int
    path: str
    module: nn.Module
    contents: Contents
    targets: Sequence[Target]
    calls: Sequence[Call]
    activations: Activations
    calibrating: int
    format: Format

    def run(self) -> None:
        """Runs all windows through the block."""
        for number, hidden in enumerate(self.activations.batches()):
            self.activations.replace(number, self.calls[number].run(self.module, hidden))

    def inputs(self, stage: Stage) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the number of each batch, and what goes into a stage, [tokens, in_features]."""
        for number, hidden in enumerate(self.activations.batches()):
            yield number, inputs_of(self.module, stage, self.calls[number], hidden)


@dataclass(frozen=True)
class CalibratedBlock:
    """The weights of a block in 4 bits, and what was gained, by their names."""

    weights: Mapping[str, Rounded]
    gains: Mapping[str, WeightGain]


@dataclass(frozen=True)
class _Moments:
    """The second moments of what goes into a stage.

    Attributes:
        calibrating: over the windows that calibrate.
        judging: over those that judge.
    """

    calibrating: SecondMoments
    judging: SecondMoments


def calibrate_block(block: BlockAtWork) -> CalibratedBlock:
    """Rounds the weights of a block; each stage sees what comes out of those before it in 4 bits.

    Raises:
        SourceError: a weight or an activation is NaN or infinite.
    """
    first = next(block.activations.batches())
    stages = find_stages(block.module, block.calls[0], first[:1], block.targets)
    weights: dict[str, Rounded] = {}
    gains: dict[str, WeightGain] = {}
    for stage in stages:
        moments = _moments_of(block, stage)
        for target, rounded, gain in _round(block, stage, moments):
            weights[target.job.name] = rounded
            gains[target.job.name] = gain
            _put(block, target, rounded.values(_dtype_of(block, target)))
    for target in block.targets:
        if target.job.name not in weights:
            found = _searched(block, target)
            weights[target.job.name] = found
            gains[target.job.name] = WeightGain(1.0, 0)
    return CalibratedBlock(weights, gains)


def _moments_of(block: BlockAtWork, stage: Stage) -> _Moments:
    moments: _Moments | None = None
    for number, inputs in block.inputs(stage):
        if moments is None:
            width = inputs.shape[1]
            moments = _Moments(
                SecondMoments.zeros(width, inputs.device),
                SecondMoments.zeros(width, inputs.device),
            )
        of_batch = moments.calibrating if number < block.calibrating else moments.judging
        of_batch.add(_capped(inputs))
    assert moments is not None
    if not bool(moments.calibrating.sums.diagonal().sum().isfinite()):
        raise SourceError(
            f"{block.path}.{stage.path}: what goes into it holds NaN or infinity, so it cannot be "
            f"calibrated; --exclude the weights of the block that makes them, or leave "
            f"--calibrate out"
        )
    return moments


def _capped(inputs: torch.Tensor) -> torch.Tensor:
    """Returns tokens of which none has far more energy than others."""
    energy = inputs.float().square().sum(dim=1)
    most = _MOST_ENERGY * energy.median()
    if not bool((energy > most).any()) or not bool(most > 0):
        return inputs
    shrunk = (most / energy).clamp(max=1.0).sqrt()
    return inputs.float() * shrunk[:, None]


def _round(
    block: BlockAtWork, stage: Stage, moments: _Moments
) -> Iterator[tuple[Target, Rounded, WeightGain]]:
    """Yields the weights of a stage in 4 bits, and what is gained for each."""
    format = block.format
    weights = [_original(block, target) for target in stage.targets]
    of_inputs = factor(moments.calibrating.mean(), format.blocksize)
    results = round_calibrated(weights, of_inputs, format.quant_type, format.double_quant)
    del of_inputs
    judge = moments.judging.mean()
    for target, weight, rounded in zip(stage.targets, weights, results, strict=True):
        found = search(weight, format.quant_type, format.blocksize, format.double_quant)
        before = layer_cost(weight, found, judge)
        after = layer_cost(weight, rounded, judge)
        if rounded.is_calibrated and after < before:
            yield target, rounded, WeightGain(after / before)
        else:
            yield target, found, WeightGain(1.0)


def _original(block: BlockAtWork, target: Target) -> torch.Tensor:
    """Returns a weight as it is before it is packed, [out, in].

    Raises:
        SourceError: it holds NaN or infinity.
    """
    job = target.job
    view = matrix_in(block.contents.values[job.source.name], job.matrix)
    weight = view.to(DTYPES[block.format.dtype]).contiguous()
    if not bool(weight.isfinite().all()):
        raise SourceError(
            f"{job.source.file}: {job.source.name}: holds NaN or infinity; repair the checkpoint, "
            f"or leave such tensors unquantized: --non-finite keep"
        )
    return weight


def _searched(block: BlockAtWork, target: Target) -> Rounded:
    """Returns a weight with searched scales, which the block never uses."""
    format = block.format
    weight = _original(block, target)
    return search(weight, format.quant_type, format.blocksize, format.double_quant)


def _dtype_of(block: BlockAtWork, target: Target) -> torch.dtype:
    return block.contents.values[target.job.source.name].dtype


def _put(block: BlockAtWork, target: Target, values: torch.Tensor) -> None:
    """Puts the decoded weight in the place of the original one."""
    name = target.job.source.name
    matrix_in(block.contents.values[name], target.job.matrix).copy_(values)
    block.contents.renew({name: None})


def restore_block(block: BlockAtWork, finished: FinishedBlocks) -> None:
    """Fills a block with the weights that it was calibrated to."""
    stored = finished.components(block.number)
    for target in block.targets:
        parts = stored[target.job.name]
        device = block.contents.values[target.job.source.name].device
        on_device = {suffix: part.to(device) for suffix, part in parts.items()}
        packed = on_device.pop("")
        state = QuantState.from_components(on_device)
        _put(block, target, dequantize_4bit(packed, state, dtype=_dtype_of(block, target)))
