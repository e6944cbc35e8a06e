"""Finds the cores that this process may use, and whether it may fork."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

CAN_FORK: Final = hasattr(os, "fork")
"""True if a process can be made that starts with all that this one knows; False on Windows."""


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

    Raises:
        OSError: these are no cores that it may use.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def cores_beside(bus_id: str) -> frozenset[int]:
    """Returns the cores of the NUMA node that a device of the PCI bus is at.

    Args:
        bus_id: the device, such as "0000:1b:00.0".

    Returns:
        The cores; none where the system does not tell them, which only Linux does.
    """
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
