"""Packed weights to multiply with, and how far a product may be from the exact one."""

import torch

from nf4conv.codec.ops import dequantize_4bit
from nf4conv.codec.quant_state import NestedState, QuantState, code_table

PRECISION = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}
"""Of a dtype the unit roundoff; float32's is what sums of thousands leave of it."""


def packed_weight(
    n: int,
    k: int,
    quant_type: str = "nf4",
    blocksize: int = 64,
    nested: bool = True,
    device: str = "cpu",
) -> tuple[torch.Tensor, QuantState]:
    """Random codes, with scales of either sign."""
    generator = torch.Generator(device).manual_seed(n * 31 + k)
    packed = torch.randint(
        256, (-(-n * k // 2), 1), device=device, generator=generator, dtype=torch.uint8
    )
    blocks = -(-n * k // blocksize)
    absmax, offset, state2 = (
        torch.randn(blocks, device=device, generator=generator) * 0.1,
        None,
        None,
    )
    if nested:
        absmax = torch.randint(
            256, (blocks,), device=device, generator=generator, dtype=torch.uint8
        )
        nested_absmax = torch.rand(-(-blocks // 256), device=device, generator=generator) * 0.05
        state2 = NestedState(
            nested_absmax, code_table("dynamic", torch.device(nested_absmax.device))
        )
        offset = torch.tensor(0.03, device=device)
    code = code_table(quant_type, packed.device)
    return packed, QuantState(
        absmax, torch.Size((n, k)), torch.bfloat16, blocksize, quant_type, code, offset, state2
    )


def assert_close_to_exact(
    out: torch.Tensor,
    x: torch.Tensor,
    packed: torch.Tensor,
    state: QuantState,
    bias: torch.Tensor | None = None,
) -> None:
    """Within one rounding of the result, one of the product before a bias, and one of each decoded
    value.
    """
    weight = dequantize_4bit(packed, state, dtype=torch.float32).double()
    exact, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + exact.abs() + bias.double().abs()
    assert out.dtype == x.dtype
    assert out.shape == exact.shape
    bound = PRECISION[x.dtype] * (exact.abs() + size) * 1.01 + 1e-7
    excess = ((out.double() - exact).abs() / bound).max().item() if out.numel() else 0.0
    assert excess <= 1, f"{excess:.3f} times the bound"  # NaN is not
