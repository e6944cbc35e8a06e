"""Times the shapes and divisions of the kernels for up to 32 rows of x, beside those that nf4conv
chooses.

    python -m benchmarks.row_plans [--json FILE] [--seconds 200] [--commit HASH] [--only TEXT]
    python -m benchmarks.row_plans --dry-run

Names of candidates say the shape, the programs on a multiprocessor, and the parts of k where these
are divided. benchmarks/results/row_plans_h200.json is what balancing.py was fitted to, with shapes
that lost and are gone; there "present" is the choice before that.
"""

from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple

import torch

from benchmarks.plan_timing import Candidate, Case, MultiplyAll, alone, main
from nf4conv.codec.quant_state import Form
from nf4conv.inference.kernels.product.balancing import PACES
from nf4conv.inference.kernels.product.dividing import Division, divide, divide_group
from nf4conv.inference.kernels.product.group import prepare_group
from nf4conv.inference.kernels.product.launches import prepare_product
from nf4conv.inference.kernels.product.shapes import HELD_SHAPES, SHAPES, Held, Shape

FORM: Final = Form("nf4", 64, True)


class Plan(NamedTuple):
    """A shape of a kernel, and how a product is divided.

    Attributes:
        shape: of the kernel; each candidate for the same kernel has the same object.
        split_shift: log2 of the parts of k; 0 where the kernel does not divide it.
    """

    shape: Shape | Held
    split_shift: int = 0

    @property
    def name(self) -> str:
        shape = self.shape
        programs = f"{shape.programs} programs"
        if isinstance(shape, Held):
            warps = "" if shape.warps == 8 else f" of {shape.warps} warps"
            return f"held, {shape.steps} steps{warps}, {programs}"
        if shape.wide:
            return f"wide, {programs}"
        return f"{shape.span} k, {programs}, {1 << self.split_shift} parts"

    def divisions(self, heights: tuple[int, ...], k: int, processors: int) -> list[Division]:
        """Returns the division of each weight."""
        programs = self.shape.programs * processors
        if len(heights) == 1:
            return [divide(self.shape, heights[0], k, programs, self.split_shift)]
        return divide_group(self.shape, heights, k, programs, self.split_shift)


LLAMA_8B: Final = (((4096, 1024, 1024), 4096), ((4096,), 4096), ((14336, 14336), 4096),
                   ((4096,), 14336))  # fmt: skip
"""The products of a layer, as compiled graphs join them."""

OTHERS: Final = (((5120,), 5120), ((6144,), 4096), ((11008,), 4096), ((14336,), 4096),
                 ((8192,), 28672))  # fmt: skip


def plans(rows: int, k: int) -> Iterator[Plan]:
    """Yields what may multiply so many rows."""
    if rows == 1:
        yield Plan(SHAPES[0])
        for held in HELD_SHAPES:
            fits = held.columns_most * 0.8 <= k <= held.columns_most
            if held.rows == 1 and not held.short and fits:
                yield Plan(held)
        return
    for shape, _ in PACES[rows]:
        for split_shift in range(4):
            if k // shape.span >> split_shift >= 1:  # stages of a part
                yield Plan(shape, split_shift)


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
    found = [
        Candidate(plan.name, partial(prepare, rows, heights, k, plan)) for plan in plans(rows, k)
    ]
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
"""The products of models, those first whose goals are missed."""


if __name__ == "__main__":
    main(__doc__, CASES)
