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
from typing import Final

import torch

from nf4conv import __version__
from nf4conv.calibrate.activations import Activations
from nf4conv.calibrate.block import calibrate_block, restore_block
from nf4conv.calibrate.finished import BlockRecord, FinishedBlocks
from nf4conv.calibrate.model.flow import Call, shared_with
from nf4conv.calibrate.model.weights import Contents, WeightReader, open_reader
from nf4conv.calibrate.moments import BlockAtWork
from nf4conv.calibrate.overlay import with_calibrated_weights
from nf4conv.calibrate.planning import MEMORY, PreparedCalibration, hidden_bytes
from nf4conv.codec.quant_state import DTYPES
from nf4conv.errors import Nf4convError, OutputError
from nf4conv.options import RunOptions
from nf4conv.output.workspace import Workspace
from nf4conv.plan.calibration import CalibratedWeights, CalibrationResult
from nf4conv.plan.fingerprint import fingerprint, require_unchanged
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.run.checkpoint import space_needed
from nf4conv.run.device.on_torch.backend import TorchBackend
from nf4conv.sources.source import source_changes
from nf4conv.sources.tensors import TensorInfo
from nf4conv.sources.unfinished import CALIBRATED, WORK_FOLDER

_BATCH_TOKENS: Final = {"cuda": 8192, "cpu": 4096}
"""Tokens that go through a block together. They decide the order of sums, and so the bytes."""


def calibrate(
    plan: QuantizationPlan, out: Path, run: RunOptions, progress: Callable[[int], None]
) -> QuantizationPlan:
    """Calibrates what a plan says, or goes on with it, and returns the plan that writes it.

    Args:
        plan: of `plan_calibration`.
        out: the output folder.
        run: the device.
        progress: told the bytes of the source that have been worked through since the last call.

    Raises:
        SourceError: the source has changed, or holds NaN.
        OutputError: the folder cannot be written, or has no room.
        Nf4convError: the device has too little memory.
    """
    device = TorchBackend(run.device).torch_device
    stamps = source_changes(plan.source)
    require_unchanged(plan.source, "since it was planned; run again")
    asked = fingerprint(plan, str(device))
    with Workspace(out, asked, stamps, overwrite=run.overwrite, checksum=run.checksum) as folder:
        work = _Work(plan, out, device, progress)
        missing = plan.calibration.bytes_on_disk if plan.calibration else 0
        folder.check_space(space_needed(plan, folder.finished) + missing - work.bytes_there())
        with _naming_memory(device), torch.no_grad():
            work.calibrate_all()
        made = with_calibrated_weights(plan, work.finished)
        return replace(made, calibrated=work.result())


class _Work:
    """Calibrates the blocks of one plan on one device."""

    def __init__(
        self,
        plan: QuantizationPlan,
        out: Path,
        device: torch.device,
        progress: Callable[[int], None],
    ) -> None:
        assert isinstance(plan.calibration, PreparedCalibration)
        self._plan = plan
        self._calibration = plan.calibration
        self._device = device
        self._progress = progress
        self._dtype = DTYPES[plan.output.format.dtype] if device.type == "cuda" else torch.float32
        folder = out / WORK_FOLDER / CALIBRATED
        self._hidden_file = folder / "hidden.bin"
        self.finished = FinishedBlocks(folder, plan.output.format)
        self._made_by = _made_by(device, self._calibration.transformers)
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
        numbers = range(self._calibration.blocks)
        left = [number for number in self._calibration.targets if number not in self._records]
        if not left:
            self._progress(self._calibration.bytes_to_read)
            return
        with open_reader(self._device, self._dtype) as reader:
            activations, calls = self._embed(reader)
            for number in numbers:
                if number > max(left):
                    break
                self._work_on(number, reader, activations, calls)
        activations.remove()

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

    def _embed(self, reader: WeightReader) -> tuple[Activations, list[list[Call]]]:
        """Embeds all windows.

        Returns:
            The hidden states before the first block, and the calls of the blocks by batch.
        """
        flow = self._calibration.flow
        outside = self._calibration.fillings.get(None, ())
        needed = [
            filling for filling in outside if not set(flow.needed).isdisjoint(filling.parameters)
        ]
        contents = Contents(flow.model, needed, self._read_with(reader), self._device)
        _move_buffers(flow.model, self._device)
        windows = self._calibration.windows
        itemsize = torch.empty(0, dtype=self._dtype).itemsize
        nbytes = hidden_bytes(windows, self._plan.source.config or {}, itemsize)
        budget = self._plan.options.calibration_memory
        activations = Activations(
            self._device, nbytes, MEMORY if budget is None else budget, self._hidden_file
        )
        calls: list[list[Call]] = []
        for ids in self._batches():
            found = flow.calls(ids.to(self._device))
            activations.append(found.hidden)
            calls.append(shared_with(calls, found))
        contents.release()
        return activations, calls

    def _batches(self) -> Iterator[torch.Tensor]:
        """Yields token ids, [windows, length] int64; no batch holds windows of both kinds."""
        windows = self._calibration.windows
        ids = torch.from_numpy(windows.ids)
        yield from torch.split(ids[: windows.calibrating], self._windows_of_batch())
        yield from torch.split(ids[windows.calibrating :], self._windows_of_batch())

    def _windows_of_batch(self) -> int:
        length = self._calibration.window
        return max(_BATCH_TOKENS[self._device.type] // length, 1)

    def _work_on(
        self,
        number: int,
        reader: WeightReader,
        activations: Activations,
        calls: list[list[Call]],
    ) -> None:
        """Calibrates a block, or fills it with what it was calibrated to, and runs it."""
        calibration = self._calibration
        fillings = calibration.fillings[number]
        model = calibration.flow.model
        contents = Contents(model, fillings, self._read_with(reader), self._device)
        files = {tensor.file for filling in fillings for tensor in filling.tensors}
        require_unchanged(
            self._plan.source, "while it was read; start anew with --overwrite", files
        )
        nbytes = sum(tensor.nbytes for filling in fillings for tensor in filling.tensors)
        block = BlockAtWork(
            path=f"{calibration.flow.blocks.path}.{number}",
            module=calibration.flow.blocks.blocks[number],
            contents=contents,
            targets=calibration.targets.get(number, ()),
            calls=[of_batch[number] for of_batch in calls],
            activations=activations,
            calibrating=self._calibrating_batches(),
            format=self._plan.output.format,
        )
        if number in self._records:
            restore_block(block, number, self.finished)
        elif block.targets:
            made = calibrate_block(block)
            self.finished.write(number, made.weights, made.gains, self._made_by)
            record = self.finished.record(number)
            assert record is not None
            self._records[number] = record
        block.run()
        contents.release()
        self._progress(nbytes)

    def _calibrating_batches(self) -> int:
        return -(-self._calibration.windows.calibrating // self._windows_of_batch())

    def _read_with(self, reader: WeightReader) -> Callable[[TensorInfo, str], torch.Tensor]:
        """Returns what reads a tensor in the dtype that its parameter has in the model."""
        model = self._calibration.flow.model
        strict = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())

        def read(tensor: TensorInfo, parameter: str) -> torch.Tensor:
            is_strict = any(name in parameter for name in strict)
            return reader.read(tensor, torch.float32 if is_strict else None)

        return read


def _move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Moves the buffers of a model to a device; they are small."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


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
