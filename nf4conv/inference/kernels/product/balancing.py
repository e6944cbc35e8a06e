"""Chooses how programs fill a GPU: the shape of a kernel for few rows of x, and the parts of k.

A unit of a tile kernel is 128 rows of W and a part of k. What counts is how many units the busiest
multiprocessor has, and how fast it works on them. More parts balance better, but their sums must be
added up. A shape with fewer registers lets a multiprocessor hold more programs.
"""

from typing import Final, NamedTuple

from nf4conv.codec.quant_state import Form
from nf4conv.inference.kernels.product.shapes import (
    SHAPES,
    Held,
    Shape,
    shape_for,
    variant,
)

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


Pace = tuple[Shape, tuple[float, ...]]
"""A shape, and the µs of a stage while 1, 2, … programs work on a multiprocessor of an H200."""

PACES: Final[dict[int, tuple[Pace, ...]]] = {
    8: (
        (SHAPES[2], (1.2, 1.95)),
        (Shape(8, blocks=4, programs=3), (1.1, 1.9, 2.85)),
        (Shape(8, programs=4), (0.85, 1.15, 1.68, 2.07)),
    ),
    16: (
        (SHAPES[3], (1.37, 2.07)),
        (Shape(16, programs=3), (0.88, 1.25, 1.65)),
        (Shape(16, programs=4), (1.05, 1.3, 1.75, 2.14)),
    ),
    32: (
        (SHAPES[4], (1.02, 1.29)),
        (Shape(32, programs=3), (1.4, 1.65, 1.97)),
    ),
}
"""The shapes to choose among, by the rows of x that they take at most. The first of each has two
programs on a multiprocessor, so it has an estimate for every product.
"""

_BEGIN_AND_END: Final = 3.6
"""µs that a product takes beside its stages."""

_CROWDED: Final = 1.5
"""µs more where three or four programs of each multiprocessor begin at once: the last ones wait for
those of the kernel before.
"""

_WORTHWHILE: Final = 0.98
"""Share of the time of a plan that a later one may take at most to replace it: more parts need
memory, and another shape must be compiled.
"""

_BYTES: Final = 4.1e6
"""Bytes that an H200 reads or writes in a µs."""


def plan_rows(
    m: int, n: int, k: int, form: Form, processors: int, early: bool
) -> tuple[Shape | Held, Division]:
    """Returns the shape for up to 64 rows of x, and how the product with an [n, k] weight is
    divided among programs.

    These are the same for 5 to 8, 9 to 16 and 17 to 32 rows of x, so that a row's result does not
    depend on how many stand beside it. Only a GPU that begins kernels early was measured, so only
    there a multiprocessor may hold more than two programs.
    """
    shape = shape_for(m, n, k, form.nested, early)
    split_shift = None
    if early and isinstance(shape, Shape) and shape.rows in PACES:
        fastest, split_shift = _choose_tiles(shape.rows, n, k, processors)
        shape = variant(fastest, form.nested, early)
    programs = shape.programs * processors
    return shape, divide(shape, n, k, programs, split_shift)


def _choose_tiles(rows: int, n: int, k: int, processors: int) -> tuple[Shape, int]:
    """Returns the shape and the log2 of the parts of k that take least time by the estimate, or
    hardly more, for as many rows of x as one of PACES has.
    """
    best = PACES[rows][0][0], 0
    least = float("inf")
    for pace in PACES[rows]:
        shape, _ = pace
        split_shift = 0
        while split_shift == 0 or 1 << split_shift <= min(MOST_SPLITS, k // shape.span):
            cost = estimate(pace, n, k, processors, split_shift)
            if cost < _WORTHWHILE * least:
                best = shape, split_shift
                least = cost
            split_shift += 1
    return best


def estimate(pace: Pace, n: int, k: int, processors: int, split_shift: int) -> float:
    """Returns about how many µs a product takes on an H200; infinity where it was not fitted.

    Fitted to tests/golden/row_plans_h200.json: 7 % root mean square.
    """
    shape, stages = pace
    units = -(-n // shape.unit_rows) << split_shift
    slots = shape.programs * processors
    stages_of_unit = -(-k // (shape.span << split_shift))
    if shape.programs > 2 and units <= 2 * processors:
        # programs of the next kernel begin in slots that are left, so these may meet on some
        # multiprocessors while others have few
        return float("inf")
    rounds, left = divmod(units, slots)
    busiest = -(-left // processors)
    if rounds and shape.programs == 2:
        busiest = 2  # measured: a last round of few takes as long as a full one
    cost = _BEGIN_AND_END + rounds * stages_of_unit * stages[-1]
    if left:
        cost += stages_of_unit * stages[busiest - 1]
    if shape.programs > 2 and 0.95 * slots < units <= slots:
        cost += _CROWDED
    if split_shift:
        sums = shape.rows * n << split_shift
        cost += 8 * sums / _BYTES  # float32, written and read
    return cost
