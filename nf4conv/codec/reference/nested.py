"""absmax → 8-bit codes: the second quantization."""

import torch

from nf4conv.codec.reduction import cuda_mean
from nf4conv.codec.reference.blocks import padded_blocks, scale_blocks
from nf4conv.format.codebook import DYNAMIC_MAP, NESTED_BLOCKSIZE


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
