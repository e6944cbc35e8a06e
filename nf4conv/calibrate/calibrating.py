"""Calibrates a checkpoint block by block, and hands the result to the run that writes it.

    embed all windows ▸ for each block: fill it, round its weights stage by stage, run it once more

Finished blocks stand in the output's work folder. They are not computed again: a run that resumes
fills them with their weights in 4 bits, and runs them. So it ends in the same bytes.
"""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from nf4conv import __version__
from nf4conv.calibrate.activations import Activations
from nf4conv.calibrate.block import calibrate_block, restore_block
from nf4conv.calibrate.finished import BlockRecord, FinishedBlocks
from nf4conv.calibrate.gradients import OutputMoments
from nf4conv.calibrate.model.flow import Call
from nf4conv.calibrate.model.weights import WeightReader, open_reader
from nf4conv.calibrate.moments import BlockAtWork
from nf4conv.calibrate.needs import require_memory
from nf4conv.calibrate.overlay import with_calibrated_weights
from nf4conv.calibrate.planning import PreparedCalibration
from nf4conv.calibrate.session import Session, compile_kernels
from nf4conv.errors import Nf4convError, OutputError
from nf4conv.options import RunOptions
from nf4conv.output.workspace import Workspace
from nf4conv.plan.calibration import CalibratedWeights, CalibrationResult
from nf4conv.plan.fingerprint import fingerprint, require_unchanged
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.run.device.on_torch.backend import TorchBackend
from nf4conv.run.filling import space_needed
from nf4conv.sources.source import source_changes
from nf4conv.sources.unfinished import CALIBRATED, WORK_FOLDER


def calibrate(
    plan: QuantizationPlan, out: Path, run: RunOptions, progress: Callable[[int], None]
) -> QuantizationPlan:
    """Calibrates what a plan says, or goes on with it, and returns the plan that writes it.

    Args:
        plan: what `plan_calibration` returned.
        out: the output folder.
        run: how to use the machine: the device, --overwrite and --checksum count here.
        progress: is called with the source bytes that have been worked through since the last call.

    Raises:
        SourceError: the source has changed, or holds NaN.
        OutputError: the folder cannot be written, or has no room.
        Nf4convError: the device has too little memory.
    """
    device = TorchBackend(run.device).torch_device
    stamps = source_changes(plan.source)
    require_unchanged(plan.source, "since it was planned; run again")
    assert isinstance(plan.calibration, PreparedCalibration)
    require_memory(plan.calibration.needs, device)
    asked = fingerprint(plan, str(device))
    with Workspace(out, asked, stamps, overwrite=run.overwrite, checksum=run.checksum) as folder:
        session = Session(plan, device, out / WORK_FOLDER / CALIBRATED)
        work = _Work(session, progress)
        missing = plan.calibration.needs.disk_bytes - work.bytes_there()
        folder.check_space(space_needed(plan, folder.finished) + missing)
        with _naming_memory(device), torch.no_grad():
            compile_kernels(device, plan.output.format)
            work.calibrate_all()
        made = with_calibrated_weights(plan, work.finished)
        return replace(made, calibrated=work.result())


class _Work:
    """Calibrates the blocks of one plan on one device."""

    def __init__(self, session: Session, progress: Callable[[int], None]) -> None:
        self._session = session
        self._calibration = session.calibration
        self._progress = progress
        self._told = 0
        self.finished = FinishedBlocks(session.folder, session.plan.output.format)
        self.outputs = OutputMoments(session)
        self._made_by = _made_by(session.device, self._calibration.transformers)
        self._records: dict[int, BlockRecord] = {}

    def bytes_there(self) -> int:
        """Returns the bytes of finished blocks."""
        total = 0
        for number in self._calibration.targets:
            file = self.finished.file(number)
            total += file.stat().st_size if file.is_file() else 0
        return total

    def result(self) -> CalibrationResult:
        """Returns what came of all blocks."""
        blocks = []
        for number in sorted(self._records):
            record = self._records[number]
            gains = {name: gain.gain for name, gain in record.gains.items()}
            few = {}
            for name, gain in record.gains.items():
                if gain.tokens is not None:
                    few[name] = gain.tokens
            blocks.append(CalibratedWeights(record.components_sha256, gains, few))
        return CalibrationResult(self._made_by, tuple(blocks))

    def calibrate_all(self) -> None:
        """Calibrates the blocks that are not finished."""
        self._read_records()
        left = [number for number in self._calibration.targets if number not in self._records]
        if left:
            self._calibrate(max(left) + 1)
        # what had been done before counts as well
        self._progress(self._calibration.bytes_to_read - self._told)

    def _calibrate(self, stop: int) -> None:
        """Calibrates the blocks before `stop` that are not finished."""
        with open_reader(self._session.device, self._session.dtype) as reader:
            if self._calibration.outputs is not None:
                self.outputs.find(reader, self._tell)
            activations, calls = self._session.embed(reader)
            for number in range(stop):
                self._work_on(number, reader, activations, calls)
        activations.remove()

    def _tell(self, count: int) -> None:
        """Tells the bytes of the source that have been worked through since the last call."""
        self._told += count
        self._progress(count)

    def _read_records(self) -> None:
        """Reads the records of finished blocks, up to the first that is missing.

        Raises:
            OutputError: another device or other versions have made them.
        """
        for number in sorted(self._calibration.targets):
            record = self.finished.record(number)
            if record is None:
                return
            for what, now in self._made_by.items():
                before = record.made_by.get(what)
                if before != now:
                    raise OutputError(
                        f"{self.finished.folder.parent.parent}: calibration has begun with "
                        f"{what} {before}, and this is {now}; go on there, or --overwrite to "
                        f"start anew"
                    )
            self._records[number] = record

    def _work_on(
        self,
        number: int,
        reader: WeightReader,
        activations: Activations,
        calls: list[list[Call]],
    ) -> None:
        """Calibrates a block, or fills it with what it was calibrated to, and runs it."""
        blocks = self._calibration.flow.blocks
        contents = self._session.fill_block(number, reader)
        block = BlockAtWork(
            path=f"{blocks.path}.{number}",
            module=blocks.blocks[number],
            contents=contents,
            targets=self._calibration.targets.get(number, ()),
            calls=[of_batch[number] for of_batch in calls],
            activations=activations,
            calibrating=self._session.calibrating_batches,
            format=self._session.plan.output.format,
        )
        if number in self._records:
            restore_block(block, number, self.finished)
        elif block.targets:
            made = calibrate_block(block, self.outputs.of_block(number))
            self.finished.write(number, made.weights, made.gains, self._made_by)
            record = self.finished.record(number)
            assert record is not None
            self._records[number] = record
        block.run()
        contents.release()
        self._tell(self._calibration.block_bytes[number])


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
            f"{device}: out of memory while calibrating; finished blocks are kept. Try fewer "
            f"--calibration-tokens, a smaller --calibration-memory, or --device cpu"
        ) from error
