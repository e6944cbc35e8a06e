"""Weights packed to 4 bits with torch, and what is measured of them."""

from collections.abc import Mapping, Sequence

import torch

from nf4conv.codec.backends import backend
from nf4conv.codec.ops import compress_absmax
from nf4conv.codec.quant_state import DTYPES, Decoding, code_table
from nf4conv.format.layout import Format, block_count
from nf4conv.plan.rows import Errors
from nf4conv.run.device.on_torch.buffers import TorchBuffers
from nf4conv.run.device.on_torch.reading import TORCH_DTYPES, read_matrix, read_values
from nf4conv.run.device.protocol import Gathered, NonFiniteError, Packed, Scales
from nf4conv.run.pieces import WeightPiece, scale_ranges
from nf4conv.run.worker import Activity
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.tensors import FileRange


def pack(
    device: TorchBuffers,
    pieces: Sequence[WeightPiece],
    format: Format,
    gathered: Gathered | None,
    stored: Sequence[Bitsandbytes4bit],
) -> Packed:
    """Packs weights, or a piece of a large one, as device/protocol.py says."""
    scales_read = [scale_ranges(*pair) for pair in zip(stored, pieces, strict=False)]
    ranges = [file_range for of_weight in scales_read for file_range in of_weight.values()]
    weights, raws = read_weights(device, pieces, DTYPES[format.dtype], ranges)
    found = iter(raws)
    scales = [{role: next(found) for role in of_weight} for of_weight in scales_read]
    with device.timed(Activity.COMPUTE):
        _check_finite(pieces, weights)
        codes = []
        all_absmax = []
        for piece, weight in zip(pieces, weights, strict=True):
            absmax = room_for_absmax(piece, format.blocksize, gathered, weight.device)
            packed = torch.empty(-(-weight.numel() // 2), dtype=torch.uint8, device=weight.device)
            backend(weight.device).quantize_blocks(
                weight,
                packed,
                absmax,
                format.quant_type,
                format.blocksize,
                format.scales == "search",
            )
            codes.append(packed)
            all_absmax.append(absmax)
        errors = []
        for weight, packed, of_weight, kept in zip(weights, codes, stored, scales, strict=False):
            errors.append(_measure(weight, packed, format, of_weight, kept))
        together = _joined(codes)
        if gathered is not None:
            [fetched] = device.fetch([together])
            return Packed(fetched, None, errors)
        [fetched], scales_made = _fetch(device, [together], all_absmax, format)
        return Packed(fetched, scales_made, errors)


def compress(device: TorchBuffers, gathered: Gathered, format: Format) -> Scales:
    """Returns the scales of a large weight, whose absmax has gathered on the device."""
    with device.timed(Activity.COMPUTE):
        _, scales = _fetch(device, [], [gathered.take()], format)
        return scales


def _fetch(
    device: TorchBuffers,
    codes: Sequence[torch.Tensor],
    all_absmax: Sequence[torch.Tensor],
    format: Format,
) -> tuple[list[memoryview], Scales]:
    """Brings codes, and what is stored of the absmax of weights together, to the host."""
    if not format.double_quant:
        *fetched, absmax = device.fetch([*codes, _joined(all_absmax)])
        return fetched, Scales(absmax, None, None)
    compressed = [compress_absmax(absmax) for absmax in all_absmax]
    offsets = torch.stack([offset for _, offset, _ in compressed]).tolist()
    absmax_codes = _joined([of_weight for of_weight, _, _ in compressed])
    nested = _joined([state2.absmax for _, _, state2 in compressed])
    *fetched, absmax, nested_absmax = device.fetch([*codes, absmax_codes, nested])
    return fetched, Scales(absmax, nested_absmax, offsets)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(list(tensors))


def room_for_absmax(
    piece: WeightPiece, blocksize: int, gathered: Gathered | None, device: torch.device
) -> torch.Tensor:
    """Returns where the absmax of a whole weight is written, or of a piece of one: float32."""
    first = piece.start // blocksize
    last = block_count(piece.start + piece.elements, blocksize)

    def allocate(blocks: int) -> torch.Tensor:
        return torch.empty(blocks, dtype=torch.float32, device=device)

    if gathered is None:
        return allocate(last)
    whole: torch.Tensor = gathered.memory(allocate)
    return whole[first:last]


def _check_finite(pieces: Sequence[WeightPiece], weights: Sequence[torch.Tensor]) -> None:
    """Raises a NonFiniteError if a weight holds NaN or infinity."""
    # A sum is NaN or infinite if any term is; a finite weight whose sum overflows is looked at
    # again. In another dtype than the weight's, torch would sum a copy.
    sums = torch.stack([weight.sum() for weight in weights])
    if bool(torch.isfinite(sums).all()):
        return
    for piece, weight in zip(pieces, weights, strict=True):
        if not bool(torch.isfinite(weight).all()):
            raise NonFiniteError(piece.job)


def read_weights(
    device: TorchBuffers,
    pieces: Sequence[WeightPiece],
    dtype: torch.dtype,
    ranges: Sequence[FileRange],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Reads weights, flat and in the dtype that is packed, and the bytes of ranges beside them."""
    first = pieces[0]
    if first.tensor is None or first.tensor.encoding is not None:
        weights = [_read_decoded(device, piece, dtype) for piece in pieces]
        if not ranges:
            return weights, []
        # the next read reuses the buffer
        return [weight.clone() for weight in weights], device.read(ranges)
    tensors = [piece.tensor for piece in pieces if piece.tensor is not None]
    raws = device.read([*(tensor.file_range for tensor in tensors), *ranges])
    with device.timed(Activity.COMPUTE):
        weights = []
        for tensor, raw in zip(tensors, raws, strict=False):
            weights.append(raw.view(TORCH_DTYPES[tensor.dtype]).to(dtype))
    return weights, raws[len(tensors) :]


def _read_decoded(device: TorchBuffers, piece: WeightPiece, dtype: torch.dtype) -> torch.Tensor:
    if piece.tensor is None:
        return read_matrix(device, piece.job, dtype)
    return read_values(device, piece.tensor).to(dtype)


def _measure(
    weight: torch.Tensor,
    codes: torch.Tensor,
    format: Format,
    stored: Bitsandbytes4bit,
    scales: Mapping[str, torch.Tensor],
) -> Errors:
    """Measures the errors of codes, which count as right, decoded with stored scales."""
    absmax = scales["absmax"]
    nested = table = offset = None
    if stored.nested_offset is None:
        absmax = absmax.view(torch.float32)
    else:
        nested = scales["nested_absmax"].view(torch.float32)
        table = code_table("dynamic", weight.device)
        offset = torch.tensor(stored.nested_offset, dtype=torch.float32, device=weight.device)
    form = (format.quant_type, format.blocksize)
    decoding = Decoding(absmax, *form, nested, table, offset, stored.format.scales)
    sums = backend(weight.device).error_sums(weight, codes, decoding)
    return piece_errors(sums)


def piece_errors(sums: torch.Tensor, differing: int = 0, not_nearest: int = 0) -> Errors:
    """Brings the error sums of a piece to the host; waits for the device once."""
    squared_error, squared_weight, largest, relative, outside = sums.tolist()
    return Errors(
        squared_error, squared_weight, largest, differing, relative, int(outside), not_nearest
    )
