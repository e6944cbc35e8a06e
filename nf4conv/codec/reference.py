"""Plain torch, any device: the definition of every operation, with the arithmetic of bitsandbytes'
CUDA kernels.

Those kernels are compiled with fast math, so every float32 operation flushes denormals to zero, on
input and output. For each block of a weight (docs/format.md says why each step is what it is):

    absmax = largest |x|, starting at -FLT_MAX and ignoring NaN;  elements past the end of the tensor count as 0
    r      = 1 / absmax, as reciprocal.py says                    infinite for a block of zeros
    s      = x · r                                                NaN for a block of zeros
    code   = number of cuts below s                               no cut is below NaN: code 0
    byte   = code of the even element · 16 + code of the odd one

No function here validates or allocates its results: ops.py does.
"""

from typing import Final

import torch

from nf4conv.codec import search
from nf4conv.codec.error_sums import NESTED_ERROR, SMALLEST_NORMAL, ErrorSums, half_gaps
from nf4conv.codec.quant_state import Decoding, NestedState
from nf4conv.codec.reciprocal import reciprocal
from nf4conv.codec.reduction import cuda_mean
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP, NESTED_BLOCKSIZE, Codebook

_TINIEST: Final = torch.finfo(torch.float32).tiny
_FLT_MAX: Final = torch.finfo(torch.float32).max

CHUNK: Final = 7 << 12
"""Elements worked on at a time: a multiple of any blocksize. On a CPU torch calls its threads
together from 2^15 elements on; they would come for every operation of some 10 µs, and on a busy
machine each time wait for the one that sleeps. (Indexing by a tensor calls them at any size, which
is why `index_select` is used here.)
"""


def quantize_blocks(
    weight: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    quant_type: str,
    blocksize: int,
) -> None:
    """Quantize a weight in blocks.

    Args:
        weight: [n] float32, float16 or bfloat16, contiguous. A piece of a larger weight must begin
            at a block.
        packed: [ceil(n / 2)] uint8, written.
        absmax: [ceil(n / blocksize)] float32, written.
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one absmax, a power of two from 32 to 4096.
    """
    codebook = CODEBOOKS[quant_type]
    for start in range(0, weight.numel(), CHUNK):
        blocks = padded_blocks(weight[start : start + CHUNK], blocksize)
        scaled, maxima = scale_blocks(blocks)
        _store(_nearest_codes(scaled, codebook), packed[start // 2 : (start + CHUNK) // 2])
        absmax[start // blocksize :][: maxima.numel()].copy_(maxima)


def search_blocks(
    weight: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    quant_type: str,
    blocksize: int,
) -> None:
    """Quantize a weight in blocks, each with the scale that codec/search.py finds for it.

    Arguments as `quantize_blocks`; the scales take the place of absmax.
    """
    for start in range(0, weight.numel(), CHUNK):
        found, codes = _search(padded_blocks(weight[start : start + CHUNK], blocksize), quant_type)
        _store(codes, packed[start // 2 : (start + CHUNK) // 2])
        scales[start // blocksize :][: found.numel()].copy_(found)


def _search(blocks: torch.Tensor, quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales, [rows] float32, and codes, [rows, blocksize] uint8, of flushed blocks."""
    absmax = _absmax(blocks)
    searched = (absmax >= search.LEAST_ABSMAX) & (absmax <= search.LARGEST_ABSMAX)
    power = (absmax.view(torch.int32) & 0x7F800000).view(torch.float32).where(searched, 1)
    scaled, top = _flushed(blocks / power[:, None]), absmax / power
    known = scaled.where(searched[:, None] & ~scaled.isnan(), 0)
    found = _least_squares(known, top.where(searched, 1), quant_type)
    codes, codes_of_absmax = (
        _searched_codes(scaled, found, quant_type),
        _searched_codes(scaled, top, quant_type),
    )
    cost, cost_of_absmax = (
        _cost(known, found, codes, quant_type),
        _cost(known, top, codes_of_absmax, quant_type),
    )
    better = searched & (cost + 2 * blocks.shape[1] <= cost_of_absmax)
    return found.where(better, top) * power, codes.where(better[:, None], codes_of_absmax)


def _least_squares(known: torch.Tensor, top: torch.Tensor, quant_type: str) -> torch.Tensor:
    """[rows] float32: the scale that the search and its one step come to, of blocks whose absmax is
    `top`.
    """
    positions = (known * (search.UNIT / top)[:, None]).round().to(torch.int64)
    costs, shifts, squares = [], [], []
    for nearest in torch.from_numpy(search.nearest_levels(quant_type)).to(
        known.device, torch.int64
    ):
        level = nearest.index_select(0, (positions + search.UNIT).view(-1)).view(positions.shape)
        costs.append((positions - level).square().sum(dim=1))
        shifts.append(((positions - level) * level).sum(dim=1))
        squares.append((level.square() // 16).sum(dim=1))
    best = torch.stack(costs).argmin(dim=0)  # the first of equals
    shift, square = (
        torch.stack(sums).gather(0, best[None])[0].float() for sums in (shifts, squares)
    )
    factor = torch.from_numpy(search.candidates(quant_type)).to(known.device).index_select(0, best)
    stepped = factor.abs() * (1 + shift / square / 16)
    return top * stepped.clamp(search.LEAST_FACTOR, search.LARGEST_FACTOR).copysign(factor)


def _searched_codes(scaled: torch.Tensor, scale: torch.Tensor, quant_type: str) -> torch.Tensor:
    """[rows, blocksize] uint8: codes of values by their scale."""
    return _nearest_codes(_flushed(scaled * reciprocal(scale)[:, None]), CODEBOOKS[quant_type])


def _cost(
    known: torch.Tensor, scale: torch.Tensor, codes: torch.Tensor, quant_type: str
) -> torch.Tensor:
    """[rows] int64: the squared errors, each rounded to units of 1 / COST_UNITS."""
    values = (
        decoded_values(quant_type, known.device)
        .index_select(0, codes.view(-1).int())
        .view(codes.shape)
    )
    return (
        ((known - values * scale[:, None]).square() * search.COST_UNITS)
        .round()
        .to(torch.int64)
        .sum(dim=1)
    )


def _store(codes: torch.Tensor, packed: torch.Tensor) -> None:
    """Pack codes in their order; a code behind an odd end fills the last byte, others behind the
    end are dropped.
    """
    pairs = codes.view(-1, 2)
    packed.copy_(((pairs[:, 0] << 4) | pairs[:, 1])[: packed.numel()])


def compress_absmax(
    absmax: torch.Tensor, codes: torch.Tensor, nested_absmax: torch.Tensor
) -> torch.Tensor:
    """Quantize absmax to 8-bit codes of the dynamic map, in blocks of 256, after subtracting its
    mean, 0-d float32.

    `absmax` is [blocks] float32. `codes`, [blocks] uint8, and `nested_absmax`, [ceil(blocks / 256)]
    float32, are written.
    """
    offset = cuda_mean(absmax)
    scaled, maxima = scale_blocks(padded_blocks(absmax - offset, NESTED_BLOCKSIZE))
    found = torch.bucketize(scaled.nan_to_num(nan=-2.0), dynamic_cuts(absmax.device))
    codes.copy_(found.view(-1)[: codes.numel()])
    nested_absmax.copy_(maxima)
    return offset


def dequantize_blocks(packed: torch.Tensor, decoding: Decoding, out: torch.Tensor) -> None:
    """Decode a packed weight: the value of each code times the absmax of its block, rounded to the
    type of `out`.

    Args:
        packed: [ceil(n / 2)] uint8, contiguous.
        decoding: of the codes.
        out: [n] float32, float16 or bfloat16, written.
    """
    scales, blocksize = _flushed(decoded_absmax(decoding)), decoding.blocksize
    values = decoded_values(decoding.quant_type, out.device)
    for start in range(0, out.numel(), CHUNK):
        target = out[start : start + CHUNK]
        codes = _unpacked(packed[start // 2 : (start + CHUNK) // 2])[: target.numel()]
        target.copy_(
            _flushed(
                values.index_select(0, codes) * _spread(scales, blocksize, start, target.numel())
            )
        )
        # every NaN has the bits that the GPU's multiply and conversion give it: all ones below the
        # sign
        bits = target.view(torch.int32 if target.dtype == torch.float32 else torch.int16)
        bits.masked_fill_(target.isnan(), torch.iinfo(bits.dtype).max)


def scales_and_shifts(decoding: Decoding) -> tuple[torch.Tensor, torch.Tensor]:
    """Two [blocks] float32: absmax as it decodes, and how far the nested quantization may have
    moved it.
    """
    scales = decoded_absmax(decoding)
    if decoding.state2 is None:
        return scales, torch.zeros_like(scales)
    return scales, NESTED_ERROR * _nested_scales(decoding.absmax, decoding.state2)


def error_sums(
    weight: torch.Tensor,
    packed: torch.Tensor,
    decoding: Decoding,
    known: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> ErrorSums:
    """Compare a weight with its packed form, by the bound that error_sums.py states.

    Args:
        weight: [n] float32, float16 or bfloat16, contiguous: the original.
        packed: [ceil(n / 2)] uint8, contiguous.
        decoding: of the codes.
        known: what `scales_and_shifts` gives, if that has been computed.
    """
    scales, moved = known or scales_and_shifts(decoding)
    blocksize, values = decoding.blocksize, decoded_values(decoding.quant_type, weight.device)
    gaps = torch.tensor(
        half_gaps(decoding.quant_type, decoding.scales), dtype=torch.float32, device=weight.device
    )
    count = -(-weight.numel() // CHUNK)
    peaks = torch.zeros((2, count), dtype=torch.float32, device=weight.device)
    squares = torch.zeros((2, count), dtype=torch.float64, device=weight.device)
    outside = torch.zeros(count, dtype=torch.int64, device=weight.device)
    for chunk, start in enumerate(range(0, weight.numel(), CHUNK)):
        original = weight[start : start + CHUNK].float()
        codes = _unpacked(packed[start // 2 : (start + CHUNK) // 2])[: original.numel()]
        scale = _spread(scales, blocksize, start, original.numel())
        shift = _spread(moved, blocksize, start, original.numel())
        value = values.index_select(0, codes)
        error = (original - _flushed(value * _flushed(scale))).abs()
        bound = (
            gaps.index_select(0, codes) * (scale.abs() + shift)
            + value.abs() * shift
            + SMALLEST_NORMAL
        )
        peaks[0, chunk] = _largest(error)
        peaks[1, chunk] = _largest((error / scale).abs().where(scale != 0, 0))
        squares[0, chunk] = error.double().square().sum()
        squares[1, chunk] = original.double().square().sum()
        outside[chunk] = (~((error <= bound) & error.isfinite())).sum()
    squared_error, squared_weight = squares.sum(dim=1)
    return ErrorSums(
        _largest(peaks[0]), _largest(peaks[1]), squared_error, squared_weight, outside.sum()
    )


def _largest(values: torch.Tensor) -> torch.Tensor:
    """The largest value, 0-d; NaN is ignored, and of nothing it is 0."""
    return torch.cat((values, values.new_zeros(1))).nan_to_num(nan=0.0, posinf=torch.inf).amax()


def padded_blocks(values: torch.Tensor, blocksize: int) -> torch.Tensor:
    """[n] of any float type → [ceil(n / blocksize), blocksize] float32, flushed; zeros past the
    end.
    """
    flat = values.float()
    return _flushed(
        torch.nn.functional.pad(flat, (0, -flat.numel() % blocksize)).view(-1, blocksize)
    )


def _flushed(values: torch.Tensor) -> torch.Tensor:
    """Denormals become zeros of the same sign; NaN and infinities stay."""
    return values * (values.abs() >= _TINIEST)


def scale_blocks(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide each row by its largest magnitude, [rows] float32, as a flushed product with its
    reciprocal; both.
    """
    absmax = _absmax(blocks)
    return _flushed(blocks * reciprocal(absmax)[:, None]), absmax


def _absmax(blocks: torch.Tensor) -> torch.Tensor:
    """[rows] float32: the largest magnitude of each row, NaN ignored."""
    magnitudes = blocks.abs()
    return magnitudes.where(~magnitudes.isnan(), -_FLT_MAX).amax(dim=1)


def _nearest_codes(scaled: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Codes of scaled values, uint8 in the same shape."""
    measured = scaled if codebook.signed_cuts else scaled.abs()
    passed = torch.zeros(scaled.shape, dtype=torch.uint8, device=scaled.device)
    for cut in codebook.cuts:
        passed += measured > cut
    if codebook.signed_cuts:
        return passed
    ranks = torch.tensor(codebook.ranks, dtype=torch.uint8, device=scaled.device)
    return ranks.index_select(0, passed.view(-1).int()).view(passed.shape) + 8 * (scaled < 0).to(
        torch.uint8
    )


def dynamic_cuts(device: torch.device) -> torch.Tensor:
    """[255] float32: a value has the code that is the number of these below it.

    They are the midpoints of the dynamic map. A value on a midpoint takes the even one of its two
    codes, so the midpoint above an odd code is moved down by one ulp.
    """
    values = torch.tensor(DYNAMIC_MAP, dtype=torch.float32, device=device)
    midpoints = (values[:-1] + values[1:]) * 0.5
    midpoints[1::2] = midpoints[1::2].nextafter(torch.tensor(-2.0, device=device))
    return midpoints


def decoded_absmax(decoding: Decoding) -> torch.Tensor:
    """[blocks] float32: absmax as it decodes; a nested one by a flushed product, then an addition,
    each rounded.
    """
    absmax, state2, offset = decoding[:3]
    if state2 is None or offset is None:
        return absmax
    return (
        _flushed(
            _flushed(state2.code).index_select(0, absmax.int()) * _nested_scales(absmax, state2)
        )
        + offset
    )


def _nested_scales(codes: torch.Tensor, state2: NestedState) -> torch.Tensor:
    """[blocks] float32: the nested absmax that each code is multiplied by."""
    return (
        _flushed(state2.absmax)[:, None].expand(-1, state2.blocksize).reshape(-1)[: codes.numel()]
    )


def decoded_values(quant_type: str, device: torch.device) -> torch.Tensor:
    """[16] float32: the values that CUDA decodes to. FP4 code 8 is -0.0 there, not the +0.0 of its
    quant_map.
    """
    values = torch.tensor(CODEBOOKS[quant_type].values, dtype=torch.float32, device=device)
    if quant_type == "fp4":
        values[8] = -0.0
    return values


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """[bytes] uint8 → [2 * bytes] int32 codes, for use as indices."""
    return torch.stack((packed >> 4, packed & 15), dim=1).view(-1).int()


def _spread(per_block: torch.Tensor, blocksize: int, start: int, count: int) -> torch.Tensor:
    """[blocks] → [count]: what elements start, start + 1, … have of their blocks; start is the
    first of one.
    """
    blocks = per_block[start // blocksize : -(-(start + count) // blocksize)]
    return blocks.repeat_interleave(blocksize)[:count]
