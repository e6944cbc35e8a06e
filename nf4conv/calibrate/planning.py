"""Plans a calibration: builds the model without weights, finds its blocks, takes the texts.

No weight is read. Whatever is wrong with texts, model or options is known before a byte is written.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from typing import Any, Final

import torch
from torch import nn

from nf4conv.calibrate.calibrating import calibrate
from nf4conv.calibrate.model.building import build_model, find_blocks, load_tokenizer
from nf4conv.calibrate.model.experts import experts_of
from nf4conv.calibrate.model.flow import Flow, find_flow
from nf4conv.calibrate.model.names import Filling, follow_names
from nf4conv.calibrate.needs import Shapes, estimate
from nf4conv.calibrate.session import PreparedCalibration
from nf4conv.calibrate.stages import Target
from nf4conv.calibrate.text import Text, require_known
from nf4conv.calibrate.windows import LENGTH, TOKENS, Windows, cut_windows
from nf4conv.errors import PlanError
from nf4conv.models.module_names import module_of
from nf4conv.options import QuantizeOptions
from nf4conv.plan.calibration import CalibrationText
from nf4conv.plan.jobs import Job, PackJob, Plan
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.sources.source import Source

_USUAL_WIDTH: Final = 4096  # hidden states of a token, where the config does not say


def plan_calibration(plan: QuantizationPlan, texts: Sequence[Text]) -> QuantizationPlan:
    """Adds a calibration to the plan of a checkpoint, whose scales are searched.

    `check_request` has let its source and its options pass, and returned the texts.
    """
    source = plan.source
    options = plan.options
    assert source.config is not None  # or else check_request would have refused it
    names = [tensor.name for tensor in source.tensors]
    model = build_model(source.config, torch.float32, names)
    found = _Found(plan, model)
    if not found.targets:
        raise PlanError(f"{source}: --calibrate finds no weight to calibrate in its blocks")
    flow = find_flow(model, found.blocks)
    found.require_filled(flow)
    if options.calibrate_output and model.get_output_embeddings() is None:  # type: ignore[operator]
        raise PlanError(
            f"--calibrate-output: {type(model).__name__} predicts no tokens to derive by; leave it "
            f"out"
        )
    windows = _windows(source, options, model, texts)
    weights = frozenset(job.name for job in found.jobs)
    calibration = PreparedCalibration(
        texts=tuple(CalibrationText(text.name, text.sha256) for text in texts),
        tokens=windows.tokens,
        judging_tokens=windows.judging * windows.ids.shape[1],
        window=windows.ids.shape[1],
        transformers=version("transformers"),
        block_bytes=found.block_bytes,
        bytes_spared=sum(job.source_bytes - job.nbytes for job in found.jobs),
        weights=weights,
        outputs=options.calibrate_output,
        carry_out=calibrate,
        needs=estimate(found.shapes(flow, windows, options)),
        windows=windows,
        flow=flow,
        fillings=found.fillings,
        targets=found.targets,
    )
    output = with_jobs(plan.output, weights)
    notes = (*plan.notes, *_notes(calibration, found, options))
    return replace(plan, output=output, calibration=calibration, notes=notes)


def _windows(
    source: Source, options: QuantizeOptions, model: Any, texts: Sequence[Text]
) -> Windows:
    """Cuts the texts into windows that the model can read."""

    def load() -> Any:
        with source.whole_folder() as folder:
            return load_tokenizer(folder)

    tokens = options.calibration_tokens or TOKENS
    windows = cut_windows(texts, tokens, _length(model), load)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    require_known(windows.ids, vocabulary, ", ".join(text.name for text in texts), str(source))
    return windows


def _length(model: Any) -> int:
    """Returns how many tokens the model reads together."""
    config = model.config.get_text_config()
    length = LENGTH
    for key in ("max_position_embeddings", "n_positions"):
        found = getattr(config, key, None)
        if isinstance(found, int) and found > 0:
            length = min(length, found)
    for name, module in model.named_modules():
        # positions of RoBERTa and its kind begin behind the number of the padding token
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            length = min(length, module.num_embeddings - padding - 1)
    return length


def with_jobs(output: Plan, names: frozenset[str]) -> Plan:
    """Marks the jobs of weights that are calibrated."""

    def marked(job: Job) -> Job:
        if isinstance(job, PackJob) and job.name in names:
            return replace(job, original=job, reason=f"{job.reason}, calibrated")
        return job

    return output.with_jobs(marked)


class _Found:
    """Finds out which weights of a plan are calibrated, and in which block each of them is.

    Attributes:
        targets: the weights of each block.
    """

    def __init__(self, plan: QuantizationPlan, model: Any) -> None:
        self._source = plan.source
        self._model = model
        self._format = plan.output.format
        self._fillings = follow_names(model, plan.source.tensors)
        self._parameters = dict(model.named_parameters())
        self._experts: dict[str, Mapping[str, int]] = {}
        self._jobs: defaultdict[str, list[PackJob]] = defaultdict(list)
        for job in plan.output.jobs:
            if isinstance(job, PackJob) and job.stored is None:
                self._jobs[job.source.name].append(job)
        self.blocks = find_blocks(model, list(self._packed_parameters()))
        self.targets = self._find_targets()

    def _packed_parameters(self) -> Iterator[str]:
        for filling in self._fillings:
            if any(tensor.name in self._jobs for tensor in filling.tensors):
                yield from filling.parameters

    def _find_targets(self) -> dict[int, list[Target]]:
        """Returns the packed weights that can be calibrated, by block."""
        found: defaultdict[int, list[Target]] = defaultdict(list)
        for filling in self._fillings:
            number = self.blocks.number_of(filling.parameters[0])
            if number is None:
                continue
            for tensor in filling.tensors:
                for job in self._jobs.get(tensor.name, ()):
                    target = self._target(filling, job, number)
                    if target is not None:
                        found[number].append(target)
        return dict(found)

    def _target(self, filling: Filling, job: PackJob, number: int) -> Target | None:
        """Returns how a weight is calibrated; None if it cannot be."""
        prefix = self.blocks.prefix(number)
        name = filling.parameters[0]
        matrix = job.matrix
        if len(matrix.shape) != 2 or matrix.shape[1] % self._format.blocksize:
            return None
        expert = self._expert(filling, job)
        if expert is not None:
            return Target(job, name.removeprefix(prefix), expert)
        path = module_of(name)
        is_part = (matrix.expert, matrix.rows, matrix.columns) != (None, None, None)
        if is_part or filling.convert is not None or path == name:
            return None
        module = self._model.get_submodule(path)
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        return Target(job, path.removeprefix(prefix)) if is_linear else None

    def _expert(self, filling: Filling, job: PackJob) -> int | None:
        """Returns the expert of a stacked parameter that a weight is of; None if it is alone."""
        parameter = self._parameters.get(filling.parameters[0])
        if parameter is None or parameter.dim() != 3:
            return None
        if filling.convert is None or len(filling.tensors) == 1:
            return job.matrix.expert
        found = self._experts.get(filling.parameters[0])
        if found is None:
            found = self._experts[filling.parameters[0]] = experts_of(filling, parameter)
        return found.get(job.source.name)

    @property
    def names(self) -> set[str]:
        """The names of all weights that are packed, and were not before."""
        return {job.name for jobs in self._jobs.values() for job in jobs}

    @property
    def jobs(self) -> list[PackJob]:
        """The jobs of all weights that are calibrated."""
        return [target.job for targets in self.targets.values() for target in targets]

    @cached_property
    def fillings(self) -> dict[int | None, list[Filling]]:
        """The parameters to fill from the checkpoint, by block; None stands for those outside."""
        found: defaultdict[int | None, list[Filling]] = defaultdict(list)
        for filling in self._fillings:
            found[self.blocks.number_of(filling.parameters[0])].append(filling)
        return dict(found)

    def require_filled(self, flow: Flow) -> None:
        """Raises a PlanError if a parameter that is needed is not in the checkpoint."""
        known = {name for filling in self._fillings for name in filling.parameters}
        buffers = {name for name, _ in self._model.named_buffers()}
        needed = set(flow.needed)
        for name, _ in self._model.named_parameters():
            if self.blocks.number_of(name) is not None:
                needed.add(name)
        missing = sorted(needed - known - buffers)
        if missing:
            what = missing[0]
            if len(missing) > 1:
                what = f"{what} and {len(missing) - 1:,} more"
            raise PlanError(
                f"{self._source}: --calibrate: transformers expects {what}, which the checkpoint "
                f"does not have"
            )

    def shapes(self, flow: Flow, windows: Windows, options: QuantizeOptions) -> Shapes:
        """Describes the calibration, for an estimate of what it takes."""
        used = set(flow.needed)
        outside = [
            filling
            for filling in self.fillings.get(None, ())
            if not used.isdisjoint(filling.parameters)
        ]
        parts = [fillings for number, fillings in self.fillings.items() if number is not None]
        return Shapes(
            blocks=len(self.blocks.blocks),
            block_elements=max(_elements(part) for part in (*parts, outside)),
            matrices=[job.matrix.shape for job in self.jobs],
            finished_bytes=sum(job.nbytes for job in self.jobs),
            tokens=windows.ids.size,
            width=getattr(self._model.config.get_text_config(), "hidden_size", _USUAL_WIDTH),
            outputs=options.calibrate_output,
        )

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """The bytes of each block in the checkpoint."""
        found = []
        for number in range(len(self.blocks.blocks)):
            fillings = self.fillings.get(number, ())
            found.append(sum(tensor.nbytes for filling in fillings for tensor in filling.tensors))
        return tuple(found)


def _elements(fillings: Sequence[Filling]) -> int:
    """Returns the number of elements of what parameters are filled from."""
    return sum(tensor.elements for filling in fillings for tensor in filling.tensors)


def _notes(
    calibration: PreparedCalibration, found: _Found, options: QuantizeOptions
) -> Iterator[str]:
    """Yields the lines about a calibration that the user should read."""
    wanted = options.calibration_tokens or TOKENS
    texts = ", ".join(text.name for text in calibration.texts)
    yield (
        f"calibration: {len(calibration.weights):,} weights in {calibration.blocks:,} blocks, "
        f"by {calibration.tokens:,} tokens of {texts}"
    )
    if calibration.tokens < wanted - calibration.window:
        yield f"the text has only {calibration.tokens:,} of {wanted:,} tokens; all are read"
    yield calibration.needs.described()
    left_out = found.names - calibration.weights
    if left_out:
        yield (
            f"{len(left_out):,} other weights have searched scales, such as {min(left_out)}: they "
            f"are not in the blocks, or no matrix of whole blocks"
        )
