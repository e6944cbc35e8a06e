"""Writes numbers of bytes as people read them."""


def size(count: float) -> str:
    """Returns a number of bytes in decimal units, such as "1.50 GB"."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"
