"""Panels on a GPU: plans, what hangs over an edge, and races."""

import pytest
import torch
from products import assert_close_to_exact, packed_weight

import nf4conv
from nf4conv.codec.quant_state import decoding_of
from nf4conv.inference.kernels.product.panels import plans
from nf4conv.inference.kernels.product.panels.prepare import prepare_panel

pytestmark = pytest.mark.gpu

PARTS = ((1, 1), (1, 2), (2, 1), (2, 3))
"""Programs of a cluster, and splits: with one split, and with more, kernels are compiled anew."""

SIZES = ((1, 1, 1088), (67, 301, 1344), (257, 516, 4160))
"""m, n, k: a row of W, no whole panel, no multiple of 4; k are odd multiples of 64."""


def case(number: int, panel: plans.Panel) -> tuple[torch.dtype, plans.Panel, int]:
    """Returns a dtype, a panel for nested absmax or plain, and a blocksize."""
    dtype = torch.float16 if number % 3 == 2 else torch.bfloat16
    return dtype, plans.without_nesting(panel) if number % 2 else panel, 64 << number % 7


CASES = [case(number, panel) for number, panel in enumerate(plans.PANELS)]


@pytest.mark.parametrize(
    ("dtype", "panel", "blocksize"),
    CASES,
    ids=lambda one: f"{one.rows}x{one.columns}" if isinstance(one, plans.Panel) else str(one),
)
def test_plans(dtype: torch.dtype, panel: plans.Panel, blocksize: int) -> None:
    for m, n, k in (*SIZES, (panel.columns, panel.rows, 1088), (panel.columns + 1, 130, 1024)):
        quant_type = "fp4" if panel.nested else "nf4"
        packed, state = packed_weight(n, k, quant_type, blocksize, panel.nested, "cuda")
        x = torch.randn(m, k, device="cuda").to(dtype)
        decoding = decoding_of(state)
        addresses = decoding.addresses(packed)
        for cluster, splits in PARTS:
            plan = plans.Plan(panel, cluster, splits)
            multiply = prepare_panel(x.shape, dtype, x.device, n, decoding.form(), plan)
            assert_close_to_exact(multiply(x, addresses), x, packed, state)


@pytest.mark.parametrize("k", [64, 128, 192])
def test_one_program_for_a_few_columns(k: int) -> None:
    """A tensor map of fewer k, and of fewer rows of x, than a tile has."""
    for panel in plans.PANELS[::3]:
        packed, state = packed_weight(100, k, device="cuda")
        x = torch.randn(5, k, device="cuda").bfloat16()
        decoding = decoding_of(state)
        plan = plans.Plan(panel, 1, 1)
        multiply = prepare_panel(x.shape, x.dtype, x.device, 100, decoding.form(), plan)
        out = multiply(x, decoding.addresses(packed))
        assert_close_to_exact(out, x, packed, state)


def test_x_that_begins_anywhere_or_is_a_view() -> None:
    """A tensor map wants a multiple of 16 bytes, and rows behind each other."""
    packed, state = packed_weight(4096, 4096, device="cuda")
    whole = torch.randn(100 * 4096 + 8, device="cuda").bfloat16()
    for begin in (0, 1, 4, 8):
        x = whole[begin : begin + 100 * 4096].view(100, 4096)
        assert_close_to_exact(nf4conv.linear_4bit(x, packed, state), x, packed, state)
    for x in (whole[: 100 * 4096].view(4096, 100).T, whole[: 40 * 8192].view(40, 8192)[:, 4096:]):
        assert_close_to_exact(nf4conv.linear_4bit(x, packed, state), x, packed, state)


def test_clusters_again_and_again() -> None:
    """A race would show as a difference: programs that end while others read their sums."""
    for panel in (plans.PANELS[0], plans.PANELS[-1]):
        packed, state = packed_weight(2048, 1344, device="cuda")
        x = torch.randn(panel.columns + 5, 1344, device="cuda").bfloat16()
        decoding = decoding_of(state)
        plan = plans.Plan(panel, 2, 1)
        multiply = prepare_panel(x.shape, x.dtype, x.device, 2048, decoding.form(), plan)
        first = multiply(x, decoding.addresses(packed))
        assert_close_to_exact(first, x, packed, state)
        for _ in range(50):
            assert torch.equal(multiply(x, decoding.addresses(packed)), first)


@pytest.mark.parametrize("m", [33, 64, 96, 128, 192, 256, 384, 512])
def test_same_result_again(m: int) -> None:
    """A race would show as a difference."""
    for n, k in ((4096, 4096), (5120, 5120), (11008, 4096), (4096, 14336)):
        packed, state = packed_weight(n, k, device="cuda")
        x = torch.randn(m, k, device="cuda").bfloat16()
        first = nf4conv.linear_4bit(x, packed, state)
        assert_close_to_exact(first, x, packed, state)
        for _ in range(5):
            assert torch.equal(nf4conv.linear_4bit(x, packed, state), first)
