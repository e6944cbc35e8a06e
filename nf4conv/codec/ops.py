"""The codec's public functions: validate the arguments, allocate the results, choose the backend by
device.
"""

import torch

from nf4conv.codec import cpu, reference
from nf4conv.codec.backends import backend, encoder
from nf4conv.codec.quant_state import (
    DTYPE_NAMES,
    Decoding,
    NestedState,
    QuantState,
    code_table,
    decoding_of,
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
    """Quantize a weight to 4 bits, byte for byte as bitsandbytes' CUDA library does; or better, in
    as many bytes.

    Args:
        tensor: any shape; float32, float16 or bfloat16; blocks run over its row-major order.
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one absmax: 32, 64, … 4096.
        double_quant: whether to quantize the absmax too, to 8 bits in blocks of 256.
        scales: "absmax"; or "search": of each block the scale that makes its squared error small,
            which may be negative and stands in the place of absmax. The bytes are then the same on
            every device.

    Returns:
        packed: [ceil(n / 2), 1] uint8, the even element in the high nibble.
        state: what `dequantize_4bit` needs beside it.

    Raises:
        CodecError: an unsupported dtype, quant_type, blocksize or kind of scales.
    """
    check_options(quant_type, blocksize)
    if scales not in SCALES:
        raise CodecError(f"unknown scales {scales!r}; expected one of {', '.join(SCALES)}")
    if tensor.dtype not in DTYPE_NAMES:
        raise CodecError(
            f"cannot quantize {tensor.dtype}: bitsandbytes takes float32, float16 and bfloat16; "
            f"cast the tensor first"
        )
    flat = tensor.contiguous().view(-1)
    packed = torch.empty((-(-flat.numel() // 2), 1), dtype=torch.uint8, device=flat.device)
    absmax = torch.empty(
        block_count(flat.numel(), blocksize), dtype=torch.float32, device=flat.device
    )
    encoder(flat.device, scales)(flat, packed.view(-1), absmax, quant_type, blocksize)
    code = code_table(quant_type, tensor.device)
    state = QuantState(absmax, tensor.shape, tensor.dtype, blocksize, quant_type, code)
    if double_quant:
        state.absmax, state.offset, state.state2 = compress_absmax(absmax)
    return packed, state


def compress_absmax(absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, NestedState]:
    """The second quantization: absmax, [blocks] float32, to 8-bit codes.

    Given back are the codes, [blocks] uint8, the mean that was subtracted, 0-d float32, and how the
    codes are decoded.
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
    """Decode a packed weight, bit for bit as bitsandbytes' CUDA library does. Works under
    `torch.compile`.

    Args:
        packed: the packed codes, contiguous: uint8, or another dtype that the same bytes are viewed
            as.
        quant_state: from `quantize_4bit`, or bitsandbytes' own.
        out: where to write: contiguous, of the weight's shape.
        dtype: of the result: float32, float16 or bfloat16; the weight's own by default.

    Returns:
        `out`, or a new tensor of the weight's shape.

    Raises:
        CodecError: a tensor is not contiguous, on another device, or of a size that contradicts the
            state.
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
    _check_flat("weight", out, out.numel(), packed.device)
    if packed.dtype != torch.uint8:
        packed = packed.view(torch.uint8)
    decoding = decoding_of(quant_state)
    if torch.compiler.is_compiling():
        dequantize_op(packed, *decoding.tensors(), out, decoding.quant_type, decoding.blocksize)
        return out
    functions = backend(out.device)
    if functions in (cpu, reference):
        functions.dequantize_blocks(packed.view(-1), decoding, out.view(-1))
    else:  # a view costs a microsecond, and the kernels need none
        functions.dequantize_blocks(packed, decoding, out)
    return out


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
    """`backend.dequantize_blocks` as torch.compile sees it: opaque, writing `out`."""
    state2 = (
        None
        if nested_absmax is None or nested_code is None
        else NestedState(nested_absmax, nested_code)
    )
    decoding = Decoding(absmax, state2, offset, quant_type, blocksize)
    backend(out.device).dequantize_blocks(packed.view(-1), decoding, out.view(-1))


@dequantize_op.register_fake
def _(*_: object) -> None:
    """Nothing but `out` is touched."""


def check_options(quant_type: str, blocksize: int) -> None:
    if quant_type not in CODEBOOKS:
        raise CodecError(
            f"unknown quant_type {quant_type!r}; expected one of {', '.join(CODEBOOKS)}"
        )
    if blocksize not in BLOCKSIZES:
        raise CodecError(
            f"unsupported blocksize {blocksize}; expected one of {', '.join(map(str, BLOCKSIZES))}"
        )


def check_decodable(packed: torch.Tensor, quant_state: QuantState, elements: int) -> None:
    """Raise unless every tensor can be read as one flat piece of memory of the size that so many
    elements need.
    """
    absmax, state2 = quant_state.absmax, quant_state.state2
    check_options(quant_state.quant_type, quant_state.blocksize)
    blocks = block_count(elements, quant_state.blocksize)
    if packed.numel() * packed.itemsize != -(-elements // 2):
        raise CodecError(
            f"packed: {packed.numel() * packed.itemsize} bytes, expected {-(-elements // 2)}"
        )
    if not packed.is_contiguous():
        raise CodecError("packed: not contiguous; call .contiguous() first")
    _check_flat("absmax", absmax, blocks, packed.device)
    if absmax.dtype != (torch.float32 if state2 is None else torch.uint8):
        raise CodecError(
            f"absmax: {absmax.dtype}, expected float32, or uint8 with double quantization"
        )
    if state2 is not None:
        if quant_state.offset is None or state2.blocksize != NESTED_BLOCKSIZE:
            raise CodecError(f"nested state: expected an offset and blocksize {NESTED_BLOCKSIZE}")
        _check_flat(
            "nested_absmax", state2.absmax, block_count(blocks, NESTED_BLOCKSIZE), packed.device
        )
        _check_flat("nested_quant_map", state2.code, 256, packed.device)
        _check_flat("nested_offset", quant_state.offset, 1, packed.device)


def _check_flat(name: str, tensor: torch.Tensor, elements: int, device: torch.device) -> None:
    if tensor.numel() != elements or tensor.device != device or not tensor.is_contiguous():
        raise CodecError(
            f"{name}: {tensor.numel()} elements on {tensor.device}, "
            f"{'' if tensor.is_contiguous() else 'not '}contiguous; expected {elements} on "
            f"{device}, contiguous"
        )
