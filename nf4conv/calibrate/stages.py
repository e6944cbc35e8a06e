"""Divides the weights of a block into stages, and catches what goes into each of them.

Weights that multiply the same tensor form a stage, such as those of queries, keys and values; so do
those of all experts that a stacked parameter holds. The stages of a block are taken in the order in
which the block reaches them: what goes into one depends on those before it, which are in 4 bits by
then.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from nf4conv.calibrate.model.experts import ExpertWatch
from nf4conv.calibrate.model.flow import Call, Stop
from nf4conv.plan.jobs import PackJob

Note: TypeAlias = Callable[[str, int | None, torch.Tensor], None]
"""Is told what goes into a weight: path and expert of its targets, and the inputs."""


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


Stage: TypeAlias = Sequence[Target]
"""Weights of a block that multiply the same inputs, or those of all experts."""


def find_stages(
    block: nn.Module, call: Call, hidden: torch.Tensor, targets: Sequence[Target]
) -> list[Stage]:
    """Runs a block once, and groups its weights by what they multiply, in the order of the run.

    Weights that are not reached are left out.
    """
    # inputs are kept, so that no other tensor gets the memory of one of them
    inputs: list[torch.Tensor] = []
    members: dict[object, list[Target]] = {}
    left = list(targets)

    def note(path: str, expert: int | None, found: torch.Tensor) -> None:
        place: object = path
        if expert is None:
            inputs.append(found)
            place = (found.data_ptr(), found.numel(), found.dtype)
        for target in [target for target in left if target.path == path]:
            left.remove(target)
            members.setdefault(place, []).append(target)

    with _watching(block, targets, note):
        call.run(block, hidden)
    return list(members.values())


def inputs_of(
    block: nn.Module, stage: Stage, call: Call, hidden: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Returns what goes into each expert of a stage, [tokens, in_features]; 0 is a stage without.

    The weights of earlier stages are in 4 bits by now.
    """
    caught: dict[int, torch.Tensor] = {}

    def note(path: str, expert: int | None, found: torch.Tensor) -> None:  # noqa: ARG001
        caught.setdefault(expert or 0, found.reshape(-1, found.shape[-1]))
        if expert is None:
            raise Stop

    with _watching(block, stage[:1], note), suppress(Stop):
        call.run(block, hidden)
    return caught


@contextmanager
def _watching(block: nn.Module, targets: Sequence[Target], note: Note) -> Iterator[None]:
    """Tells of what goes into weights, before they are used."""
    with ExitStack() as stack:
        stacked = {}
        for target in targets:
            if target.expert is not None:
                stacked[target.path] = block.get_parameter(target.path)
                continue
            hook = partial(_hook, note, target.path)
            handle = block.get_submodule(target.path).register_forward_pre_hook(hook)
            stack.callback(handle.remove)
        if stacked:
            stack.enter_context(ExpertWatch(stacked, note))
        yield


def _hook(note: Note, path: str, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG001
    note(path, None, args[0])
