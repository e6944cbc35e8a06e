"""Runs parts of one model on one device: what calibration and the backward pass share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from nf4conv.calibrate.hidden import Budget, HiddenStates
from nf4conv.calibrate.model.flow import Call, Flow
from nf4conv.calibrate.model.names import Filling
from nf4conv.calibrate.model.weights import Contents, WeightReader
from nf4conv.calibrate.needs import Needs
from nf4conv.calibrate.stages import Target
from nf4conv.calibrate.windows import Windows
from nf4conv.codec.quant_state import DTYPES
from nf4conv.plan.calibration import Calibration
from nf4conv.plan.fingerprint import require_unchanged
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.sources.tensors import TensorInfo

_BATCH_TOKENS: Final = {"cuda": 8192, "cpu": 4096}
"""Tokens that go through a block together. They decide the order of sums, and so the bytes."""


@dataclass(frozen=True)
class PreparedCalibration(Calibration):
    """Holds what carries out a calibration, beside what describes it.

    Attributes:
        needs: the time, memory and disk space that it takes.
        windows: the tokens that the model reads.
        flow: runs the model up to its blocks.
        fillings: what the parameters of each block are filled from, by the block's number; None
            stands for those outside.
        targets: the weights of each block that are calibrated.
    """

    needs: Needs
    windows: Windows
    flow: Flow
    fillings: Mapping[int | None, Sequence[Filling]]
    targets: Mapping[int, Sequence[Target]]


class Session:
    """Runs parts of one model on one device.

    Args:
        plan: a plan with a calibration.
        device: the device that computes.
        folder: the folder for what is kept.

    Attributes:
        calibration: what is to be done.
        dtype: the dtype that the model computes in: on a GPU that of the weights, on a CPU float32.
        budget: the memory that is left for hidden states. It changes no byte of the result.
        batches: the tokens of all windows, [windows, length] int64 each.
        calibrating_batches: the number of the first batches, which calibrate; the others judge.
    """

    def __init__(self, plan: QuantizationPlan, device: torch.device, folder: Path) -> None:
        assert isinstance(plan.calibration, PreparedCalibration)
        self.plan = plan
        self.calibration = plan.calibration
        self.device = device
        self.folder = folder
        self.dtype = torch.float32
        if device.type == "cuda":
            self.dtype = DTYPES[plan.output.format.dtype]
        self.budget = Budget(plan.calibration.needs.memory_left(device))

        # token ids, [windows, length] int64; no batch holds windows of both kinds
        step = max(_BATCH_TOKENS[device.type] // self.calibration.window, 1)
        windows = self.calibration.windows
        ids = torch.from_numpy(windows.ids)
        calibrating = torch.split(ids[: windows.calibrating], step)
        self.batches = (*calibrating, *torch.split(ids[windows.calibrating :], step))
        self.calibrating_batches = len(calibrating)

    def embed(self, reader: WeightReader) -> tuple[HiddenStates, list[list[Call]]]:
        """Embeds all windows.

        Returns:
            The hidden states before the first block, and the calls of the blocks by batch.
        """
        flow = self.calibration.flow
        contents = self.outside(reader, flow.needed)
        hidden = HiddenStates(self.device, len(self.batches), self.budget, self.folder)
        calls: list[list[Call]] = []
        for ids in self.batches:
            embedded, of_blocks = flow.calls(ids.to(self.device))
            hidden.append(embedded)
            calls.append(of_blocks)
        contents.release()
        return hidden, calls

    def outside(self, reader: WeightReader, names: tuple[str, ...] | None = None) -> Contents:
        """Fills parameters outside the blocks: those of some names, or all."""
        model = self.calibration.flow.model
        fillings = self.calibration.fillings.get(None, ())
        if names is not None:
            fillings = [one for one in fillings if not set(names).isdisjoint(one.parameters)]
        contents = Contents(model, fillings, self._read_with(reader), self.device)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(self.device)  # they are small
        return contents

    def fill_block(self, number: int, reader: WeightReader) -> Contents:
        """Fills a block with the weights of the checkpoint."""
        fillings = self.calibration.fillings[number]
        model = self.calibration.flow.model
        contents = Contents(model, fillings, self._read_with(reader), self.device)
        files = {tensor.file for filling in fillings for tensor in filling.tensors}
        what = "while it was read; start anew with --overwrite"
        require_unchanged(self.plan.source, what, files)
        return contents

    def _read_with(self, reader: WeightReader) -> Callable[[TensorInfo, str], torch.Tensor]:
        """Returns what reads a tensor in the dtype that its parameter has in the model."""
        model = self.calibration.flow.model
        strict = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())

        def read(tensor: TensorInfo, parameter: str) -> torch.Tensor:
            if any(name in parameter for name in strict):
                return reader.read(tensor, torch.float32)
            return reader.read(tensor)

        return read
