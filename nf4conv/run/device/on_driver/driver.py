"""The few calls of the CUDA driver API that are needed, through ctypes
(docs.nvidia.com/cuda/cuda-driver-api).

NVIDIA's package cuda-bindings offers the whole API. Its import takes 0.07 s of a command of 1.2 s,
and not every torch brings it, so these few calls are declared here; whatever is declared is used.
ctypes lets go of the interpreter lock during each call, so threads that wait for the device do not
hold each other up.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Final

from nf4conv.errors import Nf4convError
from nf4conv.system.machine import cuda_driver

_STREAM_NON_BLOCKING: Final = 1
_HOST_PORTABLE: Final = 1
_CAPABILITY_MAJOR: Final = 75
_CAPABILITY_MINOR: Final = 76
_MAX_DYNAMIC_SHARED: Final = 8
_OUT_OF_MEMORY: Final = 2
_LARGEST_STATIC_SHARED: Final = 48 * 1024


class CudaError(Nf4convError):
    """A call of the CUDA driver failed."""


class CudaOutOfMemoryError(CudaError):
    """The device, or what the host may pin, is full."""


_ADDRESS: Final = ctypes.c_uint64  # on the device
_POINTER: Final = ctypes.c_void_p  # on the host, or a handle
_SIZE: Final = ctypes.c_size_t
_OF_MEMORY: Final = {
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, _POINTER, _SIZE, _POINTER),
    "cuMemcpyDtoHAsync_v2": (_POINTER, _ADDRESS, _SIZE, _POINTER),
    "cuMemsetD8Async": (_ADDRESS, ctypes.c_ubyte, _SIZE, _POINTER),
    "cuMemAlloc_v2": (ctypes.POINTER(_ADDRESS), _SIZE),
    "cuMemHostAlloc": (ctypes.POINTER(_POINTER), _SIZE, ctypes.c_uint),
    "cuMemFreeHost": (_POINTER,),
}
"""The types of the arguments of calls, by their names."""

_OTHERS: Final = {
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuLaunchKernel": (_POINTER, *[ctypes.c_uint] * 7, *[_POINTER] * 3),
    "cuModuleLoadData": (ctypes.POINTER(_POINTER), ctypes.c_char_p),
    "cuModuleGetFunction": (ctypes.POINTER(_POINTER), _POINTER, ctypes.c_char_p),
    "cuFuncSetAttribute": (_POINTER, ctypes.c_int, ctypes.c_int),
    "cuStreamCreate": (ctypes.POINTER(_POINTER), ctypes.c_uint),
    "cuStreamSynchronize": (_POINTER,),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuCtxSetCurrent": (_POINTER,),
}


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = cuda_driver()
    except OSError as error:
        raise CudaError("no NVIDIA driver on this machine") from error
    for name, types in (_OF_MEMORY | _OTHERS).items():
        getattr(library, name).argtypes = types
    return library


def _call(name: str, *arguments: object) -> None:
    code = getattr(_library(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(code, ctypes.byref(text))
        kind = CudaOutOfMemoryError if code == _OUT_OF_MEMORY else CudaError
        raise kind(f"{name}: {(text.value or b'unknown error').decode()}")


def device_count() -> int:
    """Returns how many GPUs the driver offers to this process; 0 without a driver."""
    try:
        _call("cuInit", 0)
        count = ctypes.c_int()
        _call("cuDeviceGetCount", ctypes.byref(count))
    except CudaError:
        return 0
    return count.value


def bus_id(ordinal: int) -> str:
    """Returns where a GPU is on the PCI bus, as Linux writes it: "0000:1b:00.0"."""
    text = ctypes.create_string_buffer(16)
    _call("cuDeviceGetPCIBusId", text, len(text), ordinal)
    return text.value.decode().lower()


class Device:
    """One GPU, as the driver counts after CUDA_VISIBLE_DEVICES, and its primary context, which
    torch would use too.
    """

    def __init__(self, ordinal: int) -> None:
        _call("cuInit", 0)
        self.ordinal = ordinal
        self._context = ctypes.c_void_p()

    def use(self) -> None:
        """Makes this the calling thread's device.

        The first time it makes the context, which takes a third of a second.
        """
        if not self._context:
            _call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self.ordinal)
        _call("cuCtxSetCurrent", self._context)

    def capability(self) -> tuple[int, int]:
        """Returns the compute capability, such as (9, 0)."""
        value = ctypes.c_int()
        found = []
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
            _call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self.ordinal)
            found.append(value.value)
        return found[0], found[1]


class DeviceMemory:
    """Bytes on the device, of which the first has an address that is a multiple of 256."""

    def __init__(self, size: int) -> None:
        address = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(address), max(size, 1))
        self.address = address.value
        self.size = size


class PinnedMemory:
    """Bytes on the host that the device copies at full speed: the address of the first, and a view
    of them.
    """

    def __init__(self, size: int) -> None:
        address = ctypes.c_void_p()
        _call("cuMemHostAlloc", ctypes.byref(address), max(size, 1), _HOST_PORTABLE)
        self.address = address.value or 0
        self.view = memoryview((ctypes.c_char * size).from_address(self.address)).cast("B")

    def free(self) -> None:
        self.view.release()
        _call("cuMemFreeHost", self.address)


class Function:
    """A kernel on a device, ready to be launched: `entry` of machine code, with bytes of shared
    memory a program.
    """

    def __init__(self, cubin: bytes, entry: str, shared: int, threads: int) -> None:
        module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        self._shared = shared
        self._threads = threads
        _call("cuModuleLoadData", ctypes.byref(module), cubin)
        _call("cuModuleGetFunction", ctypes.byref(self._function), module, entry.encode())
        if shared > _LARGEST_STATIC_SHARED:
            _call("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED, shared)

    def launch(self, stream: "Stream", programs: int, arguments: Sequence[int]) -> None:
        """Launches so many programs on a stream of the current device; arguments are addresses and
        64-bit integers.
        """
        # Triton's kernels take two more pointers, for scratch memory that ours do not use
        count = len(arguments) + 2
        values = (ctypes.c_uint64 * count)(*[value % 2**64 for value in arguments], 0, 0)
        width = ctypes.sizeof(ctypes.c_uint64)
        start = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * count)(*range(start, start + count * width, width))
        _call(
            "cuLaunchKernel",
            self._function,
            programs,  # along x; one along y and z
            1,
            1,
            self._threads,  # likewise
            1,
            1,
            self._shared,
            stream.handle,
            pointers,
            None,
        )


class Stream:
    """An order of work on the current device: a new one, or one that has a handle already."""

    def __init__(self, handle: int | None = None) -> None:
        self.handle = ctypes.c_void_p(handle)
        if handle is None:
            _call("cuStreamCreate", ctypes.byref(self.handle), _STREAM_NON_BLOCKING)

    def to_device(self, target: int, source: int, size: int) -> None:
        _call("cuMemcpyHtoDAsync_v2", target, source, size, self.handle)

    def to_host(self, target: int, source: int, size: int) -> None:
        _call("cuMemcpyDtoHAsync_v2", target, source, size, self.handle)

    def clear(self, target: int, size: int) -> None:
        _call("cuMemsetD8Async", target, 0, size, self.handle)

    def wait(self) -> None:
        _call("cuStreamSynchronize", self.handle)

    def destroy(self) -> None:
        _call("cuStreamDestroy_v2", self.handle)
