"""Follows hidden states from the embeddings through a model's blocks.

The parent of the blocks says what each block is called with: masks, position embeddings, flags. So
it runs with blocks that only note their arguments and return what they got; once the last of them
has been called, the run ends, before the head.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from nf4conv.calibrate.model.building import BlockList, set_tensor
from nf4conv.errors import Nf4convError, PlanError, first_line

_NAME = "hidden_states"

_FAILURES: Final = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)
"""Raised by the code of a model that gets other weights or arguments than it expects."""


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
        try:
            if self.is_named:
                found = block(*self.args, **{_NAME: hidden}, **self.kwargs)
            else:
                found = block(hidden, *self.args, **self.kwargs)
        except (Nf4convError, torch.OutOfMemoryError):
            raise
        except _FAILURES as error:
            raise PlanError(
                f"--calibrate: {type(block).__name__} cannot be run, as if config.json did not "
                f"belong to these weights: {first_line(error)}"
            ) from error
        made: torch.Tensor = found[0] if isinstance(found, (tuple, list)) else found
        return made


@dataclass(frozen=True)
class Flow:
    """Runs the part of a model before its blocks.

    Attributes:
        model: the model.
        blocks: its blocks.
        is_tuple: True if the parent of the blocks expects a tuple from each.
        needed: names of the parameters and buffers that the part before the blocks uses.
    """

    model: nn.Module
    blocks: BlockList
    is_tuple: bool
    needed: tuple[str, ...]

    def calls(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[Call]]:
        """Embeds windows of tokens, and notes what each block is called with.

        Returns:
            The hidden states that enter the first block, and the calls of all blocks.
        """
        try:
            return _caught(self.model, self.blocks, ids, is_tuple=self.is_tuple).result()
        except _FAILURES as error:
            raise PlanError(
                f"--calibrate: {type(self.model).__name__} cannot be run on token ids alone: "
                f"{first_line(error)}"
            ) from error

    def predictions(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Returns what the head makes of the hidden states behind the last block.

        `ids` are the tokens, [windows, length], whose own hidden states are passed by.
        """
        last = len(self.blocks.blocks) - 1
        with ExitStack() as stack:
            for number, block in enumerate(self.blocks.blocks):
                made = hidden if number == last else None
                stack.enter_context(_in_place(block, _passing(made, is_tuple=self.is_tuple)))
            logits: torch.Tensor = self.model(input_ids=ids).logits
        return logits


class _Stop(Exception):  # noqa: N818 - it is no error
    """Ends a run behind the last block."""


class _Catcher:
    """Stands in the place of all blocks."""

    def __init__(self, blocks: Sequence[nn.Module], *, is_tuple: bool, changes: bool) -> None:
        self._blocks = blocks
        self._is_tuple = is_tuple
        self._changes = changes
        self._hidden: torch.Tensor | None = None
        self._returned: torch.Tensor | None = None
        self._calls: list[Call] = []
        self.fault = ""

    def forward_of(self, number: int) -> Callable[..., Any]:
        """Returns what stands in the place of a block's forward."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._note(number, args, kwargs)

        return forward

    def _note(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Notes a call of a block, and returns what the block would; ends the run at the last."""
        is_named = _NAME in kwargs
        hidden = kwargs.pop(_NAME) if is_named else args[0]
        if number != len(self._calls):
            self.fault = "its blocks are not run one after the other"
        if self._hidden is None:
            self._hidden = hidden
        elif self._returned is None or not torch.equal(hidden, self._returned):
            self.fault = "what a block returns is changed before the next block"
        self._calls.append(Call(args if is_named else args[1:], kwargs, is_named))
        if self.fault or len(self._calls) == len(self._blocks):
            raise _Stop
        # during the check something else than what came in, so that no mix-up goes unnoticed
        self._returned = torch.rand_like(hidden) if self._changes else hidden
        return (self._returned,) if self._is_tuple else self._returned

    def result(self) -> tuple[torch.Tensor, list[Call]]:
        assert self._hidden is not None
        return self._hidden, self._calls


@torch.no_grad()
def _caught(
    model: nn.Module,
    blocks: BlockList,
    ids: torch.Tensor,
    *,
    is_tuple: bool,
    changes: bool = False,
) -> _Catcher:
    """Runs a model on windows; its blocks note what they are called with."""
    catcher = _Catcher(blocks.blocks, is_tuple=is_tuple, changes=changes)
    arguments: dict[str, Any] = {"input_ids": ids}
    if "use_cache" in inspect.signature(model.forward).parameters:
        arguments["use_cache"] = False
    with ExitStack() as stack:
        for number, block in enumerate(blocks.blocks):
            stack.enter_context(_in_place(block, catcher.forward_of(number)))
        stack.enter_context(suppress(_Stop))
        model(**arguments)
        catcher.fault = "not all of its blocks are run"
    return catcher


def _passing(made: torch.Tensor | None, *, is_tuple: bool) -> Callable[..., Any]:
    """Returns a forward that hands on what it gets, or `made`."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = made
        if found is None:
            found = kwargs[_NAME] if _NAME in kwargs else args[0]
        return (found,) if is_tuple else found

    return forward


@contextmanager
def _in_place(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Puts another function in the place of a block's forward."""
    block.forward = forward
    try:
        yield
    finally:
        del block.forward


def find_flow(model: nn.Module, blocks: BlockList) -> Flow:
    """Finds out how a model calls its blocks, by running it on zeros; no weight is read."""
    _fill_with_zeros(model, blocks)
    ids = torch.zeros((2, 8), dtype=torch.int64)
    faults = []
    for is_tuple in (False, True):
        used: dict[str, None] = {}
        try:
            with _noting_parameters(model, used):
                catcher = _caught(model, blocks, ids, is_tuple=is_tuple, changes=True)
            if not catcher.fault:
                names = tuple(name for name in used if blocks.number_of(name) is None)
                return Flow(model, blocks, is_tuple, names)
            faults.append(catcher.fault)
        except Exception as error:  # noqa: BLE001 - the code of a model raises anything
            faults.append(first_line(error))
    raise PlanError(
        f"--calibrate: {type(model).__name__} cannot be calibrated block by block: {faults[0]}"
    )


def _fill_with_zeros(model: nn.Module, blocks: BlockList) -> None:
    """Gives zeros that take no memory to all parameters outside the blocks."""
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter.is_meta and blocks.number_of(name) is None:
            zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            set_tensor(model, name, zeros)


@contextmanager
def _noting_parameters(model: nn.Module, used: dict[str, None]) -> Iterator[None]:
    """Notes names of parameters and buffers of the modules that run, in `used`."""
    with ExitStack() as stack:
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            tensors = {**module._parameters, **module._buffers}
            own = [f"{prefix}{name}" for name, tensor in tensors.items() if tensor is not None]
            if own:
                hook = _noting(used, own)
                stack.callback(module.register_forward_pre_hook(hook).remove)
        yield


def _noting(used: dict[str, None], names: Sequence[str]) -> Callable[[nn.Module, Any], None]:
    def note(module: nn.Module, args: Any) -> None:  # noqa: ARG001
        used.update(dict.fromkeys(names))

    return note
