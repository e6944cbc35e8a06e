"""Runs parts of one model on one device: what calibration and the backward pass share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from nf4conv.calibrate.hidden import Budget, HiddenStates
from nf4conv.calibrate.kept import KeptFiles
from nf4conv.calibrate.model.flow import Call, Flow
from nf4conv.calibrate.model.names import Filling
from nf4conv.calibrate.model.weights import Contents, WeightReader
from nf4conv.calibrate.needs import Needs
from nf4conv.calibrate.stages import Target
from nf4conv.calibrate.windows import Windows
from nf4conv.codec.quant_state import DTYPES
from nf4conv.format.layout import Format
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
        reader: reads the checkpoint.
        kept: the files that are kept.
        budget: the memory that is left for hidden states. It changes no byte of the result.

    Attributes:
        calibration: what is to be done.
        blocks: the blocks of the model.
        batches: the tokens of all windows, [windows, length] int64 each.
        calibrating_batches: the number of the first batches, which calibrate; the others judge.
    """

    def __init__(
        self,
        plan: QuantizationPlan,
        device: torch.device,
        reader: WeightReader,
        kept: KeptFiles,
        budget: Budget,
    ) -> None:
        assert isinstance(plan.calibration, PreparedCalibration)
        self.plan = plan
        self.calibration = plan.calibration
        self.blocks = plan.calibration.flow.blocks.blocks
        self.device = device
        self.kept = kept
        self.budget = budget
        self._reader = reader
        # token ids, [windows, length] int64; no batch holds windows of both kinds
        step = max(_BATCH_TOKENS[device.type] // self.calibration.window, 1)
        windows = self.calibration.windows
        ids = torch.from_numpy(windows.ids)
        calibrating = torch.split(ids[: windows.calibrating], step)
        self.batches = (*calibrating, *torch.split(ids[windows.calibrating :], step))
        self.calibrating_batches = len(calibrating)

    def embed(self) -> tuple[HiddenStates, list[list[Call]]]:
        """Embeds all windows.

        Returns:
            The hidden states before the first block, and the calls of the blocks by batch.
        """
        flow = self.calibration.flow
        contents = self.outside(flow.needed)
        hidden = HiddenStates(self.device, len(self.batches), self.budget, self.kept.folder)
        calls: list[list[Call]] = []
        for ids in self.batches:
            embedded, of_blocks = flow.calls(ids.to(self.device))
            hidden.append(embedded)
            calls.append(of_blocks)
        contents.release()
        return hidden, calls

    def outside(self, names: tuple[str, ...] | None = None) -> Contents:
        """Fills parameters outside the blocks: those of some names, or all."""
        model = self.calibration.flow.model
        fillings = self.calibration.fillings.get(None, ())
        if names is not None:
            fillings = [one for one in fillings if not set(names).isdisjoint(one.parameters)]
        contents = Contents(model, fillings, self._read, self.device)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(self.device)  # they are small
        return contents

    def fill_block(self, number: int) -> Contents:
        """Fills a block with the weights of the checkpoint."""
        fillings = self.calibration.fillings[number]
        model = self.calibration.flow.model
        contents = Contents(model, fillings, self._read, self.device)
        files = {tensor.file for filling in fillings for tensor in filling.tensors}
        what = "while it was read; start anew with --overwrite"
        require_unchanged(self.plan.source, what, files)
        return contents

    def _read(self, tensor: TensorInfo, parameter: str) -> torch.Tensor:
        """Reads a tensor in the dtype that its parameter has in the model."""
        strict = getattr(self.calibration.flow.model, "_keep_in_fp32_modules_strict", None)
        if any(name in parameter for name in strict or ()):
            return self._reader.read(tensor, torch.float32)
        return self._reader.read(tensor)


def dtype_on(device: torch.device, format: Format) -> torch.dtype:
    """Returns the dtype that a model computes in: on a GPU that of its weights."""
    return DTYPES[format.dtype] if device.type == "cuda" else torch.float32
