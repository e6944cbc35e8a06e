"""8-bit values times scales that blocks of them share: FP8 E4M3 and E5M2, MXFP8, INT8.

    value = float32(stored) × float32(scale), rounded once to the wanted dtype

A scale multiplies whatever it is called, `weight_scale_inv` too: weight_dequant_kernel of
DeepSeek-V3's inference/kernel.py, Fp8Dequantize of transformers' integrations/finegrained_fp8.py.
E8M0 scales, 2^(byte − 127), are stored as such or as plain bytes (OCP Microscaling Formats v1.0,
section 5.4.1).
"""

import math
from collections.abc import Iterator

import torch

from nf4conv.codec.backends import has_kernels
from nf4conv.errors import CodecError

_CPU_CHUNK = 2**18
_GPU_CHUNK = 2**24
"""Values that are float32 at a time: on a CPU what its cache holds, on a GPU enough to hide the
launches.
"""


def decode_scaled(
    values: torch.Tensor,
    scale: torch.Tensor | None,
    block: tuple[int, int] | None,
    dtype: torch.dtype,
    by_127: bool = False,
) -> torch.Tensor:
    """Decode 8-bit values to [..., rows, columns] `dtype`; a CodecError if the scales do not fit
    them.

    Args:
        values: [..., rows, columns] float8_e4m3fn, float8_e5m2 or int8.
        scale: what they are multiplied with, float32, bfloat16, float16, or E8M0 as float8_e8m0fnu
            or uint8.
            With a block: [..., ceil(rows / block rows), ceil(columns / block columns)]; the last
                blocks may be partial.
            Without: one value, or [rows], or a shape that broadcasts against the values'. None: all
                ones.
        block: (rows, columns) that share a scale; None where the shape of the scales tells.
        dtype: of the result.
        by_127: whether a product is then multiplied by 1 / 127, rounded once more.
    """
    if scale is None:
        scale = torch.ones((), device=values.device)
    if block is None or scale.numel() == 1:
        block = None
        scale = _broadcastable(values, scale)
    else:
        _check_grid(values, scale, block)
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    decode = _decode_matrix
    if has_kernels(values.device):
        from nf4conv.codec.kernels.decoding import scaled  # importing Triton takes a second

        decode = scaled.decode_scaled
    spread = scale if block is not None else scale.expand((*values.shape[:-2], *scale.shape[-2:]))
    for matrix, scales, decoded in zip(*map(_matrices, (values, spread, out)), strict=True):
        decode(matrix.contiguous(), scales.contiguous(), block or (1, 1), decoded, by_127=by_127)
    return out


def decode_int8_rows(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode a weight of bitsandbytes' LLM.int8(): each row was scaled so that its largest
    magnitude is 127.

    `values` are [rows, columns] int8 (`weight`), `scale` the largest magnitudes, [rows] float32
    (`SCB`). The result is [rows, columns] of a dtype, rounded as bitsandbytes'
    int8_vectorwise_dequant: twice in float32.
    """
    if scale.numel() != values.shape[0]:
        raise CodecError(f"{scale.numel()} row scales for a weight of shape {list(values.shape)}")
    return decode_scaled(values, scale.view(-1, 1), None, dtype, by_127=True)


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Scales as float32; bytes are E8M0, of which 255 means NaN."""
    if scale.dtype != torch.uint8:
        return scale.to(torch.float32)
    bits = scale.to(torch.int32) << 23  # torch before 2.7 has no dtype of this name to cast from
    bits.masked_fill_(scale == 0, 1 << 22).masked_fill_(scale == 255, 0x7FC00000)
    return bits.view(torch.float32)


def byte_values(values: torch.Tensor) -> torch.Tensor:
    """8-bit values of any dtype as float32, by a table of all 256: several times as fast as torch's
    cast on a CPU.
    """
    table = (
        torch.arange(256, dtype=torch.uint8, device=values.device)
        .view(values.dtype)
        .to(torch.float32)
    )
    indices = values.reshape(-1).view(torch.uint8).to(torch.int32)
    return table.index_select(0, indices).view(values.shape)


def chunks(values: torch.Tensor, columns: int, unit: int = 1) -> Iterator[slice]:
    """A tensor's rows, of so many values each, a few at a time: whole units of them."""
    rows = len(values)
    size = _CPU_CHUNK if values.device.type == "cpu" else _GPU_CHUNK
    step = max(size // max(columns * unit, 1), 1) * unit
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _check_grid(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> None:
    height, width = block
    *stacked, rows, columns = values.shape
    expected = (*stacked, -(-rows // height), -(-columns // width))
    if tuple(scale.shape) != expected:
        raise CodecError(
            f"scales of shape {list(scale.shape)} for values of shape {list(values.shape)} in "
            f"blocks of "
            f"{height} × {width}, expected {list(expected)}"
        )


def _matrices(stack: torch.Tensor) -> tuple[torch.Tensor, ...]:
    shape = torch.atleast_2d(stack).shape  # type: ignore[no-untyped-call]
    return stack.reshape(math.prod(shape[:-2]), *shape[-2:]).unbind()


def _decode_matrix(
    values: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    out: torch.Tensor,
    *,
    by_127: bool = False,
) -> None:
    """As kernels.scaled.decode_scaled."""
    (height, width), scale = block, scale_values(scale)
    for part in chunks(values, values.shape[1], height):
        scales = (
            scale if scale.shape[0] == 1 else scale[part.start // height : -(-part.stop // height)]
        )
        if block != (1, 1):
            scales = scales.repeat_interleave(width, dim=1)[:, : values.shape[1]].repeat_interleave(
                height, dim=0
            )
        decoded = byte_values(values[part]).mul_(scales[: part.stop - part.start])
        out[part] = decoded.mul_(1 / 127) if by_127 else decoded


def _broadcastable(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scale.numel() == 1:
        return scale.view((1,) * values.dim())
    if scale.dim() == 1 and values.dim() == 2:
        scale = scale.view(-1, 1)  # a scale for each row, that is, output channel
    if scale.dim() != values.dim() or any(
        size not in (1, whole) for size, whole in zip(scale.shape, values.shape, strict=True)
    ):
        raise CodecError(
            f"scales of shape {list(scale.shape)} for values of shape {list(values.shape)}"
        )
    return scale
