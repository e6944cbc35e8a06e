"""The codec's public functions: validate the arguments, allocate the results, choose the backend by device."""

from types import ModuleType

import torch

from nf4conv.codec import reference
from nf4conv.codec.codebook import BLOCKSIZES, CODEBOOKS, NESTED_BLOCKSIZE
from nf4conv.codec.layout import block_count
from nf4conv.codec.quant_state import DTYPE_NAMES, NestedState, QuantState, code_table, dynamic_table
from nf4conv.errors import CodecError


def quantize_4bit(
    tensor: torch.Tensor, quant_type: str = "nf4", blocksize: int = 64, double_quant: bool = True
) -> tuple[torch.Tensor, QuantState]:
    """Quantize a weight to 4 bits, byte for byte as bitsandbytes' CUDA library does.

    Args:
        tensor: any shape; float32, float16 or bfloat16; blocks run over its row-major order.
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one absmax: 32, 64, … 4096.
        double_quant: whether to quantize the absmax too, to 8 bits in blocks of 256.

    Returns:
        packed: [ceil(n / 2), 1] uint8, the even element in the high nibble.
        state: what `dequantize_4bit` needs beside it.

    Raises:
        CodecError: an unsupported dtype, quant_type or blocksize.
    """
    check_options(quant_type, blocksize)
    if tensor.dtype not in DTYPE_NAMES:
        raise CodecError(
            f"cannot quantize {tensor.dtype}: bitsandbytes takes float32, float16 and bfloat16; cast the tensor first"
        )
    flat = tensor.contiguous().view(-1)
    packed = torch.empty((-(-flat.numel() // 2), 1), dtype=torch.uint8, device=flat.device)
    absmax = torch.empty(block_count(flat.numel(), blocksize), dtype=torch.float32, device=flat.device)
    backend(flat.device).quantize_blocks(flat, packed.view(-1), absmax, quant_type, blocksize)
    state = QuantState(
        absmax=absmax,
        shape=tensor.shape,
        dtype=tensor.dtype,
        blocksize=blocksize,
        quant_type=quant_type,
        code=code_table(quant_type, flat.device),
    )
    if double_quant:
        state.absmax, state.offset, state.state2 = compress_absmax(absmax)
    return packed, state


def compress_absmax(absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, NestedState]:
    """The second quantization: absmax to 8-bit codes.

    Args:
        absmax: [blocks] float32.

    Returns:
        codes: [blocks] uint8.
        offset: 0-d float32, the mean that was subtracted.
        state2: how the codes are decoded.
    """
    codes = torch.empty(absmax.numel(), dtype=torch.uint8, device=absmax.device)
    nested_absmax = torch.empty(
        block_count(absmax.numel(), NESTED_BLOCKSIZE), dtype=torch.float32, device=absmax.device
    )
    offset = backend(absmax.device).compress_absmax(absmax, codes, nested_absmax)
    return codes, offset, NestedState(nested_absmax, dynamic_table(absmax.device))


def check_options(quant_type: str, blocksize: int) -> None:
    if quant_type not in CODEBOOKS:
        raise CodecError(f"unknown quant_type {quant_type!r}; expected one of {', '.join(CODEBOOKS)}")
    if blocksize not in BLOCKSIZES:
        raise CodecError(f"unsupported blocksize {blocksize}; expected one of {', '.join(map(str, BLOCKSIZES))}")


def backend(device: torch.device) -> ModuleType:
    """The module whose functions run on this device: the kernels on CUDA, the reference everywhere else."""
    if device.type != "cuda":
        return reference
    from nf4conv.codec import kernels

    return kernels
