"""Tensors that another quantization encoded → floats: by Triton on a GPU, by torch elsewhere, in
chunks.

scaled.py         8-bit values times scales: FP8 in its flavours, MXFP8, INT8, bitsandbytes 8-bit
fp4.py            E2M1 pairs times scales: MXFP4 and NVFP4 (4-bit bitsandbytes is codec/ops.py's)
"""

from collections.abc import Mapping

import torch

from nf4conv.codec.decode.fp4 import decode_fp4
from nf4conv.codec.decode.scaled import decode_int8_rows, decode_scaled
from nf4conv.codec.ops import dequantize_4bit
from nf4conv.codec.quant_state import QuantState
from nf4conv.errors import CodecError
from nf4conv.format.encodings import Method


def decode(
    method: Method, parts: Mapping[str, torch.Tensor], block: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Decode one tensor, which is contiguous then; a CodecError if its parts contradict each other.

    The parts are the tensors that a method takes, by role, in the shapes and dtypes in which they
    are stored, but that gpt-oss's values are [experts, out, in / 2]; `block` are the values that
    share a scale, [rows, columns], or empty where the shape of the scales tells: as
    sources/encodings/encoded.py finds out. The result is float32, float16 or bfloat16.
    """
    match method:
        case Method.SCALED:
            return decode_scaled(parts["values"], parts.get("scale"), block, dtype)
        case Method.INT8_ROWS:
            return decode_int8_rows(parts["values"], parts["scale"], dtype)
        case Method.FP4 | Method.FP4_TRANSPOSED:
            scales = parts["scale"], parts.get("divisor"), parts.get("multiplier")
            decoded = decode_fp4(parts["values"], *scales, dtype)
            return decoded if method is Method.FP4 else decoded.mT.contiguous()
        case Method.BITSANDBYTES_4BIT | Method.BITSANDBYTES_4BIT_TRANSPOSED:
            components = {role: part for role, part in parts.items() if role != "values"}
            state, packed = (
                QuantState.from_components(components),
                parts["values"].view(torch.uint8),
            )
            held = 2 * packed.nbytes
            if (
                held < state.shape.numel()
            ):  # some blocks of a weight, whose last code may be padding
                state.shape = torch.Size((held,))
            decoded = dequantize_4bit(packed, state, dtype=dtype)
            return (
                decoded.t().contiguous()
                if method is Method.BITSANDBYTES_4BIT_TRANSPOSED
                else decoded
            )
        case Method.STRIDED:
            shape, stride = block[: len(block) // 2], block[len(block) // 2 :]
            return torch.as_strided(parts["values"], shape, stride).to(dtype).contiguous()
        case Method.MERGED | Method.JOINED:
            raise CodecError(f"what is {method.value} is no encoding of a single tensor")
