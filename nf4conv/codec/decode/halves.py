"""Weights of HQQ: codes of 1, 2, 3, 4 or 8 bits, whose words hold a code of each part of a weight.

    value = (code - zero) * scale, rounded to the dtype of the scales after each step

The elements of a weight are divided into as many parts as a word has codes. The first word holds
the first code of each part, that of the first part in its highest bits. Groups are runs of elements
(axis 1) or elements at equal distances (axis 0): Quantizer.dequantize of hqq 0.2.8.
"""

import torch

from nf4conv.codec.decode.scaled import chunks


def decode_halves(
    words: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    bits: int,
    axis: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Decodes a weight.

    Args:
        words: uint8, or int32 of 3 bits, of any shape.
        scale: a float16, bfloat16 or float32 for each group.
        zero: the zero point of each group, no whole number, in the same dtype.
        bits: of a code: 1, 2, 3, 4 or 8.
        axis: 1 if groups are runs of elements, 0 if their elements are at equal distances.
        shape: of the weight.
        dtype: of the result.

    Returns:
        A contiguous tensor of this shape and dtype.
    """
    elements = torch.Size(shape).numel()
    codes = _codes(words.reshape(-1), bits)[:elements]
    groups = scale.numel()
    if axis == 1:
        codes = codes.view(groups, -1)
        scale = scale.view(-1, 1)
        zero = zero.view(-1, 1)
    else:
        codes = codes.view(-1, groups)
        scale = scale.view(1, -1)
        zero = zero.view(1, -1)
    out = torch.empty(codes.shape, dtype=dtype, device=words.device)
    for part in chunks(codes, codes.shape[1]):
        those = part if axis == 1 else slice(None)
        difference = codes[part].to(scale.dtype) - zero[those]
        out[part] = difference * scale[those]
    return out.view(shape)


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the codes in words, those of the first part first: [codes] uint8."""
    if bits == 8:
        return words
    in_word = 10 if bits == 3 else 8 // bits  # 10 codes of 3 bits leave two bits of a word
    parts = []
    for part in range(in_word):
        shifted = words >> bits * (in_word - 1 - part)
        parts.append((shifted & 2**bits - 1).to(torch.uint8))
    return torch.cat(parts)
