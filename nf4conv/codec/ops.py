"""The codec's public functions: validate the arguments, allocate the results, choose the backend by device."""

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from nf4conv.codec import cpu, reference
from nf4conv.codec.codebook import BLOCKSIZES, CODEBOOKS, NESTED_BLOCKSIZE
from nf4conv.codec.error_sums import ErrorSums
from nf4conv.codec.layout import block_count
from nf4conv.codec.quant_state import DTYPE_NAMES, NestedState, QuantState, code_table, dynamic_table
from nf4conv.errors import CodecError

if TYPE_CHECKING:
    import numpy.typing as npt

OLDEST_CAPABILITY: Final = (8, 0)
"""Of a GPU that the kernels run on: their max.bf16x2, max.f16x2 and cvt.rn.bf16x2.f32 are of sm_80."""

_ALIGNMENT = 16  # of every tensor's part of a shared buffer, in elements


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
    _check_dtype(tensor)
    flat = tensor.contiguous().view(-1)
    packed = torch.empty((-(-flat.numel() // 2), 1), dtype=torch.uint8, device=flat.device)
    absmax = torch.empty(block_count(flat.numel(), blocksize), dtype=torch.float32, device=flat.device)
    backend(flat.device).quantize_blocks(flat, packed.view(-1), absmax, quant_type, blocksize)
    state = _plain_state(tensor, absmax, quant_type, blocksize)
    if double_quant:
        state.absmax, state.offset, state.state2 = compress_absmax(absmax)
    return packed, state


def quantize_4bit_batch(
    tensors: Sequence[torch.Tensor], quant_type: str = "nf4", blocksize: int = 64, double_quant: bool = True
) -> list[tuple[torch.Tensor, QuantState]]:
    """`quantize_4bit` of every tensor; on a GPU in a number of launches that does not grow with their number.

    The results are views of a few shared buffers. Only tensors of more than 130,560 blocks, 8.4 million elements at
    blocksize 64, still cost one launch each, for torch's mean.

    Args:
        tensors: of one dtype and one device; otherwise as in `quantize_4bit`, as are the other arguments.
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one absmax.
        double_quant: whether to quantize the absmax too.

    Raises:
        CodecError: as `quantize_4bit`, or tensors of different dtypes or devices.
    """
    if not tensors or backend(tensors[0].device) in (cpu, reference):
        return [quantize_4bit(tensor, quant_type, blocksize, double_quant) for tensor in tensors]
    check_options(quant_type, blocksize)
    _check_dtype(tensors[0])
    dtype, device = tensors[0].dtype, tensors[0].device
    if any(tensor.dtype != dtype or tensor.device != device for tensor in tensors):
        raise CodecError(f"a batch needs one dtype and one device; its first tensor is {dtype} on {device}")
    return _quantize_on_gpu(tensors, quant_type, blocksize, double_quant)


def _quantize_on_gpu(
    tensors: Sequence[torch.Tensor], quant_type: str, blocksize: int, double_quant: bool
) -> list[tuple[torch.Tensor, QuantState]]:
    from nf4conv.codec import kernels

    dtype, device = tensors[0].dtype, tensors[0].device
    flats = [tensor.contiguous().view(-1) for tensor in tensors]
    sizes = np.array([flat.numel() for flat in flats], dtype=np.int64)
    blocks = -(-sizes // blocksize)
    packed_starts, packed_size = _aligned_starts(-(-sizes // 2))
    absmax_starts, absmax_size = _aligned_starts(blocks)
    packed = torch.empty(packed_size, dtype=torch.uint8, device=device)
    absmax = torch.empty(absmax_size, dtype=torch.float32, device=device)
    kernels.quantize_blocks_batch(
        np.array([flat.data_ptr() for flat in flats], dtype=np.int64),
        sizes,
        packed,
        packed_starts,
        absmax,
        absmax_starts,
        dtype=dtype,
        quant_type=quant_type,
        blocksize=blocksize,
    )
    packs = _parts(packed, packed_starts, -(-sizes // 2))
    maxima = _parts(absmax, absmax_starts, blocks)
    states = [_plain_state(tensor, part, quant_type, blocksize) for tensor, part in zip(tensors, maxima, strict=True)]
    if double_quant:
        nested = -(-blocks // NESTED_BLOCKSIZE)
        nested_starts, nested_size = _aligned_starts(nested)
        codes = torch.empty(absmax_size, dtype=torch.uint8, device=device)
        nested_absmax = torch.empty(nested_size, dtype=torch.float32, device=device)
        offsets = kernels.compress_absmax_batch(
            absmax, absmax_starts, blocks, codes, absmax_starts, nested_absmax, nested_starts
        )
        table = dynamic_table(device)
        for state, part, offset, peak in zip(
            states,
            _parts(codes, absmax_starts, blocks),
            offsets.unbind(),
            _parts(nested_absmax, nested_starts, nested),
            strict=True,
        ):
            state.absmax, state.offset, state.state2 = part, offset, NestedState(peak, table)
    return [(pack.view(-1, 1), state) for pack, state in zip(packs, states, strict=True)]


def _aligned_starts(counts: "npt.NDArray[np.int64]") -> tuple["npt.NDArray[np.int64]", int]:
    ends = np.cumsum(-(-counts // _ALIGNMENT) * _ALIGNMENT)
    return np.concatenate([[0], ends[:-1]]), int(ends[-1])


def _parts(
    buffer: torch.Tensor, starts: "npt.NDArray[np.int64]", counts: "npt.NDArray[np.int64]"
) -> list[torch.Tensor]:
    """The views [start, start + count) of a buffer whose parts lie side by side; one split is quicker than slices."""
    sizes = np.diff(starts, append=buffer.numel())
    parts = torch.split(buffer, sizes.tolist())
    return [
        part if size == count else part[:count]
        for part, size, count in zip(parts, sizes.tolist(), counts.tolist(), strict=True)
    ]


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


def dequantize_4bit(
    packed: torch.Tensor,
    quant_state: QuantState,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Decode a packed weight, bit for bit as bitsandbytes' CUDA library does. Works under `torch.compile`.

    Args:
        packed: the packed codes, contiguous: uint8, or another dtype that the same bytes are viewed as.
        quant_state: from `quantize_4bit`, or bitsandbytes' own.
        out: where to write: contiguous, of the weight's shape.
        dtype: of the result: float32, float16 or bfloat16; the weight's own by default.

    Returns:
        `out`, or a new tensor of the weight's shape.

    Raises:
        CodecError: a tensor is not contiguous, on another device, or of a size that contradicts the state.
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
    state2, offset = quant_state.state2, quant_state.offset
    _check_decodable(packed, quant_state, out)
    if packed.dtype != torch.uint8:
        packed = packed.view(torch.uint8)
    quant_type, blocksize = quant_state.quant_type, quant_state.blocksize
    if torch.compiler.is_compiling():
        nested = (None, None) if state2 is None else (state2.absmax, state2.code)
        _dequantize_op(packed, quant_state.absmax, *nested, offset, out, quant_type, blocksize)
        return out
    functions = backend(out.device)
    if functions in (cpu, reference):
        scales = quant_state.absmax, state2, offset
        functions.dequantize_blocks(packed.view(-1), *scales, out.view(-1), quant_type, blocksize)
    else:  # a view costs a microsecond, and the kernels need none
        functions.dequantize_blocks(packed, quant_state.absmax, state2, offset, out, quant_type, blocksize)
    return out


@torch.library.custom_op("nf4conv::dequantize_blocks", mutates_args=("out",))
def _dequantize_op(
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
    state2 = None if nested_absmax is None or nested_code is None else NestedState(nested_absmax, nested_code)
    backend(out.device).dequantize_blocks(packed.view(-1), absmax, state2, offset, out.view(-1), quant_type, blocksize)


@_dequantize_op.register_fake
def _(*_: object) -> None:
    """Nothing but `out` is touched."""


def error_sums(tensor: torch.Tensor, packed: torch.Tensor, quant_state: QuantState) -> ErrorSums:
    """How far a packed weight is from the weight it was made of, in one pass that materialises nothing.

    Args:
        tensor: the original, contiguous; float32, float16 or bfloat16.
        packed: its packed codes, uint8, contiguous.
        quant_state: from `quantize_4bit`, or bitsandbytes' own.

    Raises:
        CodecError: as `dequantize_4bit`.
    """
    _check_dtype(tensor)
    if tensor.shape != quant_state.shape:
        raise CodecError(f"the weight has the shape {list(tensor.shape)}, its state {list(quant_state.shape)}")
    _check_decodable(packed, quant_state, tensor)
    sums: ErrorSums = backend(tensor.device).error_sums(
        tensor.view(-1),
        packed.view(torch.uint8).view(-1),
        quant_state.absmax,
        quant_state.state2,
        quant_state.offset,
        quant_state.quant_type,
        quant_state.blocksize,
    )
    return sums


def check_options(quant_type: str, blocksize: int) -> None:
    if quant_type not in CODEBOOKS:
        raise CodecError(f"unknown quant_type {quant_type!r}; expected one of {', '.join(CODEBOOKS)}")
    if blocksize not in BLOCKSIZES:
        raise CodecError(f"unsupported blocksize {blocksize}; expected one of {', '.join(map(str, BLOCKSIZES))}")


def _check_dtype(tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPE_NAMES:
        raise CodecError(
            f"cannot quantize {tensor.dtype}: bitsandbytes takes float32, float16 and bfloat16; cast the tensor first"
        )


def _check_decodable(packed: torch.Tensor, quant_state: QuantState, weight: torch.Tensor) -> None:
    """Raise unless every tensor can be read, or written, as one flat piece of memory of the right size."""
    elements = weight.numel()
    absmax, state2 = quant_state.absmax, quant_state.state2
    check_options(quant_state.quant_type, quant_state.blocksize)
    blocks = block_count(elements, quant_state.blocksize)
    _check_flat("weight", weight, elements, packed.device)
    if packed.numel() * packed.itemsize != -(-elements // 2):
        raise CodecError(f"packed: {packed.numel() * packed.itemsize} bytes, expected {-(-elements // 2)}")
    if not packed.is_contiguous():
        raise CodecError("packed: not contiguous; call .contiguous() first")
    _check_flat("absmax", absmax, blocks, packed.device)
    if absmax.dtype != (torch.float32 if state2 is None else torch.uint8):
        raise CodecError(f"absmax: {absmax.dtype}, expected float32, or uint8 with double quantization")
    if state2 is not None:
        if quant_state.offset is None or state2.blocksize != NESTED_BLOCKSIZE:
            raise CodecError(f"nested state: expected an offset and blocksize {NESTED_BLOCKSIZE}")
        _check_flat("nested_absmax", state2.absmax, block_count(blocks, NESTED_BLOCKSIZE), packed.device)
        _check_flat("nested_quant_map", state2.code, 256, packed.device)
        _check_flat("nested_offset", quant_state.offset, 1, packed.device)


def _check_flat(name: str, tensor: torch.Tensor, elements: int, device: torch.device) -> None:
    if tensor.numel() != elements or tensor.device != device or not tensor.is_contiguous():
        raise CodecError(
            f"{name}: {tensor.numel()} elements on {tensor.device}, "
            f"{'' if tensor.is_contiguous() else 'not '}contiguous; expected {elements} on {device}, contiguous"
        )


def _plain_state(tensor: torch.Tensor, absmax: torch.Tensor, quant_type: str, blocksize: int) -> QuantState:
    return QuantState(
        absmax=absmax,
        shape=tensor.shape,
        dtype=tensor.dtype,
        blocksize=blocksize,
        quant_type=quant_type,
        code=code_table(quant_type, tensor.device),
    )


@functools.cache
def backend(device: torch.device) -> ModuleType:
    """The module whose functions run on this device: the reference where there is nothing faster."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return choose_backend(device.type, torch.cuda.get_device_capability(device) if is_nvidia else None)


def choose_backend(device_type: str, capability: tuple[int, int] | None) -> ModuleType:
    """The backend for a kind of device.

    Args:
        device_type: torch's: "cpu", "cuda", "mps", …
        capability: compute capability of an NVIDIA GPU; None of any other device.
    """
    if device_type == "cpu":
        return cpu
    if capability is None or capability < OLDEST_CAPABILITY:
        return reference
    from nf4conv.codec import kernels

    return kernels


def has_kernels(device: torch.device) -> bool:
    """Whether it is Triton that computes there."""
    return backend(device).__name__ == "nf4conv.codec.kernels"
