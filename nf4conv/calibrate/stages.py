"""Divides the weights of a block into stages, and catches what goes into each of them.

Weights that multiply the same tensor form a stage, such as those of queries, keys and values; so do
those of all experts that a stacked parameter holds. The stages of a block are taken in the order in
which the block reaches them: what goes into one depends on those before it, which are in 4 bits by
then.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nf4conv.calibrate.model.experts import ExpertWatch
from nf4conv.calibrate.model.flow import Call
from nf4conv.plan.jobs import PackJob


@dataclass(frozen=True)
class Target:
    """A weight of a block that is calibrated.

    Attributes:
        job: what becomes of it.
        path: the module in the block that multiplies with it, or the stacked parameter of experts
            that holds it.
        expert: which expert of a stacked parameter it belongs to; None for a weight of its own.
    """

    job: PackJob
    path: str
    expert: int | None = None


@dataclass(frozen=True)
class Stage:
    """Weights of a block that multiply the same inputs, or those of all experts."""

    targets: tuple[Target, ...]

    @property
    def path(self) -> str:
        """The module whose inputs stand for those of all, or the stacked parameter."""
        return self.targets[0].path

    @property
    def is_of_experts(self) -> bool:
        return self.targets[0].expert is not None

    @property
    def by_expert(self) -> Mapping[int, Sequence[Target]]:
        """The weights of each expert, in the order of experts."""
        found: defaultdict[int, list[Target]] = defaultdict(list)
        for target in self.targets:
            if target.expert is not None:
                found[target.expert].append(target)
        return {expert: found[expert] for expert in sorted(found)}


class _Stop(Exception):  # noqa: N818 - it is no error
    """Ends the run of a block where nothing more is needed of it."""


def find_stages(
    block: nn.Module, call: Call, hidden: torch.Tensor, targets: Sequence[Target]
) -> list[Stage]:
    """Runs a block once, and groups its weights by what they multiply, in the order of the run.

    Weights that are not reached are left out.
    """
    # inputs are kept, so that no other tensor gets the memory of one of them
    inputs: list[torch.Tensor] = []
    members: dict[object, list[Target]] = {}

    def note_module(target: Target, found: torch.Tensor) -> None:
        inputs.append(found)
        place = (found.data_ptr(), found.numel(), found.dtype)
        known = members.setdefault(place, [])
        if target not in known:
            known.append(target)

    def note_expert(path: str, expert: int, found: torch.Tensor) -> None:  # noqa: ARG001
        if path not in members:
            members[path] = [target for target in targets if target.path == path]

    alone = [target for target in targets if target.expert is None]
    stacked = {target.path for target in targets if target.expert is not None}
    with _watching(block, alone, note_module), _experts(block, stacked, note_expert):
        call.run(block, hidden)
    return [Stage(tuple(of_stage)) for of_stage in members.values()]


def inputs_of(block: nn.Module, stage: Stage, call: Call, hidden: torch.Tensor) -> torch.Tensor:
    """Returns what goes into a stage, [tokens, in_features]; the block runs no further than that.

    The weights of earlier stages are in 4 bits by now.
    """
    caught: list[torch.Tensor] = []

    def note(target: Target, found: torch.Tensor) -> None:  # noqa: ARG001
        caught.append(found)
        raise _Stop

    with _watching(block, stage.targets[:1], note), suppress(_Stop):
        call.run(block, hidden)
    return caught[0].reshape(-1, caught[0].shape[-1])


def inputs_of_experts(
    block: nn.Module, stage: Stage, call: Call, hidden: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Returns what goes into each expert of a stage, [tokens, in_features]."""
    caught: dict[int, torch.Tensor] = {}

    def note(path: str, expert: int, found: torch.Tensor) -> None:  # noqa: ARG001
        caught.setdefault(expert, found)

    with _experts(block, [stage.path], note):
        call.run(block, hidden)
    return caught


@contextmanager
def _experts(
    block: nn.Module, paths: Collection[str], note: Callable[[str, int, torch.Tensor], None]
) -> Iterator[None]:
    """Tells of what goes into experts of stacked parameters."""
    if not paths:
        yield
        return
    parameters = {path: block.get_parameter(path) for path in paths}
    with ExpertWatch(parameters, note):
        yield


@contextmanager
def _watching(
    block: nn.Module, targets: Sequence[Target], note: Callable[[Target, torch.Tensor], None]
) -> Iterator[None]:
    """Tells of the inputs of modules, before they run."""
    handles = []
    for target in targets:
        module = block.get_submodule(target.path)
        handles.append(module.register_forward_pre_hook(_hook(target, note)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(
    target: Target, note: Callable[[Target, torch.Tensor], None]
) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG001
        note(target, args[0])

    return hook
