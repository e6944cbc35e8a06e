"""A weight, a chunk of blocks at a time; special blocks are quantized again by the reference."""

from collections.abc import Callable

import torch

from nf4conv.codec.cpu.cuts import Scratch
from nf4conv.codec.cpu.threads import share
from nf4conv.format.codebook import CODEBOOKS, Codebook

Writer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Codebook, Scratch], torch.Tensor]
"""Quantizes blocks, [rows, blocksize], to codes, [rows, blocksize / 2] uint8, and scales, [rows]
float32. Returns which of the blocks are special, [rows] bool.
"""

SpecialWriter = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, str, int], None]
"""Quantizes a weight as `reference.quantize_blocks` does, with the same arguments."""


def write_chunks(
    weight: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    quant_type: str,
    blocksize: int,
    chunk: int,
    write: Writer,
    write_special: SpecialWriter,
) -> None:
    """Quantizes a weight a chunk at a time, in as many threads as torch uses.

    The weight, its packed codes and its scales are those of `reference.quantize_blocks`. `write`
    does the whole blocks of a chunk, a multiple of the blocksize; `write_special` does special
    blocks, and a partial last one.
    """
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
                write_special(
                    blocks[special].view(-1),
                    special_codes.view(-1),
                    special_scales,
                    quant_type,
                    blocksize,
                )
                codes[special] = special_codes
                found[special] = special_scales

    share(whole, chunk, write_range)
    if whole < weight.numel():
        write_special(
            weight[whole:],
            packed[whole // 2 :],
            scales[whole // blocksize :],
            quant_type,
            blocksize,
        )
