"""The shapes of the kernels for few rows of x: which there are, and which one a product takes."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Final


class Compiled:
    """A constant of kernels, which are compiled once for each.

    Triton's cache on disk tells them apart by repr() alone, so that has all attributes, also those
    that are worked out.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"


@dataclass(eq=False, repr=False)  # told apart by identity, which is faster
class Shape(Compiled):
    """The shape of a product: product_kernel is compiled once for each.

    Attributes:
        rows: rows of x at most: 2 or 4 for the wide kernel, from 8 on for the tile kernel.
        blocks: of 64 k in a stage of a warp, for each of its ranges: 2 if wide.
        programs: that a multiprocessor holds.
        nested: True if absmax is uint8 codes.
        early: True to begin before the kernel before has ended.
        wide: True for the wide kernel, False for the tile kernel.
        ranges: ranges of k that a warp works on at once: 2 or 1 if wide, for up to 2 or 4 rows; 1
            otherwise.
        column_tiles: rows of x, divided by 8; 0 if wide.
        copied: blocks whose x is copied to shared memory at once; 0 if wide.
        warps: of a program.
        slots: rows of W that a lane works on.
        apart: rows of W from slot to slot.
        unit_rows: rows of W of a unit.
        span: k of a stage of a program.
        words: 32-bit words of codes that a lane loads in a stage.
        scales: scales that a lane loads in a stage, for its quad.
        totals: sums that a lane keeps.
        columns: rows of x whose sums a wide kernel has.
        sums: sums of a wide unit, for each range of each warp.
        held: wide units whose sums wait in shared memory.
        shared_bytes: of the sums of a wide kernel; otherwise of two tiles of x, of which one is
            multiplied while the other is copied.
        parts: parts of a stage, each with a tile of x.
        registers: of a thread at most, so that there are enough for all programs.
    """

    rows: int
    blocks: int = 2
    programs: int = 2
    nested: bool = True
    early: bool = True

    def __post_init__(self) -> None:
        self.wide = self.rows <= 4
        self.ranges = 4 // self.rows if self.wide else 1
        self.column_tiles = self.rows // 8
        self.slots = 4
        self.apart = 8 // self.ranges
        self.unit_rows = self.apart * self.slots
        self.span = 64 * self.blocks * self.ranges
        self.words = 2 * self.slots * self.blocks
        self.scales = -(-self.slots * self.blocks // 4)
        self.columns = 4 // self.ranges
        self.sums = 4 * self.apart * self.columns
        self.held = 2 * self.ranges
        if self.wide:  # all warps share the rows, and divide k
            self.warps = 8
            self.copied = 0
            self.span *= self.warps
            self.totals = 4
            self.shared_bytes = 4 * self.held * self.warps * self.ranges * self.sums
        else:
            self.warps = 4
            self.copied = self.blocks if self.rows <= 32 else 1
            self.unit_rows *= self.warps
            self.totals = 2 * self.column_tiles * self.slots
            self.shared_bytes = 2048 * self.column_tiles * self.copied
        self.parts = self.blocks // max(self.copied, 1)
        self.registers = registers_of(self.warps, self.programs)


@dataclass(eq=False, repr=False)  # told apart by identity, which is faster
class Held(Compiled):
    """The shape of a product with x in registers: held_kernel is compiled once for each.

    Attributes:
        steps: of a unit.
        rows: rows of x at most, 1 or 2.
        nested: True if absmax is uint8 codes.
        early: True to begin before the kernel before has ended.
        warps: of a program: 4 or 8.
        programs: that a multiprocessor holds.
        sharing: steps whose columns share registers: 2 where a second row has none, otherwise 1.
        columns_most: columns of W at most.
        sums: sums of a unit, for each range of each warp.
        held: units whose sums wait in shared memory.
        shared_bytes: of these sums.
        registers: of a thread at most, so that there are enough for all programs.
    """

    steps: int
    rows: int
    nested: bool = True
    early: bool = True
    warps: int = 8
    programs: int = 2

    def __post_init__(self) -> None:
        self.sharing = 2 if self.rows == 1 and self.steps > 1 else 1
        self.columns_most = 256 * self.warps * self.steps
        self.sums = 8 * self.rows
        self.held = 16 // self.rows
        self.shared_bytes = 8 * self.warps * self.sums * self.held
        self.registers = registers_of(self.warps, self.programs)


def registers_of(warps: int, programs: int) -> int:
    """Returns how many registers a thread may have: a multiprocessor has 65,536."""
    return min(65536 // (32 * warps * programs) // 8 * 8, 255)


SHAPES = (Shape(2), Shape(4), Shape(8, blocks=4), Shape(16, blocks=4), Shape(32), Shape(64))
"""A shape for each number of rows of x; balancing.py has others for some products."""

HELD_SHAPES = (
    Held(steps=1, rows=1),
    Held(steps=2, rows=1),
    Held(steps=5, rows=1, warps=4),
    Held(steps=3, rows=1),
    Held(steps=1, rows=2),
    Held(steps=2, rows=2),
)
"""For one row or two of so few columns that x stays in registers: the fewest columns first."""

LEAST_HELD: Final = 4608
"""Rows of W from which on holding x is faster: with fewer, a program has one or two units."""

FUSED_ROWS: Final = 32
"""Rows of x at most on Hopper, which has panels/ for more."""


@cache
def shape_for(rows: int, n: int, k: int, nested: bool, early: bool) -> Shape | Held:
    """Returns the shape for up to 64 rows of x and an [n, k] weight, always the same one. `early`
    is to begin before the kernel before has ended.
    """
    for held in HELD_SHAPES if n >= LEAST_HELD else ():
        if rows <= held.rows and k <= held.columns_most:
            return variant(held, nested, early)
    return variant(next(one for one in SHAPES if rows <= one.rows), nested, early)


@cache
def variant(shape: Shape | Held, nested: bool, early: bool) -> Shape | Held:
    """Returns a shape with other attributes, always the same one."""
    return replace(shape, nested=nested, early=early)
