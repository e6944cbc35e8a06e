"""Weights of BitNet: codes of 2 bits, which stand for -1, 0 and 1, and a scale for all.

    value = (code - 1) / scale    BitLinear of transformers, whose results are divided by the scale
    value = (code - 1) * scale    AutoBitLinear, whose results are multiplied with it

A byte holds a code for each quarter of the rows, that of the first quarter in its lowest bits:
unpack_weights in integrations/bitnet.py of transformers 5.23. Computed in float32, rounded once.
"""

from dataclasses import dataclass

import torch

from nf4conv.codec.decode.scaled import chunks


@dataclass(frozen=True)
class TernaryLayout:
    """Describes some rows of a weight, and how their codes lie.

    Attributes:
        quarter: rows of a quarter of the weight.
        first: rows of the weight before those that are decoded.
        rows: how many are decoded.
        first_line: rows of bytes of the weight before the first one that is given.
        is_divided: True to divide by the scale, False to multiply with it.
    """

    quarter: int
    first: int
    rows: int
    first_line: int
    is_divided: bool


def decode_ternary(
    values: torch.Tensor, scale: torch.Tensor, layout: TernaryLayout, dtype: torch.dtype
) -> torch.Tensor:
    """Decodes rows of a weight.

    Args:
        values: [lines, columns] uint8: the rows of bytes that hold the codes.
        scale: one value: float32, float16 or bfloat16.
        layout: which rows, and how their codes lie.
        dtype: of the result.

    Returns:
        [rows, columns] `dtype`.
    """
    factor = scale.reshape(()).to(torch.float32)
    out = torch.empty((layout.rows, values.shape[1]), dtype=dtype, device=values.device)
    done = 0
    while done < layout.rows:
        place, line = divmod(layout.first + done, layout.quarter)
        count = min(layout.quarter - line, layout.rows - done)
        start = line - layout.first_line
        lines = values[start : start + count]
        target = out[done : done + count]
        for part in chunks(lines, values.shape[1]):
            decoded = (lines[part] >> 2 * place & 3).to(torch.float32).sub_(1)
            target[part] = decoded.div_(factor) if layout.is_divided else decoded.mul_(factor)
        done += count
    return out
