"""Weight → packed codes and absmax."""

import torch

from nf4conv.codec.reduction import cuda_mean
from nf4conv.codec.reference.blocks import CHUNK, padded_blocks, scale_blocks
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP, NESTED_BLOCKSIZE, Codebook


def quantize_blocks(
    weight: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    quant_type: str,
    blocksize: int,
) -> None:
    """Quantizes a weight in blocks.

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
        quotients, maxima = scale_blocks(blocks)
        codes = nearest_codes(quotients, codebook)
        store_codes(codes, packed[start // 2 : (start + CHUNK) // 2])
        first_block = start // blocksize
        absmax[first_block : first_block + maxima.numel()].copy_(maxima)


def nearest_codes(quotients: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Returns the codes of elements that were divided by absmax: uint8, in the same shape."""
    if codebook.signed_cuts:
        return _cuts_below(quotients, codebook)
    passed = _cuts_below(quotients.abs(), codebook)
    ranks = torch.tensor(codebook.ranks, dtype=torch.uint8, device=quotients.device)
    codes = ranks.index_select(0, passed.view(-1).int()).view(passed.shape)
    return codes + 8 * (quotients < 0).to(torch.uint8)


def _cuts_below(values: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Counts the cuts below each value: uint8, in the same shape."""
    passed = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for cut in codebook.cuts:
        passed += values > cut
    return passed


def store_codes(codes: torch.Tensor, packed: torch.Tensor) -> None:
    """Packs codes, [rows, blocksize] uint8, in their order into as many bytes as there are.

    The codes of padding behind an odd end fill the last byte; the others behind the end are
    dropped.
    """
    pairs = codes.view(-1, 2)
    all_bytes = (pairs[:, 0] << 4) | pairs[:, 1]
    packed.copy_(all_bytes[: packed.numel()])


def compress_absmax(
    absmax: torch.Tensor, codes: torch.Tensor, nested_absmax: torch.Tensor
) -> torch.Tensor:
    """Quantizes absmax to codes of the dynamic map, in blocks of 256, after subtracting its mean.

    Args:
        absmax: [blocks] float32.
        codes: [blocks] uint8, written.
        nested_absmax: [ceil(blocks / 256)] float32, written.

    Returns:
        The mean, 0-d float32: the offset of the quantization.
    """
    offset = cuda_mean(absmax)
    quotients, maxima = scale_blocks(padded_blocks(absmax - offset, NESTED_BLOCKSIZE))
    # NaN, of which a block of zeros consists, has code 0
    found = torch.bucketize(quotients.nan_to_num(nan=-2.0), dynamic_cuts(absmax.device))
    codes.copy_(found.view(-1)[: codes.numel()])
    nested_absmax.copy_(maxima)
    return offset


def dynamic_cuts(device: torch.device) -> torch.Tensor:
    """Returns the cuts of the dynamic map: a value has the code that is the number of cuts below.

    They are the midpoints of the map's values, [255] float32. A value on a midpoint takes the even
    one of its two codes, so the midpoint above an odd code is moved down by one ulp.
    """
    values = torch.tensor(DYNAMIC_MAP, dtype=torch.float32, device=device)
    midpoints = (values[:-1] + values[1:]) * 0.5
    midpoints[1::2] = midpoints[1::2].nextafter(torch.tensor(-2.0, device=device))
    return midpoints
