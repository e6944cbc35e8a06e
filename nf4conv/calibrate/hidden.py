"""Keeps the hidden states of all windows: on the device, in host memory, or in a file."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import torch

from nf4conv.errors import OutputError, named

_SHARE_OF_GPU: Final = 8  # hidden states stay on a GPU if they take no more than 1/8 of its memory


@dataclass
class Budget:
    """Counts the bytes of host memory that hidden states may still take."""

    left: int


@dataclass(frozen=True)
class _Filed:
    """Says where the hidden states of a batch are in the file."""

    position: int
    shape: torch.Size
    dtype: torch.dtype


class HiddenStates:
    """Keeps hidden states, batch by batch, in the dtype that the model computes in.

    Args:
        device: the device that computes.
        batches: the number of batches; if all fit well on a GPU, they stay there. 0 keeps them in
            host memory anyhow.
        budget: the host memory that is left for them. What it has no room for goes to a file.
        folder: the folder of that file, which has no name: no other program finds it.
    """

    def __init__(self, device: torch.device, batches: int, budget: Budget, folder: Path) -> None:
        self._device = device
        self._expected = batches
        self._budget = budget
        self._folder = folder
        self._batches: list[torch.Tensor | _Filed] = []
        self._file: IO[bytes] | None = None
        self._end = 0  # of the file

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, hidden: torch.Tensor) -> None:
        """Keeps the hidden states of the next batch."""
        if self._fit_on_device(hidden):
            self._batches.append(hidden.clone())
        elif hidden.nbytes <= self._budget.left:
            self._budget.left -= hidden.nbytes
            self._batches.append(hidden.to("cpu", copy=True))
        else:
            filed = _Filed(self._end, hidden.shape, hidden.dtype)
            self._write(filed, hidden)
            self._batches.append(filed)
            self._end += hidden.nbytes

    def batches(self) -> Iterator[torch.Tensor]:
        """Yields the hidden states of one batch after the other, on the device."""
        for batch in self._batches:
            found = self._read(batch) if isinstance(batch, _Filed) else batch
            yield found.to(self._device)

    def replace(self, number: int, hidden: torch.Tensor) -> None:
        """Puts the hidden states behind a block in the place of those before it."""
        batch = self._batches[number]
        if isinstance(batch, _Filed):
            self._write(batch, hidden)
        else:
            batch.copy_(hidden)

    def remove(self) -> None:
        """Lets everything go."""
        for batch in self._batches:
            if isinstance(batch, torch.Tensor) and batch.device.type == "cpu":
                self._budget.left += batch.nbytes
        self._batches.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _fit_on_device(self, hidden: torch.Tensor) -> bool:
        if self._device.type != "cuda" or not self._expected:
            return False
        _, total = torch.cuda.mem_get_info(self._device)
        return self._expected * hidden.nbytes <= total // _SHARE_OF_GPU

    def _write(self, filed: _Filed, hidden: torch.Tensor) -> None:
        """Writes a batch; a disk that is full is an OutputError."""
        with named(self._folder, OutputError):
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
            left = bytes_of(hidden.to(filed.dtype))
            self._file.seek(filed.position)
            while left:
                left = left[self._file.write(left) :]

    def _read(self, filed: _Filed) -> torch.Tensor:
        assert self._file is not None
        found = torch.empty(filed.shape, dtype=filed.dtype)
        left = bytes_of(found)
        with named(self._folder, OutputError):
            self._file.seek(filed.position)
            while left:
                count = self._file.readinto(left)  # type: ignore[attr-defined]
                if not count:
                    raise OSError("hidden states that were written are missing")
                left = left[count:]
        return found


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor; those of one in host memory are not copied."""
    array = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array.data)


def give_back(device: torch.device) -> None:
    """Gives memory of a GPU back that torch keeps for tensors of other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
