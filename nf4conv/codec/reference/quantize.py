"""Weight → packed codes and absmax."""

import torch

from nf4conv.codec.reference.blocks import CHUNK, padded_blocks, scale_blocks
from nf4conv.format.codebook import CODEBOOKS, Codebook


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
