"""Finds out how much the predictions depend on the outputs of each weight: one backward pass.

    run all windows through the original blocks, keeping what goes into each ▸ sample labels of the
    model's own predictions ▸ from the last block to the first: run it once more with gradients

The second moments of the gradients at a weight's outputs, G = Σ g·gᵀ, are kept in the output's work
folder. An interrupted pass begins anew; one that is finished is not repeated.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nf4conv.calibrate.hidden import HiddenStates, give_back
from nf4conv.calibrate.kept import Tensors
from nf4conv.calibrate.model.flow import Call
from nf4conv.calibrate.moments import SecondMoments
from nf4conv.calibrate.session import Session
from nf4conv.calibrate.stages import Target, find_stages
from nf4conv.calibrate.text import SEED
from nf4conv.errors import SourceError


def output_moments(session: Session, number: int) -> Tensors:
    """Returns the mean of g·gᵀ at the outputs of weights of a block, by the weight's name."""
    if session.calibration.outputs is None:
        return {}
    found = session.kept.read(_name(number))
    assert found is not None  # find_output_moments has looked at it
    return {name: square.to(session.device) for name, square in found[0].items()}


def find_output_moments(session: Session, blocks: Iterable[int]) -> None:
    """Makes the backward pass, unless it has been made for all of some blocks."""
    if all(session.kept.read(_name(number)) is not None for number in blocks):
        return
    # hidden states before each block, behind the last, and the gradients
    memory = session.memory // (len(session.blocks) + 2)
    inputs, calls = _run_forward(session, memory)
    give_back(session.device)
    gradients = _gradients_behind(session, inputs[-1], memory)
    give_back(session.device)
    inputs.pop().remove()
    for number in reversed(range(len(session.blocks))):
        _go_back(session, number, inputs.pop(), calls, gradients)
        give_back(session.device)
    gradients.remove()


def _run_forward(
    session: Session, memory: int
) -> tuple[list[HiddenStates], list[tuple[Call, ...]]]:
    """Returns the hidden states before each block and behind the last, and the calls."""
    embedded, calls = session.embed(memory)
    inputs = [embedded]
    for number, block in enumerate(session.blocks):
        behind = HiddenStates(session.device, 0, memory, session.kept.folder)
        with session.filled(number):
            for batch, hidden in enumerate(inputs[-1].batches()):
                behind.append(calls[number][batch].run(block, hidden))
        inputs.append(behind)
    return inputs, calls


def _gradients_behind(session: Session, hidden: HiddenStates, memory: int) -> HiddenStates:
    """Returns the gradients behind the last block, for labels that the model would draw."""
    flow = session.calibration.flow
    generator = torch.Generator(session.device)
    generator.manual_seed(SEED)
    gradients = HiddenStates(session.device, 0, memory, session.kept.folder)
    with session.filled(None):
        flow.model.tie_weights()  # type: ignore[operator]
        for ids, states in zip(session.batches, hidden.batches(), strict=True):
            found = []
            # one window at a time: the outputs of the head are the largest tensors
            for window, behind in zip(torch.split(ids, 1), torch.split(states, 1), strict=True):
                leaf = behind.detach().requires_grad_()
                with torch.enable_grad():
                    logits = flow.predictions(window.to(session.device), leaf).float()
                    log_probabilities = logits.log_softmax(-1).flatten(0, -2)
                    probabilities = log_probabilities.detach().exp()
                    if not bool(probabilities.sum().isfinite()):
                        raise SourceError(
                            f"{session.plan.source}: predicts NaN or infinity, as if a weight did "
                            f"or were missing; leave --calibrate-output out"
                        )
                    labels = torch.multinomial(probabilities, 1, generator=generator)
                    log_likelihood = log_probabilities.gather(1, labels).sum()
                    (gradient,) = torch.autograd.grad(log_likelihood, leaf)
                found.append(gradient)
            gradients.append(torch.cat(found))
    flow.model.tie_weights()  # type: ignore[operator]  # a tied head would hold the embeddings
    return gradients


def _go_back(
    session: Session,
    number: int,
    inputs: HiddenStates,
    calls: Sequence[Sequence[Call]],
    gradients: HiddenStates,
) -> None:
    """Adds up the gradients in a block, and replaces those behind it by those before it."""
    block = session.blocks[number]
    moments = {}
    with session.filled(number):
        targets = _chosen(session, number, calls[number][0], next(inputs.batches()))
        for target in targets:
            size = target.job.matrix.shape[0]
            moments[target.job.name] = SecondMoments.zeros(size, session.device)
        pairs = zip(inputs.batches(), gradients.batches(), strict=True)
        for batch, (hidden, behind) in enumerate(pairs):
            leaf = hidden.detach().requires_grad_()
            # other ways to compute attention add gradients in an order that nobody knows
            with ExitStack() as stack:
                if batch < session.calibrating_batches:
                    for target in targets:
                        module = block.get_submodule(target.path)
                        hook = partial(_hook, moments[target.job.name])
                        stack.callback(module.register_forward_hook(hook).remove)
                stack.enter_context(torch.enable_grad())
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                made = calls[number][batch].run(block, leaf)
                (before,) = torch.autograd.grad(made, leaf, behind)
            gradients.replace(batch, before)
    inputs.remove()
    means = {}
    for name, found in moments.items():
        if not bool(found.sums.diagonal().sum().isfinite()):
            raise SourceError(f"{name}: the gradients at its outputs hold NaN or infinity")
        means[name] = found.mean().cpu()
    session.kept.write(_name(number), means, {})


def _hook(
    moments: SecondMoments,
    module: nn.Module,  # noqa: ARG001
    args: object,  # noqa: ARG001
    made: torch.Tensor,
) -> None:
    """Adds the gradients at the outputs of a module, once they are computed."""
    made.register_hook(moments.add)  # type: ignore[no-untyped-call]


def _chosen(session: Session, number: int, call: Call, hidden: torch.Tensor) -> Sequence[Target]:
    """Returns the weights of a block that are rounded with a view to their outputs."""
    calibration = session.calibration
    targets = [one for one in calibration.targets.get(number, ()) if one.expert is None]
    if calibration.outputs == "all" or not targets:
        return targets
    return find_stages(session.blocks[number], call, hidden, targets)[0]


def _name(number: int) -> str:
    """Returns the name that the moments of a block are kept under."""
    return f"outputs-{number:05d}"
