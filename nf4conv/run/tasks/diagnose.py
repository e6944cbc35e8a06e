"""Says how a checkpoint differs from what its source gives: reads both, decodes, compares, counts.

A packed weight is compared in three ways at once: the error of its values; its codes and scales
against those that quantizing the source gives; and, where a code differs, whether it is as near to
the value, as rounding and ties allow. What prove.py has proved need not be looked at. Takes torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from nf4conv.codec.backends import backend
from nf4conv.codec.error_sums import SMALLEST_NORMAL
from nf4conv.codec.ops import compress_absmax
from nf4conv.codec.quant_state import DTYPES, QuantState, decoding_of, described_state
from nf4conv.codec.reference.dequantize import decoded_values
from nf4conv.format.codebook import NESTED_BLOCKSIZE
from nf4conv.format.dtypes import DTYPE_BITS, FLOAT_TAGS
from nf4conv.format.layout import (
    NESTED_QUANT_MAP,
    QUANT_MAPS,
    block_count,
    quant_state_json,
)
from nf4conv.plan.jobs import PackJob
from nf4conv.plan.rows import Errors
from nf4conv.report.measured import ScaleErrors, TensorDifference, WeightResult, Wrong
from nf4conv.run.device.on_torch.device import TorchDevice, device_of, difference
from nf4conv.run.device.on_torch.packing import piece_errors, read_weights, room_for_absmax
from nf4conv.run.device.on_torch.reading import (
    TORCH_DTYPES,
    read_values,
)
from nf4conv.run.device.protocol import Gathered
from nf4conv.run.loop import Task
from nf4conv.run.pieces import WeightPiece, weight_pieces
from nf4conv.run.worker import Activity, Worker
from nf4conv.sources.cutting import Piece, pieces_of
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit, cut_parts
from nf4conv.sources.tensors import FileRange, TensorInfo, cut_elements

_TIE: Final = 2.0**-18
"""Relative to absmax: how much nearer another code may be, for the rounding of the reciprocal and
of the product, and because FP4's cuts are a few ulp away from the middle.
"""

_NESTED_TIE: Final = 2.0**-14
"""Relative to nested absmax: how much nearer another 8-bit code may be. bitsandbytes on a CPU looks
the codes up in a table of 2^16.
"""


def weight_tasks(result: WeightResult, job: PackJob, piece: int) -> Iterator[Task]:
    """Yields the tasks that compare a weight with what quantizing its source gives."""
    weight = result.weight
    blocksize = weight.format.blocksize
    unit = blocksize * NESTED_BLOCKSIZE
    itemsize = DTYPE_BITS[job.source.dtype] // 8
    most = piece // (itemsize + 1)  # a code and its share of the scales take less than a byte
    pieces = weight_pieces(job, most * itemsize, piece // 4, unit)
    gathered = Gathered(block_count(weight.elements, blocksize), len(pieces))
    for one in pieces:
        yield partial(_compare_weight, result, gathered, one)


def copy_tasks(result: TensorDifference, piece: int) -> Iterator[Task]:
    """Yields the tasks that compare a tensor that is not packed with that of its source."""
    source = result.a
    if source.encoding is None:
        most = piece * 8 // (DTYPE_BITS[result.b.dtype] + DTYPE_BITS[source.dtype])
    else:
        most = piece // 4
    for part in pieces_of(source, most):
        yield partial(_compare_copy, result, part)


def _compare_weight(
    result: WeightResult,
    gathered: Gathered,
    piece: WeightPiece,
    worker: Worker,
) -> None:
    """Compares a piece of a weight's source with what was made of it."""
    device = device_of(worker)
    stored = result.weight
    blocksize = stored.format.blocksize
    stop = piece.start + piece.elements
    parts = cut_parts(dict(stored.parts), blocksize, piece.start, stop)
    [weight], raws = read_weights(device, [piece], DTYPES[stored.format.dtype], _ranges(parts))
    packed, state = _stored_piece(stored, parts, raws)
    with device.timed(Activity.COMPUTE):
        absmax = room_for_absmax(piece, blocksize, gathered, weight.device)
        if stored.format.scales == "calibrated":
            errors = _compare_calibrated(weight, packed, state)
        else:
            errors = _compare_piece(weight, packed, state, absmax, stored.format.scales)
    result.add_piece(piece.start, errors)
    if gathered.count_piece():
        result.scales = _compare_scales(device, stored, gathered.take())


def _ranges(parts: Mapping[str, TensorInfo]) -> list[FileRange]:
    return [part.file_range for part in parts.values()]


def _stored_piece(
    weight: Bitsandbytes4bit, parts: Mapping[str, TensorInfo], raws: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, QuantState]:
    """Returns the codes of a piece and their state, whose shape is that of the whole weight."""
    tensors: dict[str, Any] = {}
    for (role, part), raw in zip(parts.items(), raws, strict=True):
        tensors[role] = raw.view(TORCH_DTYPES[part.dtype])
    packed = tensors.pop("values")
    dtype = DTYPES[weight.format.dtype]
    return packed, described_state(**tensors, **weight.arguments, dtype=dtype)


def _compare_calibrated(weight: torch.Tensor, packed: torch.Tensor, state: QuantState) -> Errors:
    """Compares a piece with what it was calibrated from.

    Calibration moves codes away from their own weights, to make up for the errors of others: none
    of them is wrong for being far, and no second rounding tells which are right.
    """
    decoding = decoding_of(state)._replace(scales="search")
    sums = backend(weight.device).error_sums(weight, packed, decoding)
    return replace(piece_errors(sums), outside=0)


def _compare_piece(
    weight: torch.Tensor, packed: torch.Tensor, state: QuantState, absmax: torch.Tensor, scales: str
) -> Errors:
    """Compares a piece with what it was made from; writes the absmax, or searched scales, that it
    should have.
    """
    expected = torch.empty_like(packed)
    functions = backend(weight.device)
    form = (state.quant_type, state.blocksize, scales == "search")
    functions.quantize_blocks(weight, expected, absmax, *form)
    sums = functions.error_sums(weight, packed, decoding_of(state)._replace(scales=scales))
    unequal = packed != expected
    differing = int(unequal.sum())
    not_nearest = 0
    if differing:
        places = unequal.nonzero().view(-1)
        not_nearest = _count_not_nearest(weight, packed, expected, places, state, absmax)
    return piece_errors(sums, differing, not_nearest)


def _count_not_nearest(
    weight: torch.Tensor,
    packed: torch.Tensor,
    expected: torch.Tensor,
    places: torch.Tensor,
    state: QuantState,
    absmax: torch.Tensor,
) -> int:
    """Counts the codes in the bytes at `places` that are farther from the values than expected."""
    values = decoded_values(state.quant_type, weight.device)
    total = 0
    for shift, odd in ((4, 0), (0, 1)):  # the even element is in the high nibble
        elements = 2 * places + odd
        inside = elements < weight.numel()
        elements, found = elements[inside], places[inside]
        scale = absmax[elements // state.blocksize]
        original = weight[elements].float()
        mine = (packed[found] >> shift) & 15
        best = (expected[found] >> shift) & 15
        far = (original - values[mine.int()] * scale).abs()
        near = (original - values[best.int()] * scale).abs()
        total += int((far > near + _TIE * scale.abs() + SMALLEST_NORMAL).sum())
    return total


def _compare_scales(
    device: TorchDevice, weight: Bitsandbytes4bit, absmax: torch.Tensor
) -> ScaleErrors:
    """Compares the components of a weight beside its codes with those that its source gives, whose
    absmax are [blocks] float32.
    """
    parts = dict(weight.parts)
    parts["values"] = parts["values"]._replace(dtype="U8", stop=parts["values"].start)
    raws = device.read(_ranges(parts))
    _, state = _stored_piece(weight, parts, raws)
    with device.timed(Activity.COMPUTE):
        offset = weight.nested_offset
        wrong = {}
        expected = {}
        if weight.format.scales == "calibrated":
            pass  # no second rounding tells which scales are right
        elif state.state2 is None:
            wrong = {"absmax": _unlike(state.absmax, absmax)}
            expected["absmax"] = absmax
        else:
            wrong = _wrong_nested(absmax, state)
            codes, mean, state2 = compress_absmax(absmax)
            expected = {"absmax": codes, "nested_absmax": state2.absmax}
            offset = float(mean.item())
        expected |= _expected_descriptions(weight, offset)
        stored = dict(zip(parts, raws, strict=True))
        if weight.blob is not None:  # it may not be on disk yet
            stored["quant_state"] = _vector(weight.blob)
        differing = {}
        for role, right in expected.items():
            if role in stored:
                differing[role] = _count_differing(stored[role], right)
        found = {}
        for role, mask in wrong.items():
            count = int(mask.sum())
            if count:
                found[role] = Wrong(count, int(mask.int().argmax()))
        return ScaleErrors(found, differing)


def _expected_descriptions(
    weight: Bitsandbytes4bit, offset: float | None
) -> dict[str, torch.Tensor]:
    """Returns the code maps and the JSON blob that we write."""
    return {
        "quant_map": _vector(QUANT_MAPS[weight.format.quant_type]),
        "nested_quant_map": _vector(NESTED_QUANT_MAP),
        "quant_state": _vector(quant_state_json(weight.format, weight.shape, offset)),
    }


def _vector(content: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _count_differing(stored: torch.Tensor, expected: torch.Tensor) -> int:
    """Counts the bytes that are not the expected ones, and those that there are too many or few."""
    right = expected.view(torch.uint8)
    right = right.to(stored.device)
    common = min(stored.numel(), right.numel())
    differing = int((stored[:common] != right[:common]).sum())
    return differing + abs(stored.numel() - right.numel())


def _unlike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Tells which values of two float32 tensors are unlike; subnormal numbers may be flushed."""
    return (a != b) & ~((a - b).abs() < SMALLEST_NORMAL)


def _wrong_nested(absmax: torch.Tensor, state: QuantState) -> dict[str, torch.Tensor]:
    """Tells which 8-bit codes and which nested absmax do not follow from the source's absmax and
    the stored offset.
    """
    assert state.state2 is not None
    assert state.offset is not None
    centred = absmax - state.offset
    padding = -centred.numel() % NESTED_BLOCKSIZE
    blocks = torch.nn.functional.pad(centred, (0, padding)).view(-1, NESTED_BLOCKSIZE)
    largest = blocks.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(dim=1)
    nested = state.state2.absmax
    scales = nested.repeat_interleave(NESTED_BLOCKSIZE)
    scaled = centred / scales[: centred.numel()]
    values = state.state2.code
    middles = (values[:-1] + values[1:]) / 2
    nearest = torch.bucketize(scaled.nan_to_num(nan=-2.0), middles)
    far = (scaled - values[state.absmax.int()]).abs()
    near = (scaled - values[nearest]).abs()
    return {"absmax": far > near + _NESTED_TIE, "nested_absmax": _unlike(largest, nested)}


def _compare_copy(result: TensorDifference, piece: Piece, worker: Worker) -> None:
    """Compares a tensor that is not packed, or a piece of it, with that of its source."""
    device = device_of(worker)
    source, start = piece
    stored = cut_elements(result.b, start, start + source.elements)
    if source.encoding is not None:
        original = read_values(device, source).to(TORCH_DTYPES[stored.dtype]).clone()
        [found] = device.read([stored.file_range])
    else:
        found, original = device.read([stored.file_range, source.file_range])
    with device.timed(Activity.COMPUTE):
        if source.encoding is None and source.dtype != stored.dtype:
            original = original.view(TORCH_DTYPES[source.dtype]).to(TORCH_DTYPES[stored.dtype])
        size = max(DTYPE_BITS[stored.dtype] // 8, 1)
        expected = original.view(torch.uint8).view(-1, size)
        differing = int((found.view(-1, size) != expected).any(dim=1).sum())
        largest = 0.0
        if differing and stored.dtype in FLOAT_TAGS:
            dtype = TORCH_DTYPES[stored.dtype]
            largest = difference(found.view(dtype), expected.flatten().view(dtype)).largest
    result.add_piece(start, Errors(0.0, 0.0, largest, differing))
