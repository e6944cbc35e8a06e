"""Tells how much memory this process uses."""

import resource
import sys
from pathlib import Path


def peak_resident() -> int:
    """Returns the most bytes of memory that this process has used so far."""
    # getrusage would do, but on Linux its figure includes what the parent held when it started this
    # process
    found = _status("VmHWM")
    if found is not None:
        return found
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident() -> int:
    """Returns the bytes of memory that this process uses now, or the most so far."""
    found = _status("VmRSS")
    return peak_resident() if found is None else found


def _status(name: str) -> int | None:
    """Returns a figure in bytes that Linux keeps of this process; None on other systems."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    for line in status.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
