"""Finds out how much the predictions depend on the outputs of each weight: one backward pass.

    run all windows through the original blocks, keeping what goes into each ▸ sample labels of the
    model's own predictions ▸ from the last block to the first: run it once more with gradients

The second moments of the gradients at a weight's outputs, G = Σ g·gᵀ, are kept in the output's work
folder. An interrupted pass begins anew; one that is finished is not repeated.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nf4conv.calibrate.hidden import HiddenStates, give_back
from nf4conv.calibrate.kept import KeptFiles, Tensors
from nf4conv.calibrate.model.flow import Call
from nf4conv.calibrate.model.weights import WeightReader
from nf4conv.calibrate.rounding import SecondMoments
from nf4conv.calibrate.session import Session
from nf4conv.calibrate.stages import Target, find_stages
from nf4conv.calibrate.windows import SEED
from nf4conv.errors import OutputError, SourceError


class OutputMoments:
    """Finds the second moments of the gradients at outputs, and keeps them."""

    def __init__(self, session: Session, kept: KeptFiles) -> None:
        self._session = session
        self._calibration = session.calibration
        self._kept = kept

    def of_block(self, number: int) -> Tensors:
        """Returns the mean of g·gᵀ at the outputs of weights of a block, by the weight's name."""
        if self._calibration.outputs is None:
            return {}
        found = self._kept.read(_name(number))
        if found is None:
            file = self._kept.file(_name(number))
            raise OutputError(f"{file}: was changed while it was used; run again", path=file)
        return {name: square.to(self._session.device) for name, square in found[0].items()}

    def find(
        self, blocks: Iterable[int], reader: WeightReader, progress: Callable[[int], None]
    ) -> None:
        """Makes the backward pass, unless it has been made for all of some blocks."""
        if all(self._kept.read(_name(number)) is not None for number in blocks):
            return
        inputs, calls = self._run_forward(reader, progress)
        give_back(self._session.device)
        gradients = self._start(reader, inputs[-1])
        give_back(self._session.device)
        inputs.pop().remove()
        for number in reversed(range(self._calibration.blocks)):
            self._go_back(number, reader, inputs.pop(), calls, gradients)
            give_back(self._session.device)
            progress(self._calibration.block_bytes[number])
        gradients.remove()

    def _hidden_states(self) -> HiddenStates:
        """Returns room for the hidden states of all windows, beside those before other blocks."""
        session = self._session
        return HiddenStates(session.device, 0, session.budget, session.folder)

    def _run_forward(
        self, reader: WeightReader, progress: Callable[[int], None]
    ) -> tuple[list[HiddenStates], list[list[Call]]]:
        """Returns the hidden states before each block and behind the last, and the calls."""
        embedded, calls = self._session.embed(reader)
        inputs = [embedded]
        for number in range(self._calibration.blocks):
            contents = self._session.fill_block(number, reader)
            block = self._calibration.flow.blocks.blocks[number]
            behind = self._hidden_states()
            for batch, hidden in enumerate(inputs[-1].batches()):
                behind.append(calls[batch][number].run(block, hidden))
            inputs.append(behind)
            contents.release()
            progress(self._calibration.block_bytes[number])
        return inputs, calls

    def _start(self, reader: WeightReader, hidden: HiddenStates) -> HiddenStates:
        """Returns the gradients behind the last block, for labels that the model would draw."""
        flow = self._calibration.flow
        contents = self._session.outside(reader)
        flow.model.tie_weights()  # type: ignore[operator]
        generator = torch.Generator(self._session.device)
        generator.manual_seed(SEED)
        gradients = self._hidden_states()
        for ids, states in zip(self._session.batches, hidden.batches(), strict=True):
            found = []
            # one window at a time: the outputs of the head are the largest tensors
            for window, behind in zip(torch.split(ids, 1), torch.split(states, 1), strict=True):
                leaf = behind.detach().requires_grad_()
                with torch.enable_grad():
                    logits = flow.predictions(window.to(self._session.device), leaf).float()
                    log_probabilities = logits.log_softmax(-1).flatten(0, -2)
                    probabilities = log_probabilities.detach().exp()
                    labels = torch.multinomial(probabilities, 1, generator=generator)
                    log_likelihood = log_probabilities.gather(1, labels).sum()
                    (gradient,) = torch.autograd.grad(log_likelihood, leaf)
                found.append(gradient)
            gradients.append(torch.cat(found))
        contents.release()
        flow.model.tie_weights()  # type: ignore[operator]  # a tied head would hold the embeddings
        return gradients

    def _go_back(
        self,
        number: int,
        reader: WeightReader,
        inputs: HiddenStates,
        calls: Sequence[Sequence[Call]],
        gradients: HiddenStates,
    ) -> None:
        """Adds up the gradients in a block, and replaces those behind it by those before it."""
        device = self._session.device
        contents = self._session.fill_block(number, reader)
        block = self._calibration.flow.blocks.blocks[number]
        first = next(inputs.batches())
        targets = self._chosen(number, block, calls[0][number], first)
        moments = {
            target.job.name: SecondMoments.zeros(target.job.matrix.shape[0], device)
            for target in targets
        }
        for batch, (hidden, behind) in enumerate(
            zip(inputs.batches(), gradients.batches(), strict=True)
        ):
            leaf = hidden.detach().requires_grad_()
            adds = batch < self._session.calibrating_batches
            handles = [_watch(block, target, moments) for target in targets if adds]
            # other ways to compute attention add gradients in an order that nobody knows
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                made = calls[batch][number].run(block, leaf)
                (before,) = torch.autograd.grad(made, leaf, behind)
            for handle in handles:
                handle.remove()
            gradients.replace(batch, before)
        inputs.remove()
        contents.release()
        self._keep(number, moments)

    def _chosen(
        self, number: int, block: nn.Module, call: Call, hidden: torch.Tensor
    ) -> list[Target]:
        """Returns the weights of a block that are rounded with a view to their outputs."""
        targets = [
            target for target in self._calibration.targets.get(number, ()) if target.expert is None
        ]
        if self._calibration.outputs == "all" or not targets:
            return targets
        return list(find_stages(block, call, hidden, targets)[0].targets)

    def _keep(self, number: int, moments: Mapping[str, SecondMoments]) -> None:
        """Writes the mean moments of a block."""
        for name, found in moments.items():
            if not bool(found.sums.diagonal().sum().isfinite()):
                raise SourceError(f"{name}: the gradients at its outputs hold NaN or infinity")
        means = {name: found.mean() for name, found in moments.items()}
        self._kept.write(_name(number), means, {})


def _name(number: int) -> str:
    """Returns the name that the moments of a block are kept under."""
    return f"outputs-{number:05d}"


def _watch(
    block: nn.Module, target: Target, moments: Mapping[str, SecondMoments]
) -> "torch.utils.hooks.RemovableHandle":
    """Adds the gradients at the outputs of a weight's module, once they are computed."""

    def add(gradient: torch.Tensor) -> None:
        moments[target.job.name].add(gradient.detach())

    def hook(module: nn.Module, args: object, made: torch.Tensor) -> None:  # noqa: ARG001
        made.register_hook(add)  # type: ignore[no-untyped-call]

    return block.get_submodule(target.path).register_forward_hook(hook)
