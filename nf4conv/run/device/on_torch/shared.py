"""Keeps what all threads share on torch's device."""

import threading
from collections.abc import Callable

import torch

from nf4conv.sources.tensors import TensorInfo


class SharedTensors:
    """Small tensors that many tasks need, such as the factors of an adapter.

    They stay on the device until the end.
    """

    def __init__(self) -> None:
        self._kept: dict[TensorInfo, torch.Tensor] = {}
        # one for each tensor, so that nobody waits for another one
        self._reading: dict[TensorInfo, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, tensor: TensorInfo, read: Callable[[TensorInfo], torch.Tensor]) -> torch.Tensor:
        """Returns a tensor; `read` is asked once for it, by one of the threads."""
        with self._lock:
            reading = self._reading.setdefault(tensor, threading.Lock())
        with reading:
            if tensor not in self._kept:
                self._kept[tensor] = read(tensor)
            return self._kept[tensor]
