"""Plays a GPU for the engine without torch where there is none: its memory is the host's, and
Triton's interpreter runs its kernels.

The classes here stand for the CUDA driver (run/device/on_driver/driver.py) and the compiler.
All code above them is ours. Device memory begins with bytes that nobody may rely on, and a kernel
sees only what has been copied to it.
"""

import ctypes
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from nf4conv.codec.kernels.compiling import Variant
from nf4conv.codec.kernels.packing import mean
from nf4conv.run.device.on_driver import device, driver, kernels
from nf4conv.run.device.on_driver.kernels import Kernels, Purpose

_interpreting = threading.Lock()
_held: list["HostMemory"] = []
POISON = 0x5B


class HostDevice:
    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal

    def use(self) -> None: ...

    def capability(self) -> tuple[int, int]:
        return 9, 0


class HostMemory:
    """Stands for memory on either side."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._raw = ctypes.create_string_buffer(bytes([POISON]) * (size + 256), size + 256)
        self.address = -(-ctypes.addressof(self._raw) // 256) * 256
        self.view = memoryview((ctypes.c_char * size).from_address(self.address)).cast("B")
        _held.append(self)  # what only an address points to lives on, as on a device

    def free(self) -> None:
        self.view.release()


class HostStream:
    def to_device(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    to_host = to_device

    def clear(self, target: int, size: int) -> None:
        ctypes.memset(target, 0, size)

    def wait(self) -> None: ...

    def destroy(self) -> None: ...


class HostFunction:
    """A kernel in Triton's interpreter, which runs one at a time."""

    def __init__(self, variant: Variant) -> None:
        self._variant = variant

    def launch(self, stream: HostStream, programs: int, arguments: Sequence[int]) -> None:  # noqa: ARG002
        kernel, pointers, constants, _ = self._variant
        values: list[Any] = [*arguments, *constants]
        assert len(values) == len(kernel.arg_names)
        for place, dtype in enumerate(pointers):
            values[place] = _tensor_at(arguments[place], dtype)
        with _interpreting:
            kernel[(programs,)](*values)


def _tensor_at(address: int, dtype: torch.dtype) -> torch.Tensor:
    if not address:
        return torch.zeros(1, dtype=dtype)
    # one element is enough: what lies behind it is addressed all the same
    raw = (ctypes.c_char * dtype.itemsize).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype)


def _bundles(
    device: HostDevice,  # noqa: ARG001
    purposes: Iterable[Purpose],
) -> dict[Purpose, Kernels[bytes]]:
    found = {purpose: kernels.make_codec(torch.device("cpu"), purpose) for purpose in purposes}
    return {
        purpose: Kernels(
            {name: HostFunction(variant) for name, variant in codec.kernels.items()},
            codec.tables,
            codec.numbers,
        )
        for purpose, codec in found.items()
    }


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer one GPU to the engine without torch."""
    _held.clear()
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(driver, "Device", HostDevice)
    monkeypatch.setattr(driver, "DeviceMemory", HostMemory)
    monkeypatch.setattr(driver, "PinnedMemory", HostMemory)
    monkeypatch.setattr(driver, "Stream", HostStream)
    monkeypatch.setattr(device, "load_bundles", _bundles)
    monkeypatch.setattr(mean, "resident_blocks", lambda _: 132 * 4)
