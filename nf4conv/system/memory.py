"""Measures memory, that of the machine and that which this process uses, and compares it."""

import ctypes
import importlib
import os
import sys
from pathlib import Path
from typing import Final

from nf4conv.system.kind import IS_POSIX
from nf4conv.system.libraries import c_library, windows_library

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
    return int(_memory_status().total_physical)


def available_memory() -> int:
    """Returns about how many bytes of memory programs could still take.

    Inside a container that may use less than the machine has, no more than it may still use. On
    macOS, which does not tell, all of the machine's memory.
    """
    if not IS_POSIX:
        return int(_memory_status().free_physical)
    found = _number_in(Path("/proc/meminfo"), "MemAvailable:")
    free = total_memory() if found is None else found * 1024
    folder = Path("/sys/fs/cgroup")
    most = _whole_number(folder / "memory.max")
    used = _whole_number(folder / "memory.current")
    if most is None or used is None:
        return free
    cached = _number_in(folder / "memory.stat", "inactive_file") or 0  # is given up when needed
    return min(free, max(most - used + cached, 0))


def _whole_number(file: Path) -> int | None:
    """Returns the number that a file of the system holds; None if it holds none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _number_in(file: Path, name: str) -> int | None:
    """Returns the number behind a name at the start of a line; None if there is none."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return int(words[1])
    return None


def peak_resident() -> int:
    """Returns the most bytes of memory that this process has used so far."""
    if not IS_POSIX:
        return int(_counters().peak_working_set)
    # getrusage would do, but on Linux its figure includes what the parent held when it started this
    # process
    found = _status("VmHWM")
    if found is not None:
        return found
    resource = importlib.import_module("resource")  # Windows has none
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def resident() -> int:
    """Returns the bytes of memory that this process uses now.

    On macOS, which does not tell, the most that it has used so far.
    """
    if not IS_POSIX:
        return int(_counters().working_set)
    found = _status("VmRSS")
    return peak_resident() if found is None else found


def _status(name: str) -> int | None:
    """Returns a figure in bytes that Linux keeps of this process; None on other systems."""
    found = _number_in(Path("/proc/self/status"), f"{name}:")
    return None if found is None else found * 1024


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of Windows."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total_physical", ctypes.c_uint64),
        ("free_physical", ctypes.c_uint64),
        ("total_page_file", ctypes.c_uint64),
        ("free_page_file", ctypes.c_uint64),
        ("total_virtual", ctypes.c_uint64),
        ("free_virtual", ctypes.c_uint64),
        ("free_extended_virtual", ctypes.c_uint64),
    )


def _memory_status() -> _MemoryStatus:
    """Returns what Windows tells of the machine's memory."""
    status = _MemoryStatus()
    status.size = ctypes.sizeof(status)
    windows_library("kernel32").GlobalMemoryStatusEx(ctypes.byref(status))
    return status


class _MemoryCounters(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS of Windows."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("page_faults", ctypes.c_uint32),
        ("peak_working_set", ctypes.c_size_t),
        ("working_set", ctypes.c_size_t),
        ("peak_paged_pool", ctypes.c_size_t),
        ("paged_pool", ctypes.c_size_t),
        ("peak_non_paged_pool", ctypes.c_size_t),
        ("non_paged_pool", ctypes.c_size_t),
        ("page_file", ctypes.c_size_t),
        ("peak_page_file", ctypes.c_size_t),
    )


def _counters() -> _MemoryCounters:
    """Returns what Windows counts of this process's memory."""
    counters = _MemoryCounters()
    counters.size = ctypes.sizeof(counters)
    kernel32 = windows_library("kernel32")
    # the handle that stands for this process, whatever its number
    this_process = ctypes.c_void_p(-1)
    kernel32.K32GetProcessMemoryInfo(this_process, ctypes.byref(counters), counters.size)
    return counters
