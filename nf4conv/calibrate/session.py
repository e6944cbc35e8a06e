"""Runs parts of one model on one device: what calibration and the backward pass share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from nf4conv.calibrate.hidden import HiddenStates
from nf4conv.calibrate.kept import KeptFiles
from nf4conv.calibrate.model.filling import Contents, Filling
from nf4conv.calibrate.model.flow import Call, Flow
from nf4conv.calibrate.stages import Target
from nf4conv.calibrate.text import Windows
from nf4conv.codec.quant_state import DTYPES
from nf4conv.plan.fingerprint import require_unchanged
from nf4conv.plan.writing import Calibration, WritingPlan
from nf4conv.run.device.on_torch.buffers import TorchBuffers
from nf4conv.run.device.on_torch.reading import read_values
from nf4conv.sources.tensors import TensorInfo
from nf4conv.system.machine import available_memory

_BATCH_TOKENS: Final = {"cuda": 8192, "cpu": 4096}
"""Tokens that go through a block together. They decide the order of sums, and so the bytes."""

_SHARE_OF_MEMORY: Final = 4  # hidden states take no more than 1/4 of what is free of the host


@dataclass(frozen=True)
class PreparedCalibration(Calibration):
    """Holds what carries out a calibration, beside what describes it.

    Attributes:
        outputs: "qkv" or "all", as --calibrate-output has it: the errors of these weights are
            weighed by how much the predictions depend on each output. None without that option.
        calibrating: the windows that calibrate.
        judging: the windows that judge.
        flow: runs the model up to its blocks.
        fillings: what the parameters of each block are filled from, by the block's number; None
            stands for those outside.
        targets: the weights of each block that are calibrated.
    """

    outputs: str | None
    calibrating: Windows
    judging: Windows
    flow: Flow
    fillings: Mapping[int | None, Sequence[Filling]]
    targets: Mapping[int, Sequence[Target]]


@dataclass
class Session:
    """Runs parts of one model on one device.

    Attributes:
        plan: a plan with a calibration.
        device: the device that computes.
        buffers: bring bytes of local files to the device.
        kept: the files that are kept.
        progress: is called with the source bytes that have been worked through since the last call.
        calibration: what is to be done.
        blocks: the blocks of the model.
        memory: the bytes of host memory that hidden states may take.
        dtype: the dtype that the model computes in: on a GPU that of its weights.
        batches: the tokens of all windows, [windows, length] int64 each.
        calibrating_batches: the number of the first batches, which calibrate; the others judge.
        told: the source bytes that `progress` was told.
    """

    plan: WritingPlan
    device: torch.device
    buffers: TorchBuffers
    kept: KeptFiles
    progress: Callable[[int], None]

    def __post_init__(self) -> None:
        assert isinstance(self.plan.calibration, PreparedCalibration)
        self.calibration = self.plan.calibration
        self.blocks = self.calibration.flow.blocks.blocks
        self.memory = available_memory() // _SHARE_OF_MEMORY
        self.dtype = torch.float32
        if self.device.type == "cuda":
            self.dtype = DTYPES[self.plan.output.format.dtype]
        self.told = 0
        step = max(_BATCH_TOKENS[self.device.type] // self.calibration.calibrating.shape[1], 1)
        calibrating = torch.split(torch.from_numpy(self.calibration.calibrating), step)
        judging = torch.split(torch.from_numpy(self.calibration.judging), step)
        self.batches = (*calibrating, *judging)
        self.calibrating_batches = len(calibrating)

    def tell(self, nbytes: int) -> None:
        """Tells the bytes of the source that have been worked through since the last call."""
        self.told += nbytes
        self.progress(nbytes)

    def embed(self, memory: int) -> tuple[HiddenStates, list[tuple[Call, ...]]]:
        """Embeds all windows.

        Returns:
            The hidden states before the first block, which take at most `memory` bytes of the host;
            and the calls of each block, one for each batch.
        """
        hidden = HiddenStates(self.device, len(self.batches), memory, self.kept.folder)
        calls = []
        with self.filled(None):
            for ids in self.batches:
                embedded, of_blocks = self.calibration.flow.calls(ids.to(self.device))
                hidden.append(embedded)
                calls.append(of_blocks)
        return hidden, list(zip(*calls, strict=True))

    @contextmanager
    def filled(self, number: int | None) -> Iterator[Contents]:
        """Fills a block, or what is outside of all, with weights of the checkpoint meanwhile."""
        fillings = self.calibration.fillings.get(number, ())
        model = self.calibration.flow.model
        contents = Contents(model, fillings, self._read, self.device)
        files = {tensor.file for filling in fillings for tensor in filling.tensors}
        what = "while it was read; start anew with --overwrite"
        require_unchanged(self.plan.source, what, files)
        if number is None:
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and not buffer.is_meta:
                        module._buffers[name] = buffer.to(self.device)  # they are small
        yield contents
        contents.release()
        if number is not None:
            self.tell(contents.nbytes)

    def _read(self, tensor: TensorInfo, parameter: str) -> torch.Tensor:
        """Reads a tensor, floats in the dtype that its parameter has in the model.

        Nobody else has the memory of what it returns.
        """
        values = read_values(self.buffers, tensor).view(tensor.shape)
        dtype = self.dtype
        strict = getattr(self.calibration.flow.model, "_keep_in_fp32_modules_strict", None)
        if any(name in parameter for name in strict or ()):
            dtype = torch.float32
        return values.to(dtype if values.is_floating_point() else values.dtype, copy=True)
