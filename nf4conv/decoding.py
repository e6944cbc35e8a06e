"""Reading tensors that the source holds encoded: their parts from the file, decoded on the device."""

from collections.abc import Sequence
from typing import Final

import torch

from nf4conv.checkpoint.header import TensorInfo
from nf4conv.codec.decode import decode
from nf4conv.worker import TorchWorker

TORCH_DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8, "I8": torch.int8,
}  # fmt: skip
"""By safetensors' tag: what is computed with, and what encoded tensors consist of."""

_SLICED: Final = ("scaled", "stacked mxfp4")
"""Methods whose parts can be cut along the first dimension."""


def slices(tensor: TensorInfo) -> Sequence[int | None]:
    """How a large stack is taken apart: an index for each matrix in it, or a single None where it is taken whole."""
    is_stack = tensor.encoding is not None and tensor.encoding.method in _SLICED and len(tensor.shape) > 2
    return range(tensor.shape[0]) if is_stack else (None,)


def read_decoded(worker: TorchWorker, tensor: TensorInfo, index: int | None = None) -> torch.Tensor:
    """Read and decode a tensor, or what is at an index of its first dimension.

    Args:
        worker: reads and computes.
        tensor: has an encoding.
        index: which matrix of a stack; None for the whole tensor.

    Returns:
        A contiguous tensor on the worker's device, in the tensor's dtype and shape, without the first dimension if an
        index is given.

    Raises:
        CodecError: its parts contradict each other.
    """
    encoding = tensor.encoding
    assert encoding is not None
    is_sliced = index is not None and encoding.method in _SLICED
    parts = [part if index is None or not is_sliced else _cut(tensor, part, index) for _, part in encoding.parts]
    raws = worker.read([(part.file, part.start, part.stop) for part in parts])
    with worker.timed("encode"):
        views = [raw.view(TORCH_DTYPES[part.dtype]).view(part.shape) for raw, part in zip(raws, parts, strict=True)]
        roles = dict(zip((role for role, _ in encoding.parts), views, strict=True))
        decoded = decode(encoding.method, roles, encoding.block, TORCH_DTYPES[tensor.dtype])
    if index is None:
        return decoded
    return decoded[0 if is_sliced else index]


def _cut(tensor: TensorInfo, part: TensorInfo, index: int) -> TensorInfo:
    """The slice of a part that belongs to a slice of the tensor; a part shared by all slices stays whole."""
    if len(part.shape) < 2 or part.shape[0] != tensor.shape[0]:
        return part
    size = part.nbytes // part.shape[0]
    start = part.start + index * size
    return part._replace(shape=(1, *part.shape[1:]), start=start, stop=start + size)
