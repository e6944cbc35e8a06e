"""Decodes weights that bitsandbytes packed to 4 bits, or pieces of them, from their tensors."""

import torch

from nf4conv.codec.ops import dequantize_4bit
from nf4conv.codec.quant_state import QuantState


def decode_packed(
    *, values: torch.Tensor, dtype: torch.dtype, **components: torch.Tensor
) -> torch.Tensor:
    """Decodes a weight that bitsandbytes packed to 4 bits, or some blocks of one.

    Args:
        values: the packed codes in any dtype.
        dtype: of the result: float32, float16 or bfloat16.
        components: by suffix.

    Returns:
        A contiguous tensor of the weight's shape; flat if the parts are those of some blocks. The
        last element of some blocks may be padding.

    Raises:
        CodecError: the parts contradict each other.
    """
    packed = values.view(torch.uint8)
    state = QuantState.from_components(components, may_say_more=True)
    held = 2 * packed.nbytes
    if held < state.shape.numel():
        state.shape = torch.Size((held,))
    return dequantize_4bit(packed, state, dtype=dtype)
