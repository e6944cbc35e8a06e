"""Decodes weights that bitsandbytes packed to 4 bits, or pieces of them, from their tensors."""

from typing import Any

import torch

from nf4conv.codec.ops import dequantize_4bit
from nf4conv.codec.quant_state import NestedState, QuantState, code_table


def decode_packed(*, values: torch.Tensor, dtype: torch.dtype, **described: Any) -> torch.Tensor:
    """Decodes a weight that bitsandbytes packed to 4 bits, or some blocks of one, to its shape.

    Takes the packed codes in any dtype; the rest is as of `described_state`.
    """
    state = described_state(dtype=dtype, **described)
    return dequantize_4bit(values.view(torch.uint8), state, dtype=dtype)


def described_state(
    *,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None = None,
    nested_quant_map: torch.Tensor | None = None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    quant_type: str,
    blocksize: int,
    nested_offset: float | None,
    **unread: torch.Tensor,  # noqa: ARG001
) -> QuantState:
    """Returns the state of a weight of which all is known that its JSON says.

    The code map is the standard one of the data type. The stored nested_quant_map is used as it is:
    releases of bitsandbytes before 0.45.3 wrote low-precision maps.
    """
    offset = None
    state2 = None
    if nested_absmax is not None and nested_quant_map is not None:
        offset = torch.tensor(nested_offset, dtype=torch.float32, device=absmax.device)
        state2 = NestedState(nested_absmax, nested_quant_map)
    return QuantState(
        absmax=absmax,
        shape=torch.Size(shape),
        dtype=dtype,
        blocksize=blocksize,
        quant_type=quant_type,
        code=code_table(quant_type, absmax.device),
        offset=offset,
        state2=state2,
    )
