"""Keeps the hidden states of all windows: on the device, in host memory, or in a file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from nf4conv.errors import OutputError, named

_SHARE_OF_GPU: Final = 8  # hidden states stay on a GPU if they take no more than 1/8 of its memory


class Activations:
    """Keeps hidden states, batch by batch, in the dtype that the model computes in.

    Args:
        device: the device that computes.
        nbytes: the bytes of the hidden states of all windows.
        budget: the most bytes to keep in memory.
        file: the file that holds all of them if they take more than that.
        place: the device whose memory holds them; None for `device` if it has room, else the host.
    """

    def __init__(
        self,
        device: torch.device,
        nbytes: int,
        budget: int,
        file: Path,
        place: torch.device | None = None,
    ) -> None:
        self._device = device
        self._batches: list[torch.Tensor] = []
        if place is None:
            place = device if _fits_on(device, nbytes) else torch.device("cpu")
        self._place = place
        self._file = file if nbytes > budget else None
        self._elements = 0
        if self._file is not None:
            self._place = torch.device("cpu")
            with named(file, OutputError):
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("wb") as opened:
                    opened.truncate(nbytes)

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, hidden: torch.Tensor) -> None:
        """Keeps the hidden states of the next batch."""
        if self._file is None:
            self._batches.append(hidden.to(self._place, copy=True))
            return
        stop = self._elements + hidden.numel()
        mapped = torch.from_file(str(self._file), shared=True, size=stop, dtype=hidden.dtype)
        batch = mapped[self._elements : stop].view(hidden.shape)
        batch.copy_(hidden)
        self._batches.append(batch)
        self._elements = stop

    def batches(self) -> Iterator[torch.Tensor]:
        """Yields the hidden states of one batch after the other, on the device."""
        for batch in self._batches:
            yield batch.to(self._device)

    def replace(self, number: int, hidden: torch.Tensor) -> None:
        """Puts the hidden states behind a block in the place of those before it."""
        self._batches[number].copy_(hidden)

    def remove(self) -> None:
        """Lets everything go."""
        self._batches.clear()
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def give_back(device: torch.device) -> None:
    """Gives memory of a GPU back that torch keeps for tensors of other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _fits_on(device: torch.device, nbytes: int) -> bool:
    if device.type != "cuda":
        return True
    _, total = torch.cuda.mem_get_info(device)
    return nbytes <= total // _SHARE_OF_GPU
