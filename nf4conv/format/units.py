"""Writes numbers of bytes and of seconds as people read them."""


def size(count: float) -> str:
    """Returns a number of bytes in decimal units, such as "1.50 GB"."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Returns about how long something takes, such as "8 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
