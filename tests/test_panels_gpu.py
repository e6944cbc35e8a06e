"""Panels on a GPU: plans, what hangs over an edge, and races."""

import pytest
import torch
from products import assert_close_to_exact, packed_weight

import nf4conv
from nf4conv.codec.kernels.product.panels import plans
from nf4conv.codec.kernels.product.panels.prepare import prepare_panel
from nf4conv.codec.quant_state import Form, decoding_of

pytestmark = pytest.mark.gpu

SOME = (*plans.PANELS[:5], plans.PANELS[-1])  # the others differ in their width only
CASES = [(torch.bfloat16, shape, nested) for shape in SOME for nested in (True, False)]
CASES += [(torch.float16, shape, True) for shape in (plans.NARROW, plans.TALL)]


@pytest.mark.parametrize(
    ("dtype", "shape", "nested"), CASES, ids=lambda one: str(getattr(one, "columns", one))
)
def test_plans(dtype: torch.dtype, shape: plans.Panel, nested: bool) -> None:
    """Nested absmax with one split, plain with three: either is compiled anew."""
    splits = 1 if nested else 3
    for m, n, k in ((1, 1, 768), (67, 301, 1088), (257, 516, 4160)):
        packed, state = packed_weight(n, k, "fp4" if nested else "nf4", 64, nested, "cuda")
        x = torch.randn(m, k, device="cuda").to(dtype)
        decoding = decoding_of(state)
        form = Form(decoding.quant_type, decoding.blocksize, nested)
        addresses = (packed.data_ptr(), *(one.data_ptr() for one in decoding.pointers()))
        for cluster in (1, 2):
            plan = plans.Plan(shape, cluster, splits)
            multiply = prepare_panel(x.shape, dtype, x.device, n, form, plan)
            assert_close_to_exact(multiply(x, addresses), x, packed, state)


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
