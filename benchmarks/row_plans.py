"""Times other shapes and divisions of the kernels for up to 32 rows of x, beside those that nf4conv
chooses now.

    python -m benchmarks.row_plans [--json FILE] [--seconds 200] [--commit HASH] [--only TEXT]
    python -m benchmarks.row_plans --dry-run

Names of candidates say the shape, the programs on a multiprocessor, and the parts of k where these
are divided. docs/kernels.md says under "Not measured yet" what was counted, and what each of them
promises.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

import torch

from benchmarks.plan_timing import Candidate, Case, MultiplyAll, alone, main
from nf4conv.codec.kernels.product.dividing import Division, divide, divide_group
from nf4conv.codec.kernels.product.group import prepare_group
from nf4conv.codec.kernels.product.launches import prepare_product
from nf4conv.codec.kernels.product.shapes import SHAPES, Held, Shape
from nf4conv.codec.quant_state import Form

FORM: Final = Form("nf4", 64, True)


@dataclass(frozen=True)
class Plan:
    """A shape of a kernel, and how a product is divided.

    Attributes:
        shape: of the kernel; each candidate for the same kernel has the same object.
        per_processor: programs that a multiprocessor holds.
        split_shift: log2 of the parts of k; None where the kernel does not divide it.
    """

    shape: Shape | Held
    per_processor: int
    split_shift: int | None = None

    def divisions(self, heights: tuple[int, ...], k: int, processors: int) -> list[Division]:
        """Returns the division of each weight."""
        programs = self.per_processor * processors
        if len(heights) == 1:
            return [divide(self.shape, heights[0], k, programs, self.split_shift)]
        return divide_group(self.shape, heights, k, programs, self.split_shift)


def for_processor(shape: Shape | Held, programs: int) -> tuple[Shape | Held, int]:
    """Returns a shape with as many registers as leave room for so many programs, and the number."""
    shape.registers = min(65536 // (32 * shape.warps * programs) // 8 * 8, 255)
    return shape, programs


def tile(rows: int, column_tiles: int, blocks: int, copied: int) -> Shape:
    return Shape(
        rows, ranges=1, column_tiles=column_tiles, warps=4, slots=4, blocks=blocks, copied=copied
    )


def wide(rows: int, ranges: int, warps: int) -> Shape:
    return Shape(rows, ranges, column_tiles=0, warps=warps, slots=4, blocks=2, copied=0)


ONE_ROW: Final = {
    "held, 5 steps of 4 warps, 2 programs": for_processor(Held(5, 1, warps=4), 2),
    "held, 5 steps of 4 warps, 3 programs": for_processor(Held(5, 1, warps=4), 3),
    "held, 4 steps of 4 warps, 3 programs": for_processor(Held(4, 1, warps=4), 3),
    "held, 4 steps of 4 warps, 2 programs": for_processor(Held(4, 1, warps=4), 2),
    "wide, 4 warps, 4 programs": for_processor(wide(2, 2, 4), 4),
    "wide, 4 warps, 3 programs": for_processor(wide(2, 2, 4), 3),
    "wide, one range, 2 programs": for_processor(wide(4, 1, 8), 2),
    "wide, 2 programs": for_processor(replace(SHAPES[0]), 2),
    "held, 3 steps, 2 programs": for_processor(Held(3, 1), 2),
    "held, 2 steps, 2 programs": for_processor(Held(2, 1), 2),
}

TILES: Final = {
    8: {
        "256 k, 2 programs": for_processor(replace(SHAPES[2]), 2),
        "256 k, 3 programs": for_processor(replace(SHAPES[2]), 3),
        "128 k, 4 programs": for_processor(tile(8, 1, 2, 2), 4),
    },
    16: {
        "256 k, 2 programs": for_processor(replace(SHAPES[3]), 2),
        "128 k, 3 programs": for_processor(tile(16, 2, 2, 2), 3),
        "128 k, 4 programs": for_processor(tile(16, 2, 2, 2), 4),
    },
    32: {
        "128 k, 2 programs": for_processor(replace(SHAPES[4]), 2),
        "128 k, 3 programs": for_processor(replace(SHAPES[4]), 3),
        "64 k, 4 programs": for_processor(tile(32, 4, 1, 1), 4),
    },
}

LLAMA_8B: Final = (((4096, 1024, 1024), 4096), ((4096,), 4096), ((14336, 14336), 4096),
                   ((4096,), 14336))  # fmt: skip
"""The products of a layer, as compiled graphs join them."""

OTHERS: Final = (((5120,), 5120), ((6144,), 4096), ((11008,), 4096), ((14336,), 4096),
                 ((8192,), 28672))  # fmt: skip


def plans(rows: int, heights: tuple[int, ...], k: int) -> Iterator[tuple[str, Plan]]:
    """Yields what may multiply so many rows, under its name."""
    if rows == 1:
        for name, (shape, programs) in ONE_ROW.items():
            if isinstance(shape, Shape) or shape.columns_most * 0.8 <= k <= shape.columns_most:
                yield name, Plan(shape, programs)
        return
    for (name, (shape, programs)), split_shift in product(TILES[rows].items(), range(4)):
        tiles = sum(-(-n // shape.unit_rows) for n in heights)
        whole = k // shape.span >> split_shift  # stages of a part
        if whole >= 1 and (tiles << split_shift) <= 8 * programs * 132:
            yield f"{name}, {1 << split_shift} parts", Plan(shape, programs, split_shift)


def prepare(
    rows: int, heights: tuple[int, ...], k: int, plan: Plan, device: torch.device
) -> MultiplyAll:
    """Prepares a product as a plan says."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    divisions = plan.divisions(heights, k, processors)
    x_shape = torch.Size((rows, k))
    if len(heights) > 1:
        chosen = plan.shape, divisions
        return prepare_group(x_shape, torch.bfloat16, device, heights, FORM, chosen)
    one = plan.shape, divisions[0]
    return alone(prepare_product(x_shape, torch.bfloat16, device, heights[0], FORM, one))


def case(rows: int, heights: tuple[int, ...], k: int) -> Case:
    found = []
    for name, plan in plans(rows, heights, k):
        found.append(Candidate(name, partial(prepare, rows, heights, k, plan)))
    return Case(rows, heights, k, tuple(found))


CASES: Final = (
    case(1, (5120,), 5120),
    *(case(16, *one) for one in LLAMA_8B),
    case(1, (8192,), 28672),
    case(1, (6144,), 4096),
    case(1, (4096,), 4096),
    case(1, (5120, 5120, 5120), 5120),
    case(1, (13824,), 5120),
    case(1, (14336,), 4096),
    *(case(16, *one) for one in OTHERS),
    *(case(8, *one) for one in (*LLAMA_8B, *OTHERS)),
    *(case(32, *one) for one in (*LLAMA_8B, *OTHERS)),
)
"""The products whose goals are missed first."""


if __name__ == "__main__":
    main(__doc__, CASES)
