"""The operations of `reference.py` as a CPU does them fastest: the same bytes, tens of times sooner.

A chunk of blocks that fits the cache is worked on at a time. Counting the cuts below every element takes 15
comparisons, which sounds slow and is not: numpy compares and adds a whole vector register at once, about 0.06 ns a
comparison, while any table lookup costs half a nanosecond an element. torch does what numpy lacks: bfloat16, fast row
maxima.

Nothing is flushed to zero here. Where that would matter, the block is *special*: its absmax is outside a range in which
no product can tell the difference, or is NaN or infinite. Special blocks, and a partial last one, go to the reference.

Chunks are independent, so a large tensor is shared by `torch.get_num_threads()` threads: numpy and torch let go of the
interpreter lock while they compute. The lock is why a thread of many takes a larger chunk: to hold it more seldom.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from nf4conv.codec import reference
from nf4conv.codec.codebook import CODEBOOKS, Codebook
from nf4conv.codec.quant_state import NestedState
from nf4conv.codec.reference import compress_absmax as compress_absmax

_CHUNK: Final = 1 << 16
"""Elements worked on at a time by a single thread: 1.5 MB of temporaries."""

_SHARED_CHUNK: Final = 1 << 18
"""The same when several threads take turns at the interpreter lock."""

_MIN_SHARED: Final = 8 * _SHARED_CHUNK
"""Smaller tensors are not worth starting threads for."""

_TINIEST: Final = np.finfo(np.float32).tiny
_MIN_ABSMAX: Final = 2.0**-100  # what is flushed, less than 2^-126, scales to less than 2^-26: no cut is that near 0
_MAX_ABSMAX: Final = 2.0**126  # beyond it the reciprocal is flushed
_MIN_SCALE: Final = 2.0**-100  # times the smallest code value it is still no denormal

_Bytes = npt.NDArray[np.uint8]


def quantize_blocks(
    weight: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, quant_type: str, blocksize: int
) -> None:
    """Quantize a weight in blocks; arguments as `reference.quantize_blocks`."""
    codebook = CODEBOOKS[quant_type]
    elements = weight.numel()
    whole = elements - elements % blocksize

    def quantize_range(start: int, stop: int, chunk: int) -> None:
        scratch = _Scratch.allocate(min(chunk, stop - start), codebook)
        for at in range(start, stop, chunk):
            end = min(at + chunk, stop)
            blocks = weight[at:end].view(-1, blocksize)
            maxima = absmax[at // blocksize : end // blocksize]
            _quantize_chunk(blocks, packed[at // 2 : end // 2], maxima, codebook, scratch)

    _share(whole, quantize_range)
    if whole < elements:
        tail = absmax[whole // blocksize :]
        reference.quantize_blocks(weight[whole:], packed[whole // 2 :], tail, quant_type, blocksize)


def dequantize_blocks(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    state2: NestedState | None,
    offset: torch.Tensor | None,
    out: torch.Tensor,
    quant_type: str,
    blocksize: int,
) -> None:
    """Decode a packed weight; arguments as `reference.dequantize_blocks`."""
    elements = out.numel()
    scales = absmax if state2 is None or offset is None else reference.decode_absmax(absmax, state2, offset)
    whole = elements - elements % blocksize
    magnitudes = scales.abs()
    ordinary = (magnitudes >= _MIN_SCALE) & (magnitudes < torch.inf) | (magnitudes == 0)
    if not ordinary.all():
        whole = 0
    pairs = _pair_table(quant_type)

    def dequantize_range(start: int, stop: int, chunk: int) -> None:
        indices = torch.empty(min(chunk, stop - start) // 2, dtype=torch.int32)
        values = torch.empty(min(chunk, stop - start))
        for at in range(start, stop, chunk):
            end = min(at + chunk, stop)
            count = end - at
            chosen = indices[: count // 2].copy_(packed[at // 2 : end // 2])
            product = values[:count]
            torch.index_select(pairs, 0, chosen, out=product.view(torch.int64))
            product.view(-1, blocksize).mul_(scales[at // blocksize : end // blocksize, None])
            out[at:end].copy_(product)

    _share(whole, dequantize_range)
    if whole < elements:
        tail = scales[whole // blocksize :]
        reference.dequantize_blocks(packed[whole // 2 :], tail, None, None, out[whole:], quant_type, blocksize)


def _share(elements: int, work: Callable[[int, int, int], None]) -> None:
    """Call `work(start, stop, chunk)` so that the ranges cover all elements, in as many threads as torch uses."""
    threads = torch.get_num_threads()
    if threads == 1 or elements < _MIN_SHARED:
        if elements:
            work(0, elements, _CHUNK)
        return
    chunks = -(-elements // _SHARED_CHUNK)
    step = -(-chunks // threads) * _SHARED_CHUNK
    starts = range(0, elements, step)
    with ThreadPoolExecutor(len(starts)) as pool:
        for done in [pool.submit(work, start, min(start + step, elements), _SHARED_CHUNK) for start in starts]:
            done.result()


@dataclass
class _Scratch:
    """The temporaries of one thread, for chunks of up to n elements.

    Attributes:
        values: [n] float32.
        magnitudes: [n] float32.
        hits: [cuts, n] bool: whether an element is above a cut.
        codes: [n] uint8.
    """

    values: torch.Tensor
    magnitudes: torch.Tensor
    hits: npt.NDArray[np.bool_]
    codes: _Bytes

    @classmethod
    def allocate(cls, elements: int, codebook: Codebook) -> "_Scratch":
        return cls(
            values=torch.empty(elements, dtype=torch.float32),
            magnitudes=torch.empty(elements, dtype=torch.float32),
            hits=np.empty((len(codebook.cuts), elements), dtype=np.bool_),
            codes=np.empty(elements, dtype=np.uint8),
        )


def _quantize_chunk(
    blocks: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, codebook: Codebook, scratch: _Scratch
) -> None:
    """Quantize [rows, blocksize] of any float type to [rows * blocksize / 2] bytes and [rows] absmax."""
    values = scratch.values[: blocks.numel()].view(blocks.shape).copy_(blocks)
    magnitudes = scratch.magnitudes[: blocks.numel()].view(blocks.shape)
    torch.abs(values, out=magnitudes)
    torch.amax(magnitudes, dim=1, out=absmax)
    reciprocals = absmax.reciprocal()[:, None]
    if codebook.signed_cuts:
        codes = _count_cuts(values.mul_(reciprocals), codebook, scratch)
        packed.numpy()[:] = _pair_nibbles(codes)
    else:
        codes = _count_cuts(magnitudes.mul_(reciprocals), codebook, scratch)
        codes += _is_negative(values, magnitudes).view(np.uint8) << 3
        np.take(_pair_ranks(codebook), _pair_nibbles(codes), out=packed.numpy(), mode="clip")
    special = ~((absmax >= _MIN_ABSMAX) & (absmax <= _MAX_ABSMAX))
    if special.any():
        _quantize_special(blocks, packed, absmax, special, codebook.quant_type)


def _count_cuts(scaled: torch.Tensor, codebook: Codebook, scratch: _Scratch) -> _Bytes:
    """[n] uint8: the number of cuts below each value."""
    cuts = np.array(codebook.cuts, dtype=np.float32)[:, None]
    hits = scratch.hits[:, : scaled.numel()]
    np.greater(scaled.view(-1).numpy(), cuts, out=hits)
    return np.add.reduce(hits.view(np.uint8), axis=0, dtype=np.uint8, out=scratch.codes[: scaled.numel()])


def _is_negative(values: torch.Tensor, scaled_magnitudes: torch.Tensor) -> npt.NDArray[np.bool_]:
    """[n] bool: whether an element is below zero, and neither it nor its scaled value is flushed to zero."""
    negative: npt.NDArray[np.bool_] = values.view(-1).numpy() <= -_TINIEST
    negative &= scaled_magnitudes.view(-1).numpy() >= _TINIEST
    return negative


def _pair_nibbles(codes: _Bytes) -> _Bytes:
    """[n] codes → [n / 2] bytes, a strided view; the even code becomes the high nibble. Overwrites `codes`."""
    pairs = codes.view("<u2")  # even + 256 · odd
    pairs *= 0x1001  # its high byte is now odd + 16 · even
    return codes[1::2]


@cache
def _pair_ranks(codebook: Codebook) -> _Bytes:
    """[256] uint8: from two nibbles of cut counts, plus 8 for a negative element, to two codes."""
    nibbles = [*codebook.ranks, *(rank + 8 for rank in codebook.ranks)]
    return np.array([high << 4 | low for high in nibbles for low in nibbles], dtype=np.uint8)


def _quantize_special(
    blocks: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, special: torch.Tensor, quant_type: str
) -> None:
    """Write the special blocks over again, as the reference has them."""
    rows, blocksize = blocks[special].shape
    bytes_again = torch.empty(rows * blocksize // 2, dtype=torch.uint8)
    absmax_again = torch.empty(rows, dtype=torch.float32)
    reference.quantize_blocks(blocks[special].view(-1), bytes_again, absmax_again, quant_type, blocksize)
    packed.view(-1, blocksize // 2)[special] = bytes_again.view(rows, -1)
    absmax[special] = absmax_again


@cache
def _pair_table(quant_type: str) -> torch.Tensor:
    """[256] int64: the two float32 values that a byte decodes to, as one word."""
    values = reference.decoded_values(quant_type, torch.device("cpu"))
    high, low = torch.cartesian_prod(values, values).unbind(1)
    return torch.stack((high, low), dim=1).view(torch.int64).view(-1)
