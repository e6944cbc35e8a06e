"""Keeps the hidden states of all windows: on the device, in host memory, or in a file."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, NamedTuple

import torch

from nf4conv.errors import OutputError, named

_SHARE_OF_GPU: Final = 8  # hidden states stay on a GPU if they take no more than 1/8 of its memory


class _Filed(NamedTuple):
    """Says where the hidden states of a batch are in the file."""

    position: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass
class HiddenStates:
    """Keeps hidden states, batch by batch, in the dtype that the model computes in.

    Where they are changes no byte of the result.

    Attributes:
        device: the device that computes.
        expected: the number of batches; if all fit well on a GPU, they stay there. 0 keeps them in
            host memory anyhow.
        room: the bytes of host memory that they may take. What has no room goes to a file.
        folder: the folder of that file, which has no name: no other program finds it.
    """

    device: torch.device
    expected: int
    room: int
    folder: Path

    def __post_init__(self) -> None:
        self._batches: list[torch.Tensor | _Filed] = []
        self._file: IO[bytes] | None = None
        self._end = 0  # of the file

    def append(self, hidden: torch.Tensor) -> None:
        """Keeps the hidden states of the next batch."""
        if self._fit_on_device(hidden):
            self._batches.append(hidden.clone())
        elif hidden.nbytes <= self.room:
            self.room -= hidden.nbytes
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
            yield found.to(self.device)

    def replace(self, number: int, hidden: torch.Tensor) -> None:
        """Puts the hidden states behind a block in the place of those before it."""
        batch = self._batches[number]
        if isinstance(batch, _Filed):
            self._write(batch, hidden)
        else:
            batch.copy_(hidden)

    def remove(self) -> None:
        """Lets everything go."""
        self._batches.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _fit_on_device(self, hidden: torch.Tensor) -> bool:
        if self.device.type != "cuda" or not self.expected:
            return False
        _, total = torch.cuda.mem_get_info(self.device)
        return self.expected * hidden.nbytes <= total // _SHARE_OF_GPU

    def _write(self, filed: _Filed, hidden: torch.Tensor) -> None:
        """Writes a batch; a full disk is an OutputError, not a signal as of mapped files."""
        with named(self.folder, OutputError):
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
            self._file.seek(filed.position)
            self._file.write(bytes_of(hidden.to(filed.dtype)))
            self._file.flush()

    def _read(self, filed: _Filed) -> torch.Tensor:
        assert self._file is not None
        found = torch.empty(filed.shape, dtype=filed.dtype)
        with named(self.folder, OutputError):
            self._file.seek(filed.position)
            if self._file.readinto(bytes_of(found)) < found.nbytes:  # type: ignore[attr-defined]
                raise OSError("hidden states that were written are missing")
        return found


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor; those of one in host memory are not copied."""
    array = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array.data)


def give_back(device: torch.device) -> None:
    """Gives memory of a GPU back that torch keeps for tensors of other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
