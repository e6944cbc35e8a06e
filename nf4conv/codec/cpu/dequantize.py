"""Packed codes → weight."""

from functools import cache
from typing import Final

import torch

from nf4conv.codec import reference
from nf4conv.codec.cpu.threads import THREAD_CHUNK, share
from nf4conv.codec.quant_state import Decoding
from nf4conv.codec.reference.dequantize import CHUNK, decoded_absmax, decoded_values
from nf4conv.format.codebook import NESTED_BLOCKSIZE


def pair_table(values: torch.Tensor) -> torch.Tensor:
    """Returns [256] int64 words: for each byte the values of its two codes, of [16] float32."""
    return torch.cartesian_prod(values, values).view(torch.int64).view(-1)


@cache
def value_pairs(quant_type: str) -> torch.Tensor:
    """Returns [256] int64 words: the two float32 values of each byte's codes, before absmax."""
    return pair_table(decoded_values(quant_type, torch.device("cpu")))


def are_between(scales: torch.Tensor, least: float, most: float) -> bool:
    """Returns True if every magnitude is zero, or at least `least` and below `most`; NaN is not."""
    magnitudes = scales.abs()
    return bool(((magnitudes == 0) | (magnitudes >= least) & (magnitudes < most)).all())


_CHUNK_ALONE: Final = 1 << 17
"""Elements decoded at a time where torch has one thread: 0.8 MB of temporaries."""

_MIN_SCALE: Final = 2.0**-100  # times the smallest code value it is still no denormal


def dequantize_blocks(packed: torch.Tensor, decoding: Decoding, out: torch.Tensor) -> None:
    """Decodes a packed weight, as `reference.dequantize_blocks` does."""
    packed, out = packed.view(-1), out.view(-1)
    blocksize = decoding.blocksize
    piece_size = CHUNK * blocksize  # the scales of a piece are decoded together

    def dequantize_range(start: int, stop: int) -> None:
        step = _CHUNK_ALONE if torch.get_num_threads() == 1 else CHUNK
        values = torch.empty(min(step, stop - start), dtype=torch.float32, device="cpu")
        indices = torch.empty(values.numel() // 2, dtype=torch.int32, device="cpu")
        for at in range(start, stop, piece_size):
            end = min(at + piece_size, stop)
            piece = decoding_of_blocks(decoding, at // blocksize, -(-end // blocksize))
            _decode_piece(packed[at // 2 : (end + 1) // 2], piece, out[at:end], values, indices)

    share(out.numel(), max(THREAD_CHUNK, NESTED_BLOCKSIZE * blocksize), dequantize_range)


def decoding_of_blocks(decoding: Decoding, first: int, last: int) -> Decoding:
    """Returns what decodes blocks first … last - 1; `first` begins a nested block."""
    nested_absmax = decoding.nested_absmax
    if nested_absmax is not None:
        nested_absmax = nested_absmax[first // NESTED_BLOCKSIZE : -(-last // NESTED_BLOCKSIZE)]
    return decoding._replace(absmax=decoding.absmax[first:last], nested_absmax=nested_absmax)


def _decode_piece(
    packed: torch.Tensor,
    decoding: Decoding,
    out: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    """Decodes consecutive blocks; special ones, and a partial last one, are left to the reference.
    `values` and `indices` are temporaries for the elements, and the pairs of them, decoded at a
    time.
    """
    blocksize = decoding.blocksize
    scales = decoded_absmax(decoding)
    whole = 0
    if are_between(scales, _MIN_SCALE, torch.inf):
        # whatever its code, no value is NaN, infinite or flushed to zero
        whole = out.numel() - out.numel() % blocksize
    pairs = value_pairs(decoding.quant_type)
    for at in range(0, whole, values.numel()):
        end = min(at + values.numel(), whole)
        found = indices[: (end - at) // 2].copy_(packed[at // 2 : end // 2])
        decoded = values[: end - at]
        torch.index_select(pairs, 0, found, out=decoded.view(torch.int64))
        decoded.view(-1, blocksize).mul_(scales[at // blocksize : end // blocksize, None])
        out[at:end].copy_(decoded)
    if whole < out.numel():
        rest = scales[whole // blocksize :]
        plain = Decoding(rest, decoding.quant_type, blocksize)
        reference.dequantize_blocks(packed[whole // 2 :], plain, out[whole:])
