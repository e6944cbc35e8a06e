"""The operations of `reference.py` as a CPU does them fastest: the same bytes, many times sooner.

A chunk of blocks that fits the cache is worked on at a time. Counting the cuts below every element
takes 15 comparisons, which sounds slow and is not: numpy compares and adds a whole vector register
at once, about 0.06 ns a comparison, while any table lookup costs half a nanosecond an element.
torch does what numpy lacks: bfloat16, fast row maxima.

Nothing is flushed to zero here. Where that would matter, the block is *special*: its absmax is
outside a range in which no product can tell the difference, or is NaN or infinite. Special blocks,
and a partial last one, go to the reference.

A large weight is shared by several threads: numpy and torch let go of the interpreter lock while
they compute, and chunks are large enough for the lock to change hands seldom.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from nf4conv.codec import reference
from nf4conv.codec.cpu_errors import are_between, value_pairs
from nf4conv.codec.cpu_errors import error_sums as error_sums
from nf4conv.codec.quant_state import Decoding, NestedState
from nf4conv.codec.reciprocal import reciprocal
from nf4conv.codec.reduction import cuda_mean
from nf4conv.format.codebook import CODEBOOKS, NESTED_BLOCKSIZE, Codebook

_QUANTIZE_CHUNK: Final = 1 << 20
"""Elements a thread quantizes at a time: 10 MB of temporaries. Smaller chunks make two threads wait
for each other: with 2^18 they reach 420 million elements a second, with 2^20 550, where one alone
reaches 390.
"""

_QUANTIZE_CHUNK_ALONE: Final = 1 << 18
"""The same where torch has one thread: temporaries that stay in the cache save it an eighth of the
time.
"""

_COMPARED: Final = 1 << 15
"""Elements compared at a time: half a megabyte of answers to all cuts, to be added up before they
leave the cache.
"""

_DECODED: Final = (
    1 << 17
)  # elements decoded at a time in a thread that is alone: 0.8 MB of temporaries
_MAX_THREADS: Final = 8  # more would mostly wait for the interpreter lock

TINIEST: Final = float(np.finfo(np.float32).tiny)
_MIN_ABSMAX: Final = (
    2.0**-100
)  # what is flushed, less than 2^-126, scales to less than 2^-26: no cut is that near 0
_MAX_ABSMAX: Final = 2.0**126  # beyond it the reciprocal is flushed
_MIN_SCALE: Final = 2.0**-100  # times the smallest code value it is still no denormal

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]


def quantize_blocks(
    weight: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    quant_type: str,
    blocksize: int,
) -> None:
    """Quantize a weight in blocks; arguments as `reference.quantize_blocks`."""
    chunk = _QUANTIZE_CHUNK_ALONE if torch.get_num_threads() == 1 else _QUANTIZE_CHUNK
    write_chunks(
        (weight, packed, absmax),
        quant_type,
        blocksize,
        chunk,
        _quantize_chunk,
        reference.quantize_blocks,
    )


def write_chunks(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    quant_type: str,
    blocksize: int,
    chunk: int,
    write: "Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Codebook, Scratch], torch.Tensor]",
    write_special: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, str, int], None],
) -> None:
    """Quantize a weight a chunk of so many elements at a time, in as many threads as torch uses.

    The tensors are weight, packed codes and scales, as `reference.quantize_blocks` takes them.
    `write` quantizes blocks [rows, blocksize] to [rows, blocksize / 2] bytes and [rows] scales, and
    says which of them are special: [rows] bool; `write_special` quantizes those again, and a
    partial last block.
    """
    weight, packed, scales = tensors
    codebook = CODEBOOKS[quant_type]
    whole = weight.numel() - weight.numel() % blocksize

    def write_range(start: int, stop: int) -> None:
        scratch = Scratch(min(chunk, stop - start), codebook)
        for at in range(start, stop, chunk):
            end = min(at + chunk, stop)
            blocks, codes = (
                weight[at:end].view(-1, blocksize),
                packed[at // 2 : end // 2].view(-1, blocksize // 2),
            )
            found = scales[at // blocksize : end // blocksize]
            special = write(blocks, codes, found, codebook, scratch)
            if special.any():
                codes_again, found_again = (
                    torch.empty_like(codes[special]),
                    torch.empty_like(found[special]),
                )
                write_special(
                    blocks[special].view(-1),
                    codes_again.view(-1),
                    found_again,
                    quant_type,
                    blocksize,
                )
                codes[special], found[special] = codes_again, found_again

    share(whole, chunk, write_range)
    if whole < weight.numel():
        write_special(
            weight[whole:],
            packed[whole // 2 :],
            scales[whole // blocksize :],
            quant_type,
            blocksize,
        )


def compress_absmax(
    absmax: torch.Tensor, codes: torch.Tensor, nested_absmax: torch.Tensor
) -> torch.Tensor:
    """Quantize absmax to 8-bit codes; arguments and result as `reference.compress_absmax`."""
    offset = cuda_mean(absmax)
    for at in range(0, absmax.numel(), reference.CHUNK):
        centred = absmax[at : at + reference.CHUNK] - offset
        scaled, maxima = reference.scale_blocks(reference.padded_blocks(centred, NESTED_BLOCKSIZE))
        codes.numpy()[at : at + reference.CHUNK] = nearest_dynamic(
            scaled.view(-1)[: centred.numel()].numpy()
        )
        nested_absmax[at // NESTED_BLOCKSIZE :][: maxima.numel()] = maxima
    return offset


def dequantize_blocks(packed: torch.Tensor, decoding: Decoding, out: torch.Tensor) -> None:
    """Decode a packed weight; arguments as `reference.dequantize_blocks`."""
    blocksize = decoding.blocksize

    def dequantize_range(start: int, stop: int) -> None:
        step = _DECODED if torch.get_num_threads() == 1 else reference.CHUNK
        values = torch.empty(min(step, stop - start), dtype=torch.float32)
        indices = torch.empty(values.numel() // 2, dtype=torch.int32)
        for at in range(start, stop, reference.CHUNK * blocksize):
            end = min(at + reference.CHUNK * blocksize, stop)
            first, last = at // blocksize, -(-end // blocksize)
            piece = decoding._replace(absmax=decoding.absmax[first:last])
            if piece.state2 is not None:
                nested = piece.state2.absmax[
                    first // NESTED_BLOCKSIZE : -(-last // NESTED_BLOCKSIZE)
                ]
                piece = piece._replace(state2=NestedState(nested, piece.state2.code))
            _decode_piece(packed[at // 2 : (end + 1) // 2], piece, out[at:end], values, indices)

    share(out.numel(), max(_QUANTIZE_CHUNK, NESTED_BLOCKSIZE * blocksize), dequantize_range)


def _decode_piece(
    packed: torch.Tensor,
    decoding: Decoding,
    out: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    """Decode consecutive blocks; what the reference must do is left to it.

    The temporaries, values [n] float32 and indices [n / 2] int32, are for n elements at a time.
    """
    scales, blocksize = reference.decoded_absmax(decoding), decoding.blocksize
    # whatever its code, no value is NaN, infinite or flushed to zero
    is_ordinary = are_between(scales, _MIN_SCALE, torch.inf)
    whole = out.numel() - out.numel() % blocksize if is_ordinary else 0
    pairs = value_pairs(decoding.quant_type)
    for at in range(0, whole, values.numel()):
        end = min(at + values.numel(), whole)
        found = indices[: (end - at) // 2].copy_(packed[at // 2 : end // 2])
        decoded = values[: end - at]
        torch.index_select(pairs, 0, found, out=decoded.view(torch.int64))
        decoded.view(-1, blocksize).mul_(scales[at // blocksize : end // blocksize, None])
        out[at:end].copy_(decoded)
    if whole < out.numel():
        rest = Decoding(scales[whole // blocksize :], None, None, decoding.quant_type, blocksize)
        reference.dequantize_blocks(packed[whole // 2 :], rest, out[whole:])


def share(elements: int, unit: int, work: Callable[[int, int], None]) -> None:
    """Call `work(start, stop)` so that the ranges cover all elements, in as many threads as torch
    uses.

    Every range begins at a multiple of `unit`. In the threads that are started torch starts none of
    its own.
    """
    torch_threads = torch.get_num_threads()
    if torch_threads == 1 or elements <= reference.CHUNK:
        work(0, elements)
        return
    units = -(-elements // unit)
    threads = min(torch_threads, units, _MAX_THREADS)
    step = -(-units // threads) * unit
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            started = [
                pool.submit(work, start, min(start + step, elements))
                for start in range(0, elements, step)
            ]
    finally:
        torch.set_num_threads(
            torch_threads
        )  # the initializer changed what threads yet to come will use
    for done in started:
        done.result()


class Scratch:
    """The temporaries of one thread, for chunks of up to n elements; `hits` says whether one is
    above a cut.
    """

    def __init__(self, elements: int, codebook: Codebook) -> None:
        self.values = torch.empty(elements, dtype=torch.float32)
        self.magnitudes = torch.empty(elements, dtype=torch.float32)
        self.hits = np.empty((len(codebook.cuts), min(elements, _COMPARED)), dtype=np.bool_)
        self.codes = np.empty(elements, dtype=np.uint8)


def _quantize_chunk(
    blocks: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: Codebook,
    scratch: Scratch,
) -> torch.Tensor:
    """Quantize [rows, blocksize] of any float type; which blocks are special."""
    is_wide = blocks.dtype == torch.float32
    magnitudes = blocks if is_wide and codebook.signed_cuts else without_signs(blocks, scratch)
    reciprocals = _reciprocals(find_absmax(magnitudes, absmax))[:, None]
    source = blocks if codebook.signed_cuts else magnitudes
    scaled = scratch.values[: blocks.numel()].view(blocks.shape)
    if is_wide:
        torch.mul(source, reciprocals, out=scaled)
    else:  # torch is slow to multiply what it has to convert
        scaled.copy_(source).mul_(reciprocals)
    codes = count_cuts(scaled, codebook, scratch)
    if not codebook.signed_cuts:
        _add_signs(codes, blocks, scaled.view(-1).numpy())
    np.copyto(packed.view(-1).numpy(), pair_codes(codes, codebook), casting="unsafe")
    return ~((absmax >= _MIN_ABSMAX) & (absmax <= _MAX_ABSMAX))


def without_signs(blocks: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """The magnitudes of blocks, in their dtype."""
    if blocks.dtype == torch.float32:
        return torch.abs(blocks, out=scratch.magnitudes[: blocks.numel()].view(blocks.shape))
    bits = scratch.magnitudes.view(torch.int16)[: blocks.numel()].view(blocks.shape)
    return torch.bitwise_and(blocks.view(torch.int16), 0x7FFF, out=bits).view(blocks.dtype)


def find_absmax(magnitudes: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """Write the largest of each row, NaN where there is one, and return it in its own dtype;
    float32 may have signs.
    """
    if magnitudes.dtype == torch.float32:
        return torch.maximum(
            torch.amax(magnitudes, dim=1), -torch.amin(magnitudes, dim=1), out=absmax
        )
    # without their sign the bits of floats are ordered as the floats are, NaN last; half the bytes
    # of float32
    largest = torch.amax(magnitudes.view(torch.int16), dim=1).view(magnitudes.dtype)
    absmax.copy_(largest)
    return largest


def _reciprocals(absmax: torch.Tensor) -> torch.Tensor:
    """[rows] float32: 1 / absmax; of 16 bits from a table of all there are."""
    if absmax.dtype == torch.float32:
        return reciprocal(absmax)
    return _half_reciprocals(absmax.dtype).index_select(0, absmax.view(torch.int16).int())


@cache
def _half_reciprocals(dtype: torch.dtype) -> torch.Tensor:
    """[32768] float32: the reciprocal of every number of a 16-bit dtype that is not negative, by
    its bits.
    """
    return reciprocal(torch.arange(1 << 15, dtype=torch.int16).view(dtype).float())


def count_cuts(scaled: torch.Tensor, codebook: Codebook, scratch: Scratch) -> _Bytes:
    """[n] uint8: the number of cuts below each value."""
    cuts = np.array(codebook.cuts, dtype=np.float32)[:, None]
    values, codes = scaled.view(-1).numpy(), scratch.codes[: scaled.numel()]
    for at in range(0, values.size, _COMPARED):
        hits = scratch.hits[:, : min(_COMPARED, values.size - at)]
        np.greater(values[at : at + _COMPARED], cuts, out=hits)
        np.add.reduce(hits.view(np.uint8), axis=0, dtype=np.uint8, out=codes[at : at + _COMPARED])
    return codes


def _add_signs(codes: _Bytes, blocks: torch.Tensor, magnitudes: _Floats) -> None:
    """Add 8 to the codes of negative values; what is flushed to zero, before or after it is scaled,
    has no sign.
    """
    unsigned = np.dtype(f"u{blocks.itemsize}")
    bits, least = (
        one.view(-1)
        .view(torch.int32 if blocks.itemsize == 4 else torch.int16)
        .numpy()
        .view(unsigned)
        for one in (blocks, torch.tensor([-TINIEST], dtype=blocks.dtype))  # in float16 that is -0
    )
    for at in range(0, magnitudes.size, _COMPARED):
        piece = slice(at, at + _COMPARED)
        negative = bits[piece] >= least
        negative &= magnitudes[piece] >= TINIEST
        codes[piece] += negative.view(np.uint8) << 3


def pair_codes(counts: _Bytes, codebook: Codebook) -> npt.NDArray[np.uint16]:
    """[n] numbers of cuts, plus 8 for a sign of its own, → [n / 2] bytes held in words. Overwrites
    `counts`.

    The even code is in the high nibble. FP4's codes are 0, 1, 6, 7, 4, 5, 2, 3 in the order of
    their magnitudes: the number of cuts below, but with bit 2 turned round where bit 1 is set.
    """
    pairs = counts.view("<u2")  # even + 256 · odd
    pairs *= 0x1001  # its high byte is now odd + 16 · even
    pairs >>= 8
    if not codebook.signed_cuts:
        pairs ^= (pairs & 0x22) << 1
    return pairs


def nearest_dynamic(scaled: npt.NDArray[np.float32]) -> _Bytes:
    """[n] values, none beyond ±1, to [n] codes; NaN to 0.

    The upper half of a float32 leaves two neighbouring codes to choose from; one comparison
    decides.
    """
    lower, cuts = _dynamic_search()
    codes: _Bytes = lower[scaled.view("<u2")[1::2]]
    codes += scaled > cuts[codes]
    return codes


@cache
def _dynamic_search() -> tuple[_Bytes, npt.NDArray[np.float32]]:
    """How to find the 8-bit code of a float32 by its upper 16 bits.

    The lowest code among the values with these upper bits, [65536] uint8, 0 for NaN and infinities:
    the others have it or the next; and what a value with the next code is above, [256] float32:
    none is above the last.
    """
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lowest = np.where(upper >> 31, upper | 0xFFFF, upper).view(np.float32)
    finite = (upper & 0x7F800000) != 0x7F800000
    cuts = reference.dynamic_cuts(torch.device("cpu")).numpy()
    lower = np.where(finite, np.searchsorted(cuts, np.where(finite, lowest, 0)), 0)
    return lower.astype(np.uint8), np.append(cuts, np.float32(np.inf))
