"""Decodes weights that bitsandbytes packed to 4 bits, or pieces of them, from their tensors."""

from collections.abc import Mapping

import torch

from nf4conv.codec.ops import dequantize_4bit
from nf4conv.codec.quant_state import QuantState


def decode_packed(
    parts: Mapping[str, torch.Tensor], dtype: torch.dtype, *, is_transposed: bool = False
) -> torch.Tensor:
    """Decodes a weight that bitsandbytes packed to 4 bits, or some blocks of one.

    Args:
        parts: "values", the packed codes in any dtype, and the components by suffix.
        dtype: of the result: float32, float16 or bfloat16.
        is_transposed: True if the weight, a matrix, was packed transposed.

    Returns:
        A contiguous tensor of the weight's shape; flat if the parts are those of some blocks. The
        last element of some blocks may be padding.

    Raises:
        CodecError: the parts contradict each other.
    """
    components = dict(parts)
    packed = components.pop("values").view(torch.uint8)
    state = QuantState.from_components(components, may_say_more=True)
    held = 2 * packed.nbytes
    if held < state.shape.numel():
        state.shape = torch.Size((held,))
    decoded = dequantize_4bit(packed, state, dtype=dtype)
    if is_transposed:
        return decoded.t().contiguous()
    return decoded
