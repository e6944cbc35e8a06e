"""8-bit values, or pairs of E2M1 values with the low nibble first, times scales that blocks of them
share: FP8 E4M3 and E5M2, MXFP8, INT8, MXFP4, NVFP4. sources/foreign/ has checked their shapes.

    value = float32(stored − zero point) × float32(scale), rounded once to the wanted dtype

A scale multiplies whatever it is called, `weight_scale_inv` too: weight_dequant_kernel of
DeepSeek-V3's inference/kernel.py, Fp8Dequantize of transformers' integrations/finegrained_fp8.py.
E8M0 scales, 2^(byte − 127), are stored as such or as plain bytes (OCP Microscaling Formats v1.0,
section 5.4.1).

MXFP4                      value = e2m1 × 2^(scale − 127)
                           groups of 32; OCP Microscaling Formats v1.0, section 5.3.3, and
                           convert_moe_packed_tensors of transformers' integrations/mxfp4.py
NVFP4, compressed-tensors  value = e2m1 × (scale / weight_global_scale)
                           groups of 16, scale in FP8 E4M3; compressed-tensors' compressors/nvfp4
NVFP4, ModelOpt            value = e2m1 × (scale × weight_scale_2)
                           groups of 16, scale in FP8 E4M3; ModelOpt's NVFP4QTensor.dequantize
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import Final

import torch

_CPU_CHUNK: Final = 2**18
"""Values that are decoded at a time on a CPU. What the steps leave for each other, 1 MB in float32,
stays in a core's cache: GGUF's blocks take 1.3 to 2.1 times as long with 2^22.
"""

_GPU_CHUNK: Final = 2**22
"""Values that are decoded at a time on a GPU: enough to hide the launches."""

_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

E2M1: Final = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
"""The values of the 16 codes: a sign bit, two bits of exponent, one of mantissa."""


def decode_scaled(
    values: torch.Tensor,
    scale: torch.Tensor | None,
    block: tuple[int, int] | None,
    dtype: torch.dtype,
    by_127: bool = False,
    zero: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decodes [..., rows, columns] float8_e4m3fn, float8_e5m2 or int8.

    Scales are float32, bfloat16, float16, or E8M0 as float8_e8m0fnu or uint8; None for all ones.
    With a block of (rows, columns) they are [..., ceil(rows / block rows), ceil(columns / block
    columns)]; the last blocks may be partial. Without one they are a single value, or [rows], or of
    a shape that broadcasts against the values'.

    by_127 multiplies each product by 1 / 127 too, rounded once more: bitsandbytes' LLM.int8() has
    the largest magnitudes of rows as scales, and its int8_vectorwise_dequant rounds so. `zero`,
    int8 in the shape of the scales of a matrix, is subtracted first.
    """
    if scale is None:
        scale = torch.ones((), device=values.device)
    if block is None or scale.numel() == 1:
        block = (1, 1)
        scale = _broadcastable(values, scale)
        scale = scale.expand((*values.shape[:-2], *scale.shape[-2:]))
        zero = None if zero is None else _broadcastable(values, zero)
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    for matrix, scales, decoded in zip(
        _matrices(values), _matrices(scale), _matrices(out), strict=True
    ):
        _decode_matrix(matrix, scales, block, decoded, zero, by_127=by_127)
    return out


def decode_fp4(
    values: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    divisor: torch.Tensor | None = None,
    multiplier: torch.Tensor | None = None,
    is_transposed: bool = False,
) -> torch.Tensor:
    """Decodes a matrix, or a stack of matrices, [..., rows, columns / 2] of two values a byte, the
    first one in the low nibble.

    Scales are [..., rows, groups] float8_e8m0fnu, its bytes as uint8, or float8_e4m3fn; all are
    divided by `divisor` and multiplied with `multiplier`, one float32 each. Transposed, the result
    is [..., columns, rows]: gpt-oss stores its experts as [out, in] and loads them as [in, out].
    """
    rows = values.shape[:-1]
    pairs = values.shape[-1]
    out = torch.empty((*rows, 2 * pairs), dtype=dtype, device=values.device)
    flat_values = values.flatten(0, -2)
    flat_scale = scale.flatten(0, -2)
    flat_out = out.flatten(0, -2)
    factors = scale_values(flat_scale)
    if divisor is not None:
        factors = factors / divisor.reshape(()).to(torch.float32)
    if multiplier is not None:
        factors = factors * multiplier.reshape(()).to(torch.float32)
    for part in chunks(flat_values, 2 * pairs):
        decoded = pair_values(flat_values[part]).view(len(factors[part]), scale.shape[-1], -1)
        decoded.mul_(factors[part].unsqueeze(-1))
        flat_out[part] = decoded.view(-1, 2 * pairs)
    if is_transposed:
        return out.mT.contiguous()
    return out


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Returns scales as float32, in their shape; bytes are E8M0, of which 255 means NaN."""
    if scale.dtype != torch.uint8:
        return scale.to(torch.float32)
    values = scale.view(torch.float8_e8m0fnu).to(torch.float32)
    return values.masked_fill_(scale == 255, math.nan)  # torch makes a signalling one


def byte_values(values: torch.Tensor, out: torch.Tensor) -> None:
    """Writes 8-bit values of any dtype to `out`, float32 in their shape.

    Those of FP8 are bits that are moved to where a wider type has them: torch's own cast takes
    several times as long on a CPU, and a table of all pairs leaves no room in a core's cache.
    """
    if values.dtype == torch.float8_e4m3fn:
        _e4m3_values(values.view(torch.int8), out)
    elif values.dtype == torch.float8_e5m2:  # it is the upper half of a float16
        upper = values.view(torch.uint8).to(torch.int16)
        out.copy_(upper.bitwise_left_shift_(8).view(torch.float16))
    else:
        out.copy_(values)


def _e4m3_values(stored: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the values of E4M3, whose bytes are given as int8, to `out`."""
    bits = out.view(torch.int32)
    bits.copy_(stored)  # with copies of the sign above bit 7
    bits.bitwise_left_shift_(20).bitwise_and_(-0x78100000)
    out.mul_(2.0**120)  # exponents count from there
    if stored.numel() and (stored.max() == 127 or stored.view(torch.uint8).max() == 255):
        bits[stored & 127 == 127] |= 0x7FC00000  # NaN


def look_up(pairs: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Returns the two values that each stored number stands for: [n] becomes [2 · n] float32.

    `pairs` has two float32 values for each number, as one word of int64.
    """
    return pairs.index_select(0, stored.to(torch.int32)).view(torch.float32)


def as_pairs(values: torch.Tensor) -> torch.Tensor:
    """Returns what two codes in one number stand for, the first one in the low bits: a table for
    `look_up`, given the float32 value of each code.
    """
    second, first = torch.meshgrid(values, values, indexing="ij")
    return torch.stack([first, second], dim=-1).view(torch.int64).view(-1)


def chunks(values: torch.Tensor, columns: int, unit: int = 1) -> Iterator[slice]:
    """Cuts a tensor's rows, which decode to so many columns, into chunks; the rows of each but the
    last are a multiple of `unit`.
    """
    rows = len(values)
    size = _CPU_CHUNK if values.device.type == "cpu" else _GPU_CHUNK
    units = max(size // max(columns * unit, 1), 1)
    step = units * unit
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _matrices(stack: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the matrices of a stack, [..., rows, columns]; a vector is one row."""
    shape = torch.atleast_2d(stack).shape  # type: ignore[no-untyped-call]
    return stack.reshape(math.prod(shape[:-2]), *shape[-2:]).unbind()


def _decode_matrix(
    values: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    out: torch.Tensor,
    zero: torch.Tensor | None,
    *,
    by_127: bool,
) -> None:
    """Decodes a matrix into `out`, with a scale for each block; with blocks of 1 × 1 a dimension of
    one is for all. `zero` has the shape of the scales.
    """
    factors = scale_values(scale)
    parts = list(chunks(values, values.shape[1], block[0]))
    most = max((part.stop - part.start for part in parts), default=0)
    # all parts are decoded in it, so that it stays in a core's cache
    room = torch.empty((most, values.shape[1]), dtype=torch.float32, device=values.device)
    for part in parts:
        decoded = room[: part.stop - part.start]
        byte_values(values[part], decoded)
        if zero is not None:
            decoded.sub_(_of_rows(zero.float(), part, block, values.shape[1]))
        decoded.mul_(_of_rows(factors, part, block, values.shape[1]))
        if by_127:
            decoded.mul_(1 / 127)
        out[part] = decoded


def _of_rows(grid: torch.Tensor, part: slice, block: tuple[int, int], columns: int) -> torch.Tensor:
    """Returns what rows of a matrix have of a grid, whose values blocks share, to broadcast."""
    height, width = block
    if grid.shape[0] > 1:
        grid = grid[part.start // height : -(-part.stop // height)]
    if block != (1, 1):
        grid = grid.repeat_interleave(width, dim=1)[:, :columns]
    if len(grid) > 1 and height > 1:
        grid = grid.repeat_interleave(height, dim=0)
    return grid[: part.stop - part.start]


def _broadcastable(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns scales in a shape that broadcasts against the values'."""
    if scale.numel() == 1:
        return scale.view((1,) * values.dim())
    # a scale for each row, that is, output channel
    return scale.view(-1, 1) if scale.dim() < values.dim() else scale


def pair_values(values: torch.Tensor) -> torch.Tensor:
    """Decodes bytes to the two values of each: [..., n] → [..., 2 · n] float32."""
    stored = values.reshape(-1).view(torch.uint8)
    return look_up(_pairs(values.device), stored).view(*values.shape[:-1], -1)


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    return as_pairs(torch.tensor(E2M1, dtype=torch.float32, device=device))
