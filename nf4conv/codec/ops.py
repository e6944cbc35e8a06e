"""Tensors to 4 bits and back: validates arguments, allocates results and calls a backend."""

from typing import Any

import torch

from nf4conv.codec.backends import backend
from nf4conv.codec.quant_state import (
    DTYPE_NAMES,
    Decoding,
    NestedState,
    QuantState,
    code_table,
    decoding_of,
    described_state,
)
from nf4conv.errors import CodecError
from nf4conv.format.codebook import BLOCKSIZES, CODEBOOKS, NESTED_BLOCKSIZE, SCALES
from nf4conv.format.layout import block_count


def quantize_4bit(
    tensor: torch.Tensor,
    quant_type: str = "nf4",
    blocksize: int = 64,
    double_quant: bool = True,
    scales: str = "absmax",
) -> tuple[torch.Tensor, QuantState]:
    """Quantizes a weight to 4 bits.

    The result has the bytes that bitsandbytes' CUDA library gives, on any device. With
    `scales="search"` it has as many bytes, the same on every device, and a smaller error.

    Args:
        tensor: the weight, of any shape: n elements of float32, float16 or bfloat16, on any device.
            Blocks run over its row-major order. It may be a Parameter; the result has no gradient.
        quant_type: "nf4" (the default) or "fp4".
        blocksize: elements that share one absmax: 32, 64 (the default), 128, … 4096.
        double_quant: quantize the absmax too, to 8 bits in blocks of 256; True by default. It takes
            the format from 4.5 to about 4.13 bits per element at a blocksize of 64.
        scales: "absmax" (the default) divides each block by its largest magnitude. "search" finds
            the scale that makes the block's squared error small; such a scale may be negative, and
            stands in the place of absmax.

    Returns:
        packed: [ceil(n / 2), 1] uint8, on the tensor's device: two codes a byte, the even element's
            in the high nibble.
        state: a QuantState, which `dequantize_4bit` and `linear_4bit` need beside it.

    Raises:
        CodecError: an unsupported dtype, quant_type, blocksize or kind of scales.

    Example:
        weight = torch.randn(4096, 4096, dtype=torch.bfloat16)
        packed, state = nf4conv.quantize_4bit(weight, "nf4", blocksize=64)
        again = nf4conv.dequantize_4bit(packed, state)  # [4096, 4096] bfloat16
    """
    check_options(quant_type, blocksize)
    if scales not in SCALES:
        raise CodecError(f"unknown scales {scales!r}; expected one of {', '.join(SCALES)}")
    if tensor.dtype not in DTYPE_NAMES:
        raise CodecError(
            f"cannot quantize {tensor.dtype}: bitsandbytes takes float32, float16 and bfloat16; "
            f"cast the tensor first"
        )
    # backends write into tensors of their own, which autograd refuses to record
    flat = tensor.detach().contiguous().view(-1)
    device = flat.device
    blocks = block_count(flat.numel(), blocksize)
    packed = torch.empty((-(-flat.numel() // 2), 1), dtype=torch.uint8, device=device)
    absmax = torch.empty(blocks, dtype=torch.float32, device=device)
    quantize_blocks = backend(device).quantize_blocks
    quantize_blocks(flat, packed.view(-1), absmax, quant_type, blocksize, scales == "search")
    code = code_table(quant_type, device)
    state = QuantState(absmax, tensor.shape, tensor.dtype, blocksize, quant_type, code)
    if double_quant:
        state.absmax, state.offset, state.state2 = compress_absmax(absmax)
    return packed, state


def compress_absmax(absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, NestedState]:
    """Quantizes absmax, [blocks] float32, to 8 bits: the second quantization of double
    quantization.

    Returns the codes, [blocks] uint8; the mean that was subtracted, 0-d float32; and what decodes
    the codes.
    """
    codes = torch.empty(absmax.numel(), dtype=torch.uint8, device=absmax.device)
    nested_absmax = absmax.new_empty(block_count(absmax.numel(), NESTED_BLOCKSIZE))
    offset = backend(absmax.device).compress_absmax(absmax, codes, nested_absmax)
    return codes, offset, NestedState(nested_absmax, code_table("dynamic", absmax.device))


def dequantize_4bit(
    packed: torch.Tensor,
    quant_state: QuantState,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Decodes a packed weight, bit for bit as bitsandbytes' CUDA library does.

    Works under `torch.compile`.

    Args:
        packed: the packed codes of n elements, ceil(n / 2) bytes: uint8, or another dtype that the
            same bytes are viewed as; contiguous, of any shape.
        quant_state: what decodes them: from `quantize_4bit`, or bitsandbytes' own.
        out: the tensor to write to: contiguous, of the weight's shape, on the device of `packed`;
            float32, float16 or bfloat16. By default a new one is made.
        dtype: of the result: float32, float16 or bfloat16. By default that of `out`, or without it
            the weight's own before it was quantized.

    Returns:
        `out`, or a new tensor of the weight's shape.

    Raises:
        CodecError: a tensor is not contiguous, on another device, or of a size that contradicts the
            state; or `out` has another shape or dtype than was asked for.

    Example:
        packed, state = nf4conv.quantize_4bit(weight)
        weight = nf4conv.dequantize_4bit(packed, state, dtype=torch.float32)
    """
    shape = quant_state.shape
    if out is None:
        out = torch.empty(shape, dtype=dtype or quant_state.dtype, device=packed.device)
    elif dtype is not None and out.dtype != dtype:
        raise CodecError(f"out is {out.dtype}, but dtype={dtype} was asked for")
    if out.shape != shape:
        raise CodecError(f"out has the shape {list(out.shape)}, expected {list(shape)}")
    if out.dtype not in DTYPE_NAMES:
        raise CodecError(f"cannot decode to {out.dtype}; expected float32, float16 or bfloat16")
    check_decodable(packed, quant_state, out.numel())
    _check("weight", out, out.dtype, out.numel(), packed.device)
    if packed.dtype != torch.uint8:
        packed = packed.view(torch.uint8)
    decoding = decoding_of(quant_state)
    if torch.compiler.is_compiling():
        dequantize_op(packed, *decoding.tensors(), out, decoding.quant_type, decoding.blocksize)
    else:
        backend(out.device).dequantize_blocks(packed, decoding, out)
    return out


def decode_packed(*, values: torch.Tensor, dtype: torch.dtype, **described: Any) -> torch.Tensor:
    """Decodes a weight that bitsandbytes packed to 4 bits, or some blocks of one, to its shape.

    Takes the packed codes in any dtype; the rest is as of `described_state`.
    """
    state = described_state(dtype=dtype, **described)
    return dequantize_4bit(values.view(torch.uint8), state)


@torch.library.custom_op("nf4conv::dequantize_blocks", mutates_args=("out",))
def dequantize_op(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    nested_code: torch.Tensor | None,
    offset: torch.Tensor | None,
    out: torch.Tensor,
    quant_type: str,
    blocksize: int,
) -> None:
    """Calls the backend's `dequantize_blocks`; torch.compile sees an opaque operator that writes
    `out`.
    """
    decoding = Decoding(absmax, quant_type, blocksize, nested_absmax, nested_code, offset)
    backend(out.device).dequantize_blocks(packed, decoding, out)


@dequantize_op.register_fake
def _(*_: object) -> None:
    """Does nothing: only `out` is written, and tracing need not know what."""


def check_options(quant_type: str, blocksize: int) -> None:
    """Raises CodecError unless the data type and the blocksize are supported."""
    if quant_type not in CODEBOOKS:
        raise CodecError(
            f"unknown quant_type {quant_type!r}; expected one of {', '.join(CODEBOOKS)}"
        )
    if blocksize not in BLOCKSIZES or isinstance(blocksize, float):  # 64.0 is not 64
        raise CodecError(
            f"unsupported blocksize {blocksize}; expected one of {', '.join(map(str, BLOCKSIZES))}"
        )


def check_decodable(packed: torch.Tensor, quant_state: QuantState, elements: int) -> None:
    """Raises CodecError unless every tensor can be read as one flat piece of memory of the size
    that a weight of so many elements needs.
    """
    check_options(quant_state.quant_type, quant_state.blocksize)
    expected_bytes = -(-elements // 2)
    if packed.numel() * packed.itemsize != expected_bytes:
        raise CodecError(
            f"packed: {packed.numel() * packed.itemsize} bytes, expected {expected_bytes}"
        )
    if not packed.is_contiguous():
        raise CodecError("packed: not contiguous; call .contiguous() first")
    state2 = quant_state.state2
    blocks = block_count(elements, quant_state.blocksize)
    of_absmax = torch.float32 if state2 is None else torch.uint8
    _check("absmax", quant_state.absmax, of_absmax, blocks, packed.device)
    if state2 is None:
        return
    if quant_state.offset is None or state2.blocksize != NESTED_BLOCKSIZE:
        raise CodecError(f"nested state: expected an offset and blocksize {NESTED_BLOCKSIZE}")
    for name, tensor, size in (
        ("nested_absmax", state2.absmax, block_count(blocks, NESTED_BLOCKSIZE)),
        ("nested_quant_map", state2.code, 256),
        ("nested_offset", quant_state.offset, 1),
    ):
        _check(name, tensor, torch.float32, size, packed.device)


def _check(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, elements: int, device: torch.device
) -> None:
    """Raises CodecError unless a kernel can read a tensor as so many elements of a dtype."""
    found = (tensor.dtype, tensor.numel(), tensor.device, tensor.is_contiguous())
    if found != (dtype, elements, device, True):
        layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
        raise CodecError(
            f"{name}: {tensor.dtype}, {tensor.numel()} elements on {tensor.device}, {layout}; "
            f"expected {dtype}, {elements} elements on {device}, contiguous"
        )
