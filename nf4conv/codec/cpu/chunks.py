"""Weight → packed codes and scales, a chunk of blocks at a time, in as many threads as torch uses.

Special blocks, and a partial last one, are quantized by the reference.
"""

from typing import Final

import torch

from nf4conv.codec import reference
from nf4conv.codec.cpu.cuts import Scratch
from nf4conv.codec.cpu.quantize import write_quantized
from nf4conv.codec.cpu.search import write_searched
from nf4conv.codec.cpu.threads import THREAD_CHUNK, share
from nf4conv.format.codebook import CODEBOOKS

_SMALL_CHUNK: Final = 1 << 18
"""Elements at a time where torch has one thread: temporaries that stay in the cache save it an
eighth of the time. And of a search, which has more of them, 8 MB.
"""


def quantize_blocks(
    weight: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    quant_type: str,
    blocksize: int,
    searches: bool = False,
) -> None:
    """Quantizes a weight in blocks, as `reference.quantize_blocks` does."""
    write = write_searched if searches else write_quantized
    chunk = THREAD_CHUNK
    if searches or torch.get_num_threads() == 1:
        chunk = _SMALL_CHUNK
    codebook = CODEBOOKS[quant_type]
    whole = weight.numel() - weight.numel() % blocksize

    def write_range(start: int, stop: int) -> None:
        scratch = Scratch(min(chunk, stop - start), codebook)
        for at in range(start, stop, chunk):
            end = min(at + chunk, stop)
            blocks = weight[at:end].view(-1, blocksize)
            codes = packed[at // 2 : end // 2].view(-1, blocksize // 2)
            found = scales[at // blocksize : end // blocksize]
            special = write(blocks, codes, found, codebook, scratch)
            if special.any():
                special_codes = torch.empty_like(codes[special])
                special_scales = torch.empty_like(found[special])
                outputs = (special_codes.view(-1), special_scales)
                reference.quantize_blocks(
                    blocks[special].view(-1), *outputs, quant_type, blocksize, searches
                )
                codes[special] = special_codes
                found[special] = special_scales

    share(whole, chunk, write_range)
    if whole < weight.numel():
        rest = (weight[whole:], packed[whole // 2 :], scales[whole // blocksize :])
        reference.quantize_blocks(*rest, quant_type, blocksize, searches)
