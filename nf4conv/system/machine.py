"""Describes the machine and the system on it: what it lacks, its libraries, cores and memory.

The rest of the room asks for what it needs, `hasattr(os, "pread")`, where systems of one kind
differ; and `IS_POSIX` where Windows needs another way altogether.
"""

import ctypes
import gc
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

IS_POSIX: Final = importlib.util.find_spec("fcntl") is not None
"""True on Linux and macOS; False on Windows."""
CUDA_DRIVER: Final = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
"""The library that NVIDIA's driver brings."""
CAN_FORK: Final = hasattr(os, "fork")
"""True if a process can be made that starts with all that this one knows; False on Windows."""


def c_library() -> ctypes.CDLL:
    """Returns the library of C. Its calls let go of the interpreter lock."""
    try:
        return ctypes.CDLL(None)  # the program itself, which is linked with it
    except TypeError:  # Windows has no such handle
        return ctypes.CDLL("msvcrt")


def cuda_driver() -> ctypes.CDLL:
    """Returns the library of the CUDA driver."""
    return ctypes.CDLL(CUDA_DRIVER)


# --- cores ----------------------------------------------------------------------------------------


def usable_cores() -> frozenset[int]:
    """Returns the cores of the CPU that this process may use.

    Linux can keep a process to some of them. Elsewhere they are all cores of the machine.
    """
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def keep_to(cores: frozenset[int]) -> None:
    """Keeps this process to some cores, and so the memory of its threads beside them.

    Does nothing where the system has no such call: macOS and Windows.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def cores_beside(bus_id: str) -> frozenset[int]:
    """Returns the cores of the NUMA node that a device of the PCI bus is at."""
    file = Path("/sys/bus/pci/devices", bus_id, "local_cpulist")
    with suppress(OSError, ValueError):
        return _parse_cpu_list(file.read_text())
    return frozenset()


def _parse_cpu_list(text: str) -> frozenset[int]:
    """Parses Linux's list of cores, such as "0-15,32-47"."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


# --- memory ---------------------------------------------------------------------------------------

_compare: Final = c_library().memcmp
_compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def is_equal(a: memoryview, b: memoryview) -> bool:
    """Returns True if two writable views of the same length hold the same bytes.

    Other threads run meanwhile.
    """
    return not _compare(_address(a), _address(b), len(a))


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def total_memory() -> int:
    """Returns the bytes of this machine's memory."""
    if IS_POSIX:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _memory_of_windows()[1]


def available_memory() -> int:
    """Returns about how many bytes of memory programs could still take.

    Inside a container that may use less than the machine has, no more than it may still use. On
    macOS, which does not tell, all of the machine's memory.
    """
    if not IS_POSIX:
        return _memory_of_windows()[2]
    found = _number_in(Path("/proc/meminfo"), "MemAvailable:")
    free = total_memory() if found is None else found * 1024
    folder = Path("/sys/fs/cgroup")
    most = _number_in(folder / "memory.max")
    used = _number_in(folder / "memory.current")
    if most is None or used is None:
        return free
    cached = _number_in(folder / "memory.stat", "inactive_file") or 0  # is given up when needed
    return min(free, max(most - used + cached, 0))


def _number_in(file: Path, name: str = "") -> int | None:
    """Returns the number behind a name at the start of a line; None if there is none."""
    try:
        found = re.search(rf"^{name}\s*(\d+)", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1])


def peak_resident() -> int:
    """Returns the most bytes of memory that this process has used so far."""
    if not IS_POSIX:
        return _process_of_windows()[1]
    # getrusage would do, but on Linux its figure includes what the parent held when it started this
    # process
    found = _number_in(Path("/proc/self/status"), "VmHWM:")
    if found is not None:
        return found * 1024
    resource = importlib.import_module("resource")  # Windows has none
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def _memory_of_windows() -> "ctypes.Array[ctypes.c_uint64]":
    """Returns MEMORYSTATUSEX in words of 64 bits: size, all memory, free memory and more."""
    words = (ctypes.c_uint64 * 8)(64)
    ctypes.CDLL("kernel32").GlobalMemoryStatusEx(ctypes.byref(words))
    return words


def _process_of_windows() -> "ctypes.Array[ctypes.c_uint64]":
    """Returns PROCESS_MEMORY_COUNTERS in words of 64 bits: size, peak, memory now and more."""
    words = (ctypes.c_uint64 * 9)(72)
    # the handle that stands for this process, whatever its number
    this_process = ctypes.c_void_p(-1)
    ctypes.CDLL("kernel32").K32GetProcessMemoryInfo(this_process, ctypes.byref(words), 72)
    return words


@contextmanager
def uncollected() -> Iterator[None]:
    """Keeps Python from looking for dead objects.

    Planning makes hundreds of thousands of small objects that live on: looking through them again
    and again takes a quarter of the time, or half where a vocabulary is read.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
