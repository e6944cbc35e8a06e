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


def divide_group(
    shape: Shape | Held,
    rows: tuple[int, ...],
    k: int,
    programs: int,
    split_shift: int | None = None,
) -> list[Division]:
    """Divides the products with [rows, k] weights among up to `programs` programs, as `divide` does
    for one weight.
    """
    if isinstance(shape, Held):
        return _divide_equally(rows, 8, programs, True)
    if shape.wide:
        found = _divide_equally(rows, shape.unit_rows // 2, programs, False)
        return [one._replace(steps=-(-k // shape.span)) for one in found]
    tiles = sum(-(-n // shape.unit_rows) for n in rows)
    together = divide(shape, tiles * shape.unit_rows, k, programs, split_shift)
    shift = together.split_shift
    divisions = []
    for n in rows:
        units = -(-n // shape.unit_rows) << shift
        own = max(units * together.programs // together.share, 1)
        divisions.append(Division(together.steps, units, own, shift, own))
    return divisions


def _divide_equally(
    rows: tuple[int, ...], unit_rows: int, programs: int, whole: bool
) -> list[Division]:
    """Gives all programs nearly as many units, and each program units of one weight.

    Args:
        rows: of the weights.
        unit_rows: rows of a unit.
        programs: at most.
        whole: True for shares of units; False for shares of rows, two units at least.
    """
    units = [-(-n // unit_rows) for n in rows]
    share = max(-(-sum(units) // programs), 1 if whole else 2)
    while sum(-(-one // share) for one in units) > programs:
        share += 1
    divisions = []
    for one in units:
        count = -(-one // share)
        if whole:
            divisions.append(Division(0, one // count, one % count, 0, count))
        else:
            divisions.append(Division(0, share * unit_rows, count, 0, count))
    return divisions
