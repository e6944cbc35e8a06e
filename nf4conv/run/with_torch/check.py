"""Verification as pipeline tasks: read what is stored and what it was made from, decode, compare,
count.

A packed weight is compared in three ways at once: the error of its values; its codes and scales
against those that quantizing the source gives; and, where a code differs, whether it is as near to
the value, as rounding and ties allow.
"""

import json
import math
import operator
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Final

import torch

from nf4conv.check.pairing import Pairs
from nf4conv.choose.unchanged import stored_format
from nf4conv.codec.backends import backend, encoder
from nf4conv.codec.error_sums import NESTED_ERROR, SMALLEST_NORMAL
from nf4conv.codec.ops import compress_absmax
from nf4conv.codec.quant_state import DTYPES, QuantState, decoding_of
from nf4conv.codec.reference.dequantize import decoded_absmax, decoded_values
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP, NESTED_BLOCKSIZE
from nf4conv.format.layout import QUANT_STATE_PREFIX, block_count, quant_state_json
from nf4conv.plan.jobs import PackJob
from nf4conv.report.measured import (
    CopyResult,
    PieceErrors,
    ScaleErrors,
    TensorDifference,
    WeightResult,
)
from nf4conv.run.loop import Activity, Task
from nf4conv.run.same_bytes import byte_tasks
from nf4conv.run.shards import Gathered, pieces_of, weight_pieces
from nf4conv.run.with_torch.pack import part_of
from nf4conv.run.with_torch.reading import TORCH_DTYPES, packed_piece, read_matrix, read_values
from nf4conv.run.with_torch.worker import TorchWorker
from nf4conv.sources.encodings.pieces import Piece, cut_elements, cut_parts, packed_spans
from nf4conv.sources.stored_weights import StoredWeight
from nf4conv.sources.tensors import DTYPE_BITS, FileRange, TensorInfo

_TIE: Final = 2.0**-18
"""Relative to absmax: how much nearer another code may be, for the rounding of the reciprocal and
of the product, and because FP4's cuts are a few ulp away from the middle.
"""

_KEPT_PARTS: Final = ("values", "absmax", "nested_absmax", "nested_quant_map")
"""What is copied of a weight that stays as it is."""

_NESTED_TIE: Final = 2.0**-14
"""Relative to nested absmax: how much nearer another 8-bit code may be. bitsandbytes on a CPU looks
the codes up in a table of 2^16.
"""


def scale_tasks(results: dict[str, WeightResult], piece: int) -> Iterator[Task[TorchWorker]]:
    """A look at the scales of every weight, which needs no source."""
    for result in results.values():
        weight = result.weight
        blocksize = weight.format.blocksize
        for start, stop in packed_spans(weight.elements, blocksize, piece // 4 * blocksize):
            yield partial(_check_scales, result, start, stop)


def tasks_of_weight(result: WeightResult, job: PackJob, piece: int) -> Iterator[Task[TorchWorker]]:
    """The comparison of one packed weight, in pieces of so many bytes."""
    mine, source = result.weight.format, stored_format(job.source)
    if source is not None and source.decodes_like(mine):
        yield partial(_compare_stored, result, job, piece)
    else:
        yield from _computed(result, job, piece)


def _computed(result: WeightResult, job: PackJob, piece: int) -> Iterator[Task[TorchWorker]]:
    """The comparison with what quantizing the source gives."""
    weight = result.weight
    blocksize = weight.format.blocksize
    unit, itemsize = blocksize * NESTED_BLOCKSIZE, DTYPE_BITS[job.source.dtype] // 8
    most = piece // (itemsize + 1)  # a code and its share of the scales take less than a byte
    pieces = weight_pieces(job, most * itemsize, piece // 4, unit)
    whole = job.is_cut_out and len(pieces) <= 1
    absmax: Gathered[torch.Tensor] = Gathered(
        block_count(weight.elements, blocksize), 1 if whole else len(pieces)
    )
    yield from (
        partial(_compare_weight, result, job, absmax, part)
        for part in ([None] if whole else pieces)
    )


def copy_tasks(
    pairs: Pairs, results: dict[str, CopyResult], piece: int
) -> Iterator[Task[TorchWorker]]:
    """The comparison of every other tensor with its source."""
    for stored, source in pairs.copies:
        bits = DTYPE_BITS[stored.dtype] + DTYPE_BITS[source.dtype]
        most = piece * 8 // bits if source.encoding is None else piece // 4
        yield from (
            partial(compare_copy, results[stored.name], part) for part in pieces_of(source, most)
        )


def _check_scales(result: WeightResult, start: int, stop: int, worker: TorchWorker) -> None:
    """Whether the scales of elements start … stop are finite and, if they were not searched, not
    negative.
    """
    weight = result.weight
    parts = cut_parts(weight.parts(), weight.format.blocksize, start, stop)
    parts["values"] = parts["values"]._replace(stop=parts["values"].start)
    _, state = _stored_piece(weight, parts, worker.read(_ranges(parts)))
    with worker.timed(Activity.COMPUTE):
        scales, allowed = decoded_absmax(decoding_of(state)), torch.zeros((), device=worker.device)
        if state.state2 is not None:
            allowed = (
                NESTED_ERROR * state.state2.absmax.max()
            )  # a block of zeros may decode to less than zero
        improper = ~torch.isfinite(scales)
        if weight.format.scales == "absmax":
            improper |= scales < -allowed
        result.add_improper(int(improper.sum()))


def _compare_stored(result: WeightResult, job: PackJob, piece: int, worker: TorchWorker) -> None:
    """A packed weight and its source, which is in the same format: its bytes, or if they differ its
    values.
    """
    assert job.source.encoding is not None
    mine, theirs = result.weight.parts(), dict(job.source.encoding.parts)
    differences = [
        TensorDifference(mine[role], theirs[role]) for role in _KEPT_PARTS if role in theirs
    ]
    for task in byte_tasks(differences, piece):
        task(worker)
    first = _nested_offset(worker, mine, result.weight.blob)
    second = _nested_offset(worker, theirs, None)
    if first == second and not any(difference.is_identical is False for difference in differences):
        result.add_piece(0, PieceErrors(0.0, 0.0, 0.0, 0.0, 0, 0, 0))
        result.scales = ScaleErrors()
        return
    for computed in _computed(result, job, piece):
        computed(worker)


def _nested_offset(
    worker: TorchWorker, parts: Mapping[str, TensorInfo], blob: bytes | None
) -> object:
    if blob is None:
        part = next(part for role, part in parts.items() if role.startswith(QUANT_STATE_PREFIX))
        blob = worker.read([part.file_range])[0].cpu().numpy().tobytes()
    return json.loads(blob).get("nested_offset")


def _compare_weight(
    result: WeightResult,
    job: PackJob,
    gathered: Gathered[torch.Tensor],
    source: Piece | None,
    worker: TorchWorker,
) -> None:
    """A piece of a weight's source, None if it is taken whole, and what has become of it."""
    stored = result.weight
    start = 0 if source is None else source.start
    stop = start + (stored.elements if source is None else source.tensor.elements)
    blocksize = stored.format.blocksize
    parts = cut_parts(stored.parts(), blocksize, start, stop)
    weight, packed, state = _read_both(worker, stored, job, source, parts)
    with worker.timed(Activity.COMPUTE):
        absmax = part_of(gathered, start // blocksize, block_count(stop, blocksize), worker.device)
        errors = _compare_piece(weight, packed, state, absmax, stored.format.scales)
    result.add_piece(start, errors)
    whole = gathered.done()
    if whole is not None:
        result.scales = _compare_scales(worker, stored, whole)


def _read_both(
    worker: TorchWorker,
    stored: StoredWeight,
    job: PackJob,
    source: Piece | None,
    parts: Mapping[str, TensorInfo],
) -> tuple[torch.Tensor, torch.Tensor, QuantState]:
    """The source cast to what was packed, the codes, and their state."""
    ranges, dtype = _ranges(parts), DTYPES[stored.format.dtype]
    if source is None:
        weight = read_matrix(worker, job, dtype).clone()  # the next read reuses the buffer
    elif source.tensor.encoding is not None:
        weight = read_values(worker, source.tensor).to(dtype)
    else:
        first, *raws = worker.read([source.tensor.file_range, *ranges])
        with worker.timed(Activity.COMPUTE):
            weight = first.view(TORCH_DTYPES[source.tensor.dtype]).to(dtype)
        return weight, *_stored_piece(stored, parts, raws)
    return weight, *_stored_piece(stored, parts, worker.read(ranges))


def _ranges(parts: Mapping[str, TensorInfo]) -> list[FileRange]:
    return [part.file_range for part in parts.values()]


def _stored_piece(
    weight: StoredWeight, parts: Mapping[str, TensorInfo], raws: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, QuantState]:
    """As `packed_piece`, also of a weight whose blob is not on disk yet."""
    if weight.blob is None:
        return packed_piece(parts, raws)
    suffix, blob = f"{QUANT_STATE_PREFIX}{weight.format.quant_type}", bytearray(weight.blob)
    described = weight.values._replace(dtype="U8", shape=(len(blob),))
    return packed_piece(
        {**parts, suffix: described}, [*raws, torch.frombuffer(blob, dtype=torch.uint8)]
    )


def _compare_piece(
    weight: torch.Tensor, packed: torch.Tensor, state: QuantState, absmax: torch.Tensor, scales: str
) -> PieceErrors:
    """Compare a piece with what it was made from; writes the absmax, or searched scales, that it
    should have.
    """
    expected = torch.empty_like(packed)
    encoder(weight.device, scales)(weight, expected, absmax, state.quant_type, state.blocksize)
    sums = backend(weight.device).error_sums(
        weight, packed, decoding_of(state)._replace(scales=scales)
    )
    figures = {field.name: getattr(sums, field.name).double() for field in fields(sums)}
    figures["differing"] = (packed != expected).sum().double()
    found = dict(
        zip(figures, torch.stack(list(figures.values())).tolist(), strict=True)
    )  # waits for the device once
    differing, not_nearest = int(found["differing"]), 0
    if differing:
        places = (packed != expected).nonzero().view(-1)
        not_nearest = _count_not_nearest(weight, packed, expected, places, state, absmax)
    return PieceErrors(
        **found
        | {"outside": int(found["outside"]), "differing": differing, "not_nearest": not_nearest}
    )


def _count_not_nearest(
    weight: torch.Tensor,
    packed: torch.Tensor,
    expected: torch.Tensor,
    places: torch.Tensor,
    state: QuantState,
    absmax: torch.Tensor,
) -> int:
    """How many of the codes in the bytes at `places` are farther from their values than the
    expected ones.
    """
    values = decoded_values(state.quant_type, weight.device)
    total = 0
    for shift, odd in ((4, 0), (0, 1)):  # the even element is in the high nibble
        elements = 2 * places + odd
        inside = elements < weight.numel()
        elements, found = elements[inside], places[inside]
        scale = absmax[elements // state.blocksize]
        original = weight[elements].float()
        far = (original - values[((packed[found] >> shift) & 15).int()] * scale).abs()
        near = (original - values[((expected[found] >> shift) & 15).int()] * scale).abs()
        total += int((far > near + _TIE * scale.abs() + SMALLEST_NORMAL).sum())
    return total


def _compare_scales(worker: TorchWorker, weight: StoredWeight, absmax: torch.Tensor) -> ScaleErrors:
    """Compare the scales of a weight as it is stored with the absmax of its source, [blocks]
    float32.
    """
    parts = weight.parts()
    parts["values"] = parts["values"]._replace(dtype="U8", stop=parts["values"].start)
    raws = worker.read(_ranges(parts))
    _, state = _stored_piece(weight, parts, raws)
    with worker.timed(Activity.COMPUTE):
        if state.state2 is None or state.offset is None:
            differing = int((state.absmax.view(torch.int32) != absmax.view(torch.int32)).sum())
            wrong = (state.absmax != absmax) & ~((state.absmax - absmax).abs() < SMALLEST_NORMAL)
            return ScaleErrors(
                *_count(wrong), 0, differing, _count_described(weight, parts, raws, None)
            )
        wrong, wrong_nested = _wrong_nested(absmax, state)
        codes, offset, state2 = compress_absmax(absmax)
        differing = int((codes != state.absmax).sum()) + int(
            (state2.absmax != state.state2.absmax).sum()
        )
        differing += int(offset.view(torch.int32) != state.offset.view(torch.int32))
        described = _count_described(weight, parts, raws, float(offset.item()))
        return ScaleErrors(*_count(wrong), int(wrong_nested.sum()), differing, described)


def _count_described(
    weight: StoredWeight,
    parts: Mapping[str, TensorInfo],
    raws: Sequence[torch.Tensor],
    offset: float | None,
) -> int:
    """How many bytes of a weight's code maps and JSON blob, as far as they are on disk, are not
    those that we write.
    """
    quant_type = weight.format.quant_type
    expected = {
        "quant_map": struct.pack("<16f", *CODEBOOKS[quant_type].values),
        "nested_quant_map": struct.pack("<256f", *DYNAMIC_MAP),
        f"{QUANT_STATE_PREFIX}{quant_type}": quant_state_json(weight.format, weight.shape, offset),
    }
    found = {
        role: raw.cpu().numpy().tobytes()
        for role, raw in zip(parts, raws, strict=True)
        if role in expected
    }
    pairs = ((stored, expected[role]) for role, stored in found.items())
    return sum(
        sum(map(operator.ne, stored, right)) + abs(len(stored) - len(right))
        for stored, right in pairs
    )


def _wrong_nested(absmax: torch.Tensor, state: QuantState) -> tuple[torch.Tensor, torch.Tensor]:
    """Which 8-bit codes, and which nested absmax, do not follow from the source's absmax and the
    stored offset.
    """
    assert state.state2 is not None
    assert state.offset is not None
    centred = absmax - state.offset
    padded = torch.nn.functional.pad(centred, (0, -centred.numel() % NESTED_BLOCKSIZE)).view(
        -1, NESTED_BLOCKSIZE
    )
    largest = padded.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(dim=1)
    nested = state.state2.absmax
    wrong_nested = (largest != nested) & ~((largest - nested).abs() < SMALLEST_NORMAL)
    scaled = centred / nested.repeat_interleave(NESTED_BLOCKSIZE)[: centred.numel()]
    values = state.state2.code
    nearest = torch.bucketize(scaled.nan_to_num(nan=-2.0), (values[:-1] + values[1:]) / 2)
    far = (scaled - values[state.absmax.int()]).abs()
    near = (scaled - values[nearest]).abs()
    return far > near + _NESTED_TIE, wrong_nested


def _count(wrong: torch.Tensor) -> tuple[int, int]:
    """How many are, and the index of the first."""
    count = int(wrong.sum())
    return count, int(wrong.int().argmax()) if count else 0


def compare_copy(result: CopyResult, piece: Piece, worker: TorchWorker) -> None:
    """A tensor that is not packed, or a piece of it, and that of its source."""
    source, start = piece
    stored = cut_elements(result.tensor, start, start + source.elements)
    if source.encoding is not None:
        original = read_values(worker, source).to(TORCH_DTYPES[stored.dtype]).clone()
        [found] = worker.read([stored.file_range])
    else:
        found, original = worker.read([stored.file_range, source.file_range])
    with worker.timed(Activity.COMPUTE):
        if source.encoding is None and source.dtype != stored.dtype:
            original = original.view(TORCH_DTYPES[source.dtype]).to(TORCH_DTYPES[stored.dtype])
        size = max(DTYPE_BITS[stored.dtype] // 8, 1)
        expected = original.view(torch.uint8).view(-1, size)
        result.add(int((found.view(-1, size) != expected).any(dim=1).sum()))
