"""Panels on a GPU: every plan, what hangs over an edge, and races."""

import pytest
import torch
from products import assert_close_to_exact, packed_weight

import nf4conv
from nf4conv.codec.kernels.product import panel
from nf4conv.codec.quant_state import Form, decoding_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("shape", panel.PANELS, ids=lambda one: f"{one.groups}x{one.columns}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_plan(dtype: torch.dtype, shape: panel.Panel, cluster: int, splits: int) -> None:
    plan = panel.Plan(shape, cluster, splits)
    for m, n, k, nested in ((1, 1, 768, True), (67, 301, 1088, False), (257, 516, 4160, True)):
        packed, state = packed_weight(n, k, "fp4" if nested else "nf4", 64, nested, "cuda")
        x = torch.randn(m, k, device="cuda").to(dtype)
        decoding = decoding_of(state)
        form = Form(decoding.quant_type, decoding.blocksize, nested)
        multiply = panel.prepare_panel(x.shape, dtype, x.device, n, form, plan)
        addresses = (packed.data_ptr(), *(one.data_ptr() for one in decoding.pointers()))
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
