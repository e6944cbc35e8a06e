"""Says what kernels cast vectors, and find out how far two are apart."""

import torch

from nf4conv.codec.kernels import difference
from nf4conv.codec.kernels.ahead.codec import FLOAT64, INT32, Codec
from nf4conv.codec.kernels.compiling import Variant
from nf4conv.codec.kernels.decoding import cast


def subtractor(_device: torch.device, a: torch.dtype, b: torch.dtype) -> Codec:
    """Returns what finds out how far two vectors are apart.

    Args:
        _device: of the kernels, which are the same on all.
        a: dtype of one vector: float32, float16 or bfloat16.
        b: dtype of the other.

    Returns:
        kernels: "subtract".
        tables: none.
        numbers: "tile", elements that a program looks at.
    """
    kernel = Variant(
        difference.difference_kernel,
        (torch.empty(0, dtype=a), torch.empty(0, dtype=b), FLOAT64, 1, 1),
        difference.NUM_WARPS,
    )
    tile = difference.TILE.value * difference.STEPS.value
    return Codec({"subtract": kernel}, {}, {"tile": tile})


def caster(_device: torch.device, source: torch.dtype, target: torch.dtype) -> Codec:
    """Returns what casts values of one dtype to another.

    Args:
        _device: of the kernels, which are the same on all.
        source: float32, float16 or bfloat16.
        target: one of these.

    Returns:
        kernels: "cast".
        tables: none.
        numbers: "tile", values that a program casts.
    """
    kernel = Variant(
        cast.cast_kernel,
        (torch.empty(0, dtype=source), torch.empty(0, dtype=target), INT32, 1),
        cast.NUM_WARPS,
    )
    return Codec({"cast": kernel}, {}, {"tile": cast.TILE.value})
