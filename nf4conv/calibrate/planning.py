"""Plans a calibration: builds the model without weights, finds its blocks, takes the texts.

No weight is read. Whatever is wrong with texts, model or options is known before a byte is written.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from nf4conv.calibrate.calibrating import calibrate
from nf4conv.calibrate.model.building import BlockList, build_model, find_blocks, load_tokenizer
from nf4conv.calibrate.model.experts import experts_of
from nf4conv.calibrate.model.filling import Filling, follow_names
from nf4conv.calibrate.model.flow import Flow, find_flow
from nf4conv.calibrate.session import PreparedCalibration
from nf4conv.calibrate.stages import Target
from nf4conv.calibrate.text import LENGTH, TOKENS, Text, Windows, cut_windows
from nf4conv.errors import PlanError
from nf4conv.models.module_names import module_of
from nf4conv.options import QuantizeOptions
from nf4conv.plan.jobs import Job, PackJob
from nf4conv.plan.writing import WritingPlan
from nf4conv.sources.source import Source

_Jobs = Mapping[str, Sequence[PackJob]]
"""The jobs that pack a weight anew, by the tensor that they read."""

_Fillings = Mapping[int | None, Sequence[Filling]]
"""The parameters to fill from the checkpoint, by block; None stands for those outside."""


def plan_calibration(
    plan: WritingPlan, texts: Sequence[Text], options: QuantizeOptions
) -> WritingPlan:
    """Adds a calibration to the plan of a checkpoint, whose scales are searched.

    request.py has let its source and its options pass.
    """
    source = plan.source
    assert source.config is not None  # or else it would have been refused
    model: Any = build_model(source.config, torch.float32)
    jobs: defaultdict[str, list[PackJob]] = defaultdict(list)
    for job in plan.output.jobs:
        if isinstance(job, PackJob) and job.stored is None:
            jobs[job.source.name].append(job)
    every = follow_names(model, source.tensors)
    packed = [one for one in every if any(tensor.name in jobs for tensor in one.tensors)]
    blocks = find_blocks(model, [name for one in packed for name in one.parameters])
    fillings: defaultdict[int | None, list[Filling]] = defaultdict(list)
    for one in every:
        fillings[blocks.number_of(one.parameters[0])].append(one)
    targets = _find_targets(model, fillings, blocks, jobs, plan.output.format.blocksize)
    chosen = [target.job for found in targets.values() for target in found]
    if not chosen:
        raise PlanError(f"{source}: --calibrate finds no weight to calibrate in its blocks")
    flow = find_flow(model, blocks)
    _require_filled(source, flow, every)
    if options.calibrate_output and model.get_output_embeddings() is None:
        raise PlanError(
            f"--calibrate-output: {type(model).__name__} predicts no tokens to derive by; leave it "
            f"out"
        )
    calibrating, judging = _windows(source, options, model, texts)
    in_blocks = [one for number, each in fillings.items() if number is not None for one in each]
    bytes_in_blocks = sum(tensor.nbytes for one in in_blocks for tensor in one.tensors)
    outputs = options.calibrate_output
    weights = frozenset(job.name for job in chosen)
    described = {
        "knows": _known(outputs),
        "texts": [{"name": text.path.name, "sha256": text.sha256} for text in texts],
        "tokens": calibrating.size,
        "judging_tokens": judging.size,
        "window": calibrating.shape[1],
        "weights": len(weights),
    }
    calibration = PreparedCalibration(
        described=described,
        transformers=version("transformers"),
        bytes_to_read=bytes_in_blocks * (1 if outputs is None else 3),  # gradients: two more passes
        bytes_spared=sum(job.source_bytes - job.nbytes for job in chosen),
        carry_out=calibrate,
        outputs=outputs,
        calibrating=calibrating,
        judging=judging,
        flow=flow,
        fillings=fillings,
        targets=targets,
    )

    def marked(job: Job) -> Job:
        if isinstance(job, PackJob) and job.name in weights:
            calibrated = replace(job.format, scales="calibrated")
            reason = f"{job.reason}, calibrated"
            return replace(job, original=job, format=calibrated, reason=reason)
        return job

    output = plan.output.with_jobs(marked)
    names = ", ".join(text.path.name for text in texts)
    wanted = options.calibration_tokens or TOKENS
    few = "" if calibrating.size >= wanted - calibrating.shape[1] else f", of {wanted:,} wanted"
    notes = [
        f"calibration: {len(weights):,} weights in {len(blocks.blocks):,} blocks, by "
        f"{calibrating.size:,} tokens of {names}{few}"
    ]
    left_out = {job.name for each in jobs.values() for job in each} - weights
    if left_out:
        notes.append(
            f"{len(left_out):,} other weights have searched scales, such as {min(left_out)}: they "
            f"are not in the blocks, or no matrix of whole blocks"
        )
    return replace(plan, output=output, calibration=calibration, notes=(*plan.notes, *notes))


def _find_targets(
    model: nn.Module, fillings: _Fillings, blocks: BlockList, jobs: _Jobs, blocksize: int
) -> dict[int, list[Target]]:
    """Returns the packed weights that can be calibrated, by block."""
    parameters = dict(model.named_parameters())
    targets: defaultdict[int, list[Target]] = defaultdict(list)
    for number, of_block in fillings.items():
        if number is None:
            continue
        prefix = f"{blocks.path}.{number}."
        for filling in of_block:
            mine = [job for tensor in filling.tensors for job in jobs.get(tensor.name, ())]
            parameter = parameters.get(filling.parameters[0])
            if not mine or parameter is None:
                continue
            for job, path, expert in _places(model, filling, parameter, mine):
                shape = job.matrix.shape
                if len(shape) == 2 and shape[1] % blocksize == 0:
                    targets[number].append(Target(job, path.removeprefix(prefix), expert))
    return dict(targets)


def _places(
    model: nn.Module, filling: Filling, parameter: nn.Parameter, jobs: Sequence[PackJob]
) -> Iterator[tuple[PackJob, str, int | None]]:
    """Yields jobs with the module that multiplies with the weight, or its parameter and expert."""
    name = filling.parameters[0]
    if parameter.dim() == 3:
        is_stored_as_stack = filling.convert is None or len(filling.tensors) == 1
        experts = {} if is_stored_as_stack else experts_of(filling, parameter)
        for job in jobs:
            expert = job.matrix.expert if is_stored_as_stack else experts.get(job.source.name)
            if expert is not None:
                yield job, name, expert
        return
    path = module_of(name)
    if filling.convert is not None or path == name:
        return
    module = model.get_submodule(path)
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        for job in jobs:
            matrix = job.matrix
            if (matrix.expert, matrix.rows, matrix.columns) == (None, None, None):
                yield job, path, None


def _require_filled(source: Source, flow: Flow, fillings: Sequence[Filling]) -> None:
    """Raises a PlanError if a parameter of a block, or the embedding, is not in the checkpoint."""
    embedding = flow.model.get_input_embeddings().weight  # type: ignore[operator]
    filled = {name for filling in fillings for name in filling.parameters}
    for name, parameter in flow.model.named_parameters():
        is_needed = parameter is embedding or flow.blocks.number_of(name) is not None
        if is_needed and name not in filled:
            raise PlanError(
                f"{source}: --calibrate: transformers expects {name}, which is not in it"
            )


def _windows(
    source: Source, options: QuantizeOptions, model: Any, texts: Sequence[Text]
) -> tuple[Windows, Windows]:
    """Cuts the texts into windows that the model can read: to calibrate by, and to judge by."""

    def load() -> Any:
        with source.whole_folder() as folder:
            return load_tokenizer(folder)

    tokens = options.calibration_tokens or TOKENS
    windows = cut_windows(texts, tokens, _length(model), load)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for part in windows:
        if part.min() < 0 or part.max() >= vocabulary:
            names = ", ".join(text.path.name for text in texts)
            raise PlanError(
                f"{names}: holds token ids that are none of the {vocabulary:,} of {source}"
            )
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


def _known(outputs: str | None) -> str:
    """Says what the rounding knows of the model."""
    if outputs is None:
        return "activations"
    which = "all weights" if outputs == "all" else "the first weights of each block"
    return f"activations, and how predictions depend on the outputs of {which}"
