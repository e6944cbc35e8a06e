"""Divides a product with few rows of x among programs."""

from typing import Final, NamedTuple

from nf4conv.inference.kernels.product.shapes import Held, Shape

MOST_SPLITS: Final = 8
"""Parts of k in different programs, each with an output of its own."""


class Division(NamedTuple):
    """A product's work, divided among programs; see product_kernel and held_kernel.

    Attributes:
        steps: stages of a unit; 0 if x is held.
        share: rows of W of a wide program; units of one that holds x; otherwise units of all.
        longer: programs that have one more if x is held; otherwise the number of programs.
        split_shift: log2 of the parts of k.
        programs: the number of programs.
    """

    steps: int
    share: int
    longer: int
    split_shift: int
    programs: int

    def arguments(self) -> tuple[int, ...]:
        """Returns what the kernel is told of this."""
        if self.steps == 0:
            return self.share, self.longer
        return self[:4]


def divide(
    shape: Shape | Held, n: int, k: int, programs: int, split_shift: int | None = None
) -> Division:
    """Divides the product with an [n, k] weight among up to `programs` programs.

    Args:
        shape: of the kernel.
        n: rows of the weight.
        k: its columns.
        programs: at most.
        split_shift: log2 of the parts of k, for the tile kernel; by default as many parts as keep
            the programs busy.
    """
    if isinstance(shape, Held):
        units = -(-n // 8)
        programs = min(units, programs)
        return Division(0, units // programs, units % programs, 0, programs)
    if shape.wide:
        half = shape.unit_rows // 2
        share = max(-(-n // (half * programs)), 2) * half
        programs = -(-n // share)
        return Division(-(-k // shape.span), share, programs, 0, programs)
    tiles = -(-n // shape.unit_rows)
    shift = _split_shift(shape, tiles, k, programs) if split_shift is None else split_shift
    units = tiles << shift
    programs = min(units, programs)
    return Division(-(-k // (shape.span << shift)), units, programs, shift, programs)


def _split_shift(shape: Shape, tiles: int, k: int, programs: int) -> int:
    """Returns the log2 of as many parts of k as keep the programs busy with that many tiles."""
    most = min(MOST_SPLITS, programs // tiles, k // shape.span)
    shift = 0
    while 2 << shift <= most:
        shift += 1
    return shift
