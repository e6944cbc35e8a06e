"""Follows hidden states from the embeddings through a model's blocks.

The parent of the blocks says what each block is called with: masks, position embeddings, flags. So
it runs with blocks that only note their arguments and return what they got; once the last of them
has been called, the run ends, before the head.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from nf4conv.calibrate.model.building import BlockList, planning_error
from nf4conv.calibrate.model.filling import set_tensor
from nf4conv.errors import PlanError, first_line

_NAME = "hidden_states"


@dataclass(frozen=True)
class Call:
    """Holds the arguments that a block is called with, beside the hidden states.

    Attributes:
        args: the arguments behind the hidden states.
        kwargs: the named arguments.
        is_named: True if the hidden states are a named argument, too.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_named: bool

    def run(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the hidden states that a block makes of others."""
        name = type(block).__name__
        message = f"--calibrate: {name} cannot be run, as if config.json did not belong to these"
        with planning_error(f"{message} weights"):
            if self.is_named:
                found = block(*self.args, **{_NAME: hidden}, **self.kwargs)
            else:
                found = block(hidden, *self.args, **self.kwargs)
        made: torch.Tensor = found[0] if isinstance(found, (tuple, list)) else found
        return made


@dataclass(frozen=True)
class Flow:
    """Runs the part of a model before its blocks.

    Attributes:
        model: the model.
        blocks: its blocks.
        is_tuple: True if the parent of the blocks expects a tuple from each.
    """

    model: nn.Module
    blocks: BlockList
    is_tuple: bool

    def calls(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[Call]]:
        """Embeds windows of tokens, and notes what each block is called with.

        Returns:
            The hidden states that enter the first block, and the calls of all blocks.
        """
        name = type(self.model).__name__
        catcher = _Catcher(self.blocks.blocks, is_tuple=self.is_tuple, changes=False)
        with planning_error(f"--calibrate: {name} cannot be run on token ids alone"):
            catcher.run(self.model, ids)
        if catcher.fault:
            raise PlanError(
                f"--calibrate: {name} cannot be calibrated on this text: {catcher.fault}"
            )
        return catcher.hidden, catcher.calls

    def predictions(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Returns what the head makes of the hidden states behind the last block.

        `ids` are the tokens, [windows, length], whose own hidden states are passed by.
        """

        def forward(*_: Any, **__: Any) -> Any:
            return (hidden,) if self.is_tuple else hidden

        with ExitStack() as stack:
            for block in self.blocks.blocks:
                stack.enter_context(_in_place(block, forward))
            logits: torch.Tensor = self.model(input_ids=ids).logits
        return logits


class Stop(BaseException):  # it is no error
    """Ends a run where nothing more is needed of it."""


@dataclass
class _Catcher:
    """Runs a model on windows, and stands in the place of all blocks.

    Attributes:
        blocks: the blocks.
        is_tuple: True if the parent of the blocks expects a tuple from each.
        changes: True to return something else than what comes in, so that no mix-up goes unnoticed.
        hidden: what enters the first block.
        calls: what each block is called with.
        fault: why the model cannot be run block by block; empty if it can.
    """

    blocks: Sequence[nn.Module]
    is_tuple: bool
    changes: bool

    def __post_init__(self) -> None:
        self.hidden = torch.empty(0)
        self.calls: list[Call] = []
        self.fault = "not all of its blocks are run"
        self._returned = self.hidden

    @torch.no_grad()
    def run(self, model: nn.Module, ids: torch.Tensor) -> None:
        """Runs the model up to its last block."""
        arguments: dict[str, Any] = {"input_ids": ids}
        if "use_cache" in inspect.signature(model.forward).parameters:
            arguments["use_cache"] = False
        with ExitStack() as stack:
            for number, block in enumerate(self.blocks):
                stack.enter_context(_in_place(block, partial(self._note, number)))
            stack.enter_context(suppress(Stop))
            model(**arguments)

    def _note(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Notes a call of a block, and returns what the block would; ends the run at the last."""
        is_named = _NAME in kwargs
        hidden = kwargs.pop(_NAME) if is_named else args[0]
        if number != len(self.calls):
            self._stop("its blocks are not run one after the other")
        if number == 0:
            self.hidden = hidden
        elif not torch.equal(hidden.nan_to_num(), self._returned.nan_to_num()):  # NaN is unequal
            self._stop("what a block returns is changed before the next block")
        self.calls.append(Call(args if is_named else args[1:], kwargs, is_named))
        if len(self.calls) == len(self.blocks):
            self._stop("")
        self._returned = torch.rand_like(hidden) if self.changes else hidden
        return (self._returned,) if self.is_tuple else self._returned

    def _stop(self, fault: str) -> NoReturn:
        self.fault = fault
        raise Stop


@contextmanager
def _in_place(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Puts another function in the place of a block's forward."""
    block.forward = forward
    try:
        yield
    finally:
        del block.forward


def find_flow(model: nn.Module, blocks: BlockList) -> Flow:
    """Finds out how a model calls its blocks, by running it without weights."""
    # NaN takes no memory, and shows later if the checkpoint lacks a parameter that is used
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter.is_meta and blocks.number_of(name) is None:
            nothing = torch.tensor(torch.nan, dtype=parameter.dtype).expand(parameter.shape)
            set_tensor(model, name, nothing)
    ids = torch.zeros((2, 8), dtype=torch.int64)
    faults = []
    for is_tuple in (False, True):
        catcher = _Catcher(blocks.blocks, is_tuple=is_tuple, changes=True)
        try:
            catcher.run(model, ids)
            if not catcher.fault:
                return Flow(model, blocks, is_tuple)
            faults.append(catcher.fault)
        except Exception as error:  # noqa: BLE001 - the code of a model raises anything
            faults.append(first_line(error))
    raise PlanError(
        f"--calibrate: {type(model).__name__} cannot be calibrated block by block: {faults[0]}"
    )
