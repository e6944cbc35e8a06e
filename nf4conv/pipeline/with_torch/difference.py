"""Comparison as pipeline tasks: how far the values of two tensors are apart.

All are read piece by piece, except two encoded tensors that cannot be cut at the same places, and transposed ones.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

import torch

from nf4conv.checkpoint.encoded_pieces import cut_elements, encoded_pieces, packed_part
from nf4conv.checkpoint.header import TensorInfo
from nf4conv.format.codebook import NESTED_BLOCKSIZE
from nf4conv.format.encodings import Method
from nf4conv.pipeline.loop import Activity, Task
from nf4conv.pipeline.with_torch.reading import read_values
from nf4conv.pipeline.with_torch.worker import TorchWorker
from nf4conv.report.measured import PieceDifference, TensorDifference

_CHUNK: Final = 2**18  # values compared at a time: in float64 they take a few times as much memory as they do in a file


def value_tasks(results: Iterable[TensorDifference], piece: int) -> Iterator[Task[TorchWorker]]:
    """The comparison of tensors value by value."""
    for result in results:
        a, b = _decoded_alike(result.a, result.b), _decoded_alike(result.b, result.a)
        # decoded and in float64, two pieces and what is computed of them take some 60 bytes a value
        for start, *both in _pieces(a, b, piece // 16):
            yield partial(_compare_values, result, start, both)


def _decoded_alike(tensor: TensorInfo, other: TensorInfo) -> TensorInfo:
    """A packed weight decodes to the dtype of what it is compared with: by way of its own, it would round twice."""
    is_packed = tensor.encoding is not None and tensor.encoding.method.is_bitsandbytes_4bit
    is_plain_float = other.encoding is None and other.dtype in ("F32", "F16", "BF16")
    return tensor._replace(dtype=other.dtype) if is_packed and is_plain_float else tensor


def _pieces(a: TensorInfo, b: TensorInfo, most: int) -> Iterator[tuple[int, TensorInfo, TensorInfo]]:
    """(first element, piece of A, piece of B), of so many elements if both can be cut alike, or else all in one."""
    unit = max(_unit(a), _unit(b))
    encoded = [tensor for tensor in (a, b) if not _is_cuttable(tensor)]
    spans = _spans(encoded[0] if encoded else a, most, unit)
    if len(encoded) == 2 and spans != _spans(b, most, unit):
        yield 0, a, b
    else:
        for (start, _), *pieces in zip(spans, *(_cut(tensor, spans, most, unit) for tensor in (a, b)), strict=True):
            yield start, pieces[0], pieces[1]


def _is_cuttable(tensor: TensorInfo) -> bool:
    return tensor.encoding is None or tensor.encoding.method is Method.BITSANDBYTES_4BIT


def _unit(tensor: TensorInfo) -> int:
    """The number of elements at whose multiples a tensor can be cut."""
    return 1 if tensor.encoding is None or not _is_cuttable(tensor) else tensor.encoding.block[0] * NESTED_BLOCKSIZE


def _spans(tensor: TensorInfo, most: int, unit: int) -> list[tuple[int, int]]:
    if not _is_cuttable(tensor):
        return [(start, start + part.elements) for part, start in encoded_pieces(tensor, most, unit)]
    step = max(most - most % unit, unit)
    return [(start, min(start + step, tensor.elements)) for start in range(0, tensor.elements, step)]


def _cut(tensor: TensorInfo, spans: Sequence[tuple[int, int]], most: int, unit: int) -> list[TensorInfo]:
    if tensor.encoding is None:
        return [cut_elements(tensor, *span) for span in spans]
    if not _is_cuttable(tensor):
        return [piece.tensor for piece in encoded_pieces(tensor, most, unit)]
    return [packed_part(tensor, *span) for span in spans]


def _compare_values(result: TensorDifference, start: int, pieces: Sequence[TensorInfo], worker: TorchWorker) -> None:
    """A piece of two tensors, which begins at an element."""
    a = read_values(worker, pieces[0]).clone()  # the next read reuses the buffer
    b = read_values(worker, pieces[1])
    with worker.timed(Activity.COMPUTE):
        result.add_piece(start, difference(a, b))


_SIGNED: Final = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Values to be tested for equality: signed integers in place of unsigned ones, which torch cannot test on a GPU."""
    return values.view(_SIGNED.get(values.dtype, values.dtype))


def difference(a: torch.Tensor, b: torch.Tensor) -> PieceDifference:
    """Compare the values of two flat tensors of one length and any dtypes."""
    sums = torch.zeros(3, dtype=torch.float64, device=a.device)
    largest = torch.zeros((), dtype=torch.float64, device=a.device)
    for start in range(0, a.numel(), _CHUNK):
        left, right = a[start : start + _CHUNK], b[start : start + _CHUNK]
        x, y = left.double(), right.double()
        # float64 does not hold every integer of 64 bits
        unequal = _bits(left) != _bits(right) if left.dtype == right.dtype else x != y
        unequal &= ~(x.isnan() & y.isnan())
        distance = torch.where(unequal, (x - y).abs(), 0.0).nan_to_num_(nan=torch.inf, posinf=torch.inf)
        values = x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        sums += torch.stack([distance.square().sum(), values.square().sum(), unequal.sum()])
        largest = torch.maximum(largest, distance.amax())
    squared_difference, squared_values, differing = sums.tolist()
    return PieceDifference(squared_difference, squared_values, float(largest), int(differing))
