"""Reading tensors that the source holds encoded: their parts from the file, decoded on the device."""

from collections.abc import Callable
from typing import Final

import torch

from nf4conv.checkpoint.header import DTYPE_BITS, TensorInfo
from nf4conv.checkpoint.plan import CopyJob
from nf4conv.codec.decode import decode
from nf4conv.shards import CastError
from nf4conv.worker import TorchWorker

TORCH_DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
"""By safetensors' tag: what is computed with, compared, and what encoded tensors consist of."""


def cut_elements(tensor: TensorInfo, start: int, stop: int) -> TensorInfo:
    """Elements start … stop of a tensor that is stored as it is, flat."""
    bits = DTYPE_BITS[tensor.dtype]
    begin, end = tensor.start + start * bits // 8, tensor.start + -(-stop * bits // 8)
    return tensor._replace(shape=(stop - start,), start=begin, stop=end)


def read_decoded(worker: TorchWorker, tensor: TensorInfo) -> torch.Tensor:
    """Read and decode a tensor, or a piece of one (checkpoint/encoded_pieces.py).

    Args:
        worker: reads and computes.
        tensor: has an encoding.

    Returns:
        A contiguous tensor on the worker's device, in the tensor's dtype and shape.

    Raises:
        CodecError: its parts contradict each other.
    """
    encoding = tensor.encoding
    assert encoding is not None
    parts = [part for _, part in encoding.parts]
    raws = worker.read([(part.file, part.start, part.stop) for part in parts])
    with worker.timed("encode"):
        views = [raw.view(TORCH_DTYPES[part.dtype]).view(part.shape) for raw, part in zip(raws, parts, strict=True)]
        roles = dict(zip((role for role, _ in encoding.parts), views, strict=True))
        decoded = decode(encoding.method, roles, encoding.block, TORCH_DTYPES[tensor.dtype])
        return decoded.view(-1)[: tensor.elements].view(tensor.shape)


def exactly_decoded(tensor: TensorInfo) -> TensorInfo:
    """An encoded tensor that decodes to a dtype which holds all its values."""
    assert tensor.encoding is not None
    return tensor if tensor.encoding.method == "strided" else tensor._replace(dtype="F32")


def check_cast(cast: torch.Tensor, job: CopyJob, exact: Callable[[], torch.Tensor]) -> None:
    """Raise if a cast made finite values infinite; what is infinite or NaN in the source stays so.

    Args:
        cast: values of a kept tensor as they will be stored.
        job: of that tensor.
        exact: gives the same values in a dtype that holds them; asked only if there is something to look for.

    Raises:
        CastError: names the tensor.
    """
    # a sum is NaN or infinite if any term is; finite terms whose sum overflows are looked at too
    if bool(torch.isfinite(cast.sum(dtype=torch.float32))):
        return
    if bool((torch.isfinite(exact()) & ~torch.isfinite(cast)).any()):
        raise CastError(job.source, job.dtype)
