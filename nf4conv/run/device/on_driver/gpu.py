"""One GPU: its kernels and its memory, which all threads share."""

import threading
from collections.abc import Mapping

from nf4conv.run.device.on_driver import driver
from nf4conv.run.device.on_driver.kernels import Kernels, Purpose


class Gpu:
    """One GPU with kernels.

    Args:
        device: the GPU.
        kernels: the kernels by purpose, with their tables as bytes.

    Attributes:
        kernels: the same kernels, with their tables on the GPU.
        held: the most bytes that were held on it so far.
    """

    def __init__(self, device: driver.Device, kernels: Mapping[Purpose, Kernels[bytes]]) -> None:
        self.device = device
        self.held = 0
        self._lock = threading.Lock()
        self._spare: list[driver.DeviceMemory] = []
        stream = driver.Stream()
        self.kernels: dict[Purpose, Kernels[int]] = {}
        for purpose, found in kernels.items():
            tables = {}
            for name, content in found.tables.items():
                tables[name] = self._upload(stream, content)
            self.kernels[purpose] = Kernels(found.functions, tables, found.numbers)
        stream.destroy()

    def allocate(self, size: int) -> driver.DeviceMemory:
        """Returns memory on the device, by preference some that was given back."""
        with self._lock:
            fitting = [memory for memory in self._spare if memory.size >= size]
            if fitting:
                memory = min(fitting, key=lambda memory: memory.size)
                self._spare.remove(memory)
                return memory
            self.held += size
        return driver.DeviceMemory(size)

    def give_back(self, memory: driver.DeviceMemory) -> None:
        """Takes back memory that no stream uses any more."""
        with self._lock:
            self._spare.append(memory)

    def _upload(self, stream: driver.Stream, content: bytes) -> int:
        """Copies bytes to new memory on the device; returns their address."""
        memory = self.allocate(len(content))
        pinned = driver.PinnedMemory(len(content))
        pinned.view[:] = content
        stream.to_device(memory.address, pinned.address, len(content))
        stream.wait()
        pinned.free()
        return memory.address
