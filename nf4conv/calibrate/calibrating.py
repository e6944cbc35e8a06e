"""Calibrates a checkpoint block by block, and hands the result to the run that writes it.

    embed all windows ▸ for each block: fill it, round its weights stage by stage, run it once more

Finished blocks stand in the output's work folder. They are not computed again: a run that resumes
fills them with their weights in 4 bits, and runs them. So it ends in the same bytes.
"""

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from nf4conv.calibrate.block import WeightGain, calibrate_block, restore_block
from nf4conv.calibrate.gradients import find_output_moments, output_moments
from nf4conv.calibrate.hidden import Budget, HiddenStates
from nf4conv.calibrate.kept import (
    KeptFiles,
    Tensors,
    components_of,
    digest_of_components,
)
from nf4conv.calibrate.model.flow import Call
from nf4conv.calibrate.model.weights import open_reader
from nf4conv.calibrate.moments import BlockAtWork
from nf4conv.calibrate.overlay import with_calibrated_weights
from nf4conv.calibrate.session import PreparedCalibration, Session, dtype_on
from nf4conv.errors import Nf4convError
from nf4conv.options import RunOptions
from nf4conv.output.workspace import Workspace
from nf4conv.plan.fingerprint import fingerprint, require_unchanged
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.run.device.on_torch.backend import TorchBackend
from nf4conv.sources.record import CalibratedBlock, CalibrationResult, is_gain
from nf4conv.sources.source import source_changes
from nf4conv.sources.tensors import TensorInfo
from nf4conv.sources.unfinished import CALIBRATED, WORK_FOLDER
from nf4conv.version import __version__


def calibrate(
    plan: QuantizationPlan, out: Path, run: RunOptions, progress: Callable[[int], None]
) -> QuantizationPlan:
    """Calibrates what a plan says, or goes on with it, and returns the plan that writes it.

    `progress` is called with the source bytes that have been worked through since the last call.
    """
    device = TorchBackend(run.device).torch_device
    stamps = source_changes(plan.source)
    require_unchanged(plan.source, "since it was planned; run again")
    assert isinstance(plan.calibration, PreparedCalibration)
    budget = Budget(plan.calibration.needs.memory_left(device))
    made_by = _made_by(device, plan.calibration.transformers)
    kept = KeptFiles(out / WORK_FOLDER / CALIBRATED, made_by)
    asked = fingerprint(plan, str(device))
    dtype = dtype_on(device, plan.output.format)
    with (
        Workspace(out, asked, stamps, overwrite=run.overwrite) as folder,
        open_reader(device, dtype) as reader,
    ):
        work = _Work(Session(plan, device, reader, kept, budget), progress)
        folder.check_space(plan.space_needed(folder.finished) + work.space_needed(dtype))
        with _naming_memory(device), torch.no_grad():
            work.calibrate_all()
        result = CalibrationResult(made_by, work.blocks())
        return replace(with_calibrated_weights(plan, work.components()), calibrated=result)


class _Work:
    """Calibrates the blocks of one plan on one device."""

    def __init__(self, session: Session, progress: Callable[[int], None]) -> None:
        self._session = session
        self._calibration = session.calibration
        self._kept = session.kept
        self._progress = progress
        self._told = 0
        self._finished: dict[int, CalibratedBlock] = {}

    def space_needed(self, dtype: torch.dtype) -> int:
        """Returns the bytes that will be written to disk beside the result."""
        needs = self._calibration.needs
        hidden = needs.hidden_elements * dtype.itemsize
        there = 0
        for number in self._calibration.targets:
            file = self._kept.file(_name(number))
            there += file.stat().st_size if file.is_file() else 0
        return needs.disk_bytes - there + max(hidden - self._session.budget.left, 0)

    def blocks(self) -> tuple[CalibratedBlock, ...]:
        """Returns what came of all blocks."""
        return tuple(self._finished[number] for number in sorted(self._finished))

    def components(self) -> dict[str, TensorInfo]:
        """Returns where the components of all weights are, by their names."""
        found: dict[str, TensorInfo] = {}
        for number in self._finished:
            found |= self._kept.tensors(_name(number))
        return found

    def calibrate_all(self) -> None:
        """Calibrates the blocks that are not finished."""
        for number in self._calibration.targets:
            kept = self._kept.read(_name(number), _parsed)
            if kept is not None:
                self._finished[number] = _described(*kept)
        left = [number for number in self._calibration.targets if number not in self._finished]
        if left:
            self._calibrate(left)
        # what had been done before counts as well
        self._progress(self._calibration.bytes_to_read - self._told)

    def _calibrate(self, left: list[int]) -> None:
        """Calibrates some blocks; those before the last of them are run."""
        if self._calibration.outputs is not None:
            find_output_moments(self._session, left, self._tell)
        hidden, calls = self._session.embed()
        for number in range(max(left) + 1):
            self._work_on(number, hidden, calls)
        hidden.remove()

    def _tell(self, count: int) -> None:
        """Tells the bytes of the source that have been worked through since the last call."""
        self._told += count
        self._progress(count)

    def _work_on(self, number: int, hidden: HiddenStates, calls: list[list[Call]]) -> None:
        """Calibrates a block, or fills it with what it was calibrated to, and runs it."""
        contents = self._session.fill_block(number)
        block = BlockAtWork(
            path=f"{self._calibration.flow.blocks.path}.{number}",
            module=self._session.blocks[number],
            contents=contents,
            targets=self._calibration.targets.get(number, ()),
            calls=[of_batch[number] for of_batch in calls],
            hidden=hidden,
            calibrating=self._session.calibrating_batches,
            format=self._session.plan.output.format,
        )
        kept = self._kept.read(_name(number)) if block.targets else None
        if kept is not None:
            restore_block(block, kept[0])
        elif block.targets:
            weights, gains = calibrate_block(block, output_moments(self._session, number))
            tensors = components_of(weights, block.format)
            facts = {name: asdict(gain) for name, gain in gains.items()}
            self._kept.write(_name(number), tensors, facts)
            self._finished[number] = _described(tensors, gains)
        block.run()
        contents.release()
        self._tell(self._calibration.block_bytes[number])


def _name(number: int) -> str:
    """Returns the name that a finished block is kept under."""
    return f"block-{number:05d}"


def _parsed(facts: Mapping[str, Any]) -> dict[str, WeightGain]:
    """Reads the gains of a finished block; raises ValueError or TypeError if they are none."""
    gains = {name: WeightGain(**gain) for name, gain in facts.items()}
    for one in gains.values():
        if not is_gain(one.gain) or not (one.tokens is None or type(one.tokens) is int):
            raise ValueError(f"{one} is no gain")
    return gains


def _described(tensors: Tensors, gains: Mapping[str, WeightGain]) -> CalibratedBlock:
    """Returns what nf4conv.json says of a finished block."""
    few = {name: gain.tokens for name, gain in gains.items() if gain.tokens is not None}
    return CalibratedBlock(
        digest_of_components(tensors), {name: gain.gain for name, gain in gains.items()}, few
    )


def _made_by(device: torch.device, transformers: str) -> dict[str, str]:
    """Returns what decides the bytes beside the plan: device and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    made_by = {
        "device": f"{device.type} ({name})",
        "nf4conv": __version__,
        "torch": version("torch"),
        "transformers": transformers,
    }
    if device.type == "cuda":
        try:
            made_by["triton"] = version("triton")
        except PackageNotFoundError:
            made_by["triton"] = "none"
    return made_by


@contextmanager
def _naming_memory(device: torch.device) -> Iterator[None]:
    """Turns a failure for lack of memory into one line."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise Nf4convError(
            f"{device}: out of memory while calibrating; finished blocks are kept, and the same "
            f"command goes on with them when more is free. Fewer --calibration-tokens take less, "
            f"and so does another --device; both start anew, with --overwrite"
        ) from error
