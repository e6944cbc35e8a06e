"""Weights that try a codec: ordinary ones, and blocks of which each is one way to be wrong.

Random normal numbers prove little: a draft of these kernels passed dozens of such tests and was
wrong on most of the special blocks.
"""

import math
from collections.abc import Callable

import torch

from nf4conv.format.codebook import CODEBOOKS

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def random_weight(elements: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal numbers, every 97th of them 20 times as large."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(elements, generator=generator) * 0.02
    weight[::97] *= 20
    return weight.to(dtype)


def _filled(value: float) -> Callable[[torch.Tensor], None]:
    def fill(block: torch.Tensor) -> None:
        block.fill_(value)

    return fill


def _alone(value: float) -> Callable[[torch.Tensor], None]:
    def place(block: torch.Tensor) -> None:
        block.zero_()
        block[0] = value

    return place


def _placed(*values: float) -> Callable[[torch.Tensor], None]:
    def place(block: torch.Tensor) -> None:
        block[1 : 1 + len(values)] = torch.tensor(values, dtype=torch.float32).to(block.dtype)

    return place


def _subnormal(block: torch.Tensor) -> None:
    bits = torch.arange(block.numel(), dtype=torch.int32) % 100 + 1
    narrow = (
        bits.view(torch.float32)
        if block.dtype == torch.float32
        else bits.to(torch.int16).view(block.dtype)
    )
    block.copy_(narrow)
    block[::2] *= -1


def _scaled(factor: float) -> Callable[[torch.Tensor], None]:
    def scale(block: torch.Tensor) -> None:
        block.copy_((block.float() / block.float().abs().max() * factor).to(block.dtype))

    return scale


SPECIAL_BLOCKS: dict[str, Callable[[torch.Tensor], None]] = {
    "zero": _filled(0.0),
    "minus-zero": _filled(-0.0),
    "constant": _filled(0.3),
    "constant-negative": _filled(-0.3),
    "one-value": _alone(-2.5),
    "minus-zero-among-others": _placed(-0.0, 0.0, -0.0),
    "subnormal": _subnormal,
    "smallest-normal": _filled(2.0**-126),
    "near-smallest-normal": _scaled(2.0**-125),
    "tiny-beside-large": _placed(1e-38, -1e-38, 3e-39, -3e-39, 1e-30, -1e-30),
    "two-to-the-126": _scaled(2.0**126),
    "above-two-to-the-126": _scaled(3e38),
    "infinity": _placed(math.inf),
    "minus-infinity": _placed(-math.inf),
    "nan": _placed(math.nan),
    "nan-and-infinity": _placed(math.nan, math.inf, -math.inf),
    "all-nan": _filled(math.nan),
    "all-infinity": _filled(math.inf),
    "nan-and-zeros": _alone(math.nan),
}


def special_weight(dtype: torch.dtype, blocksize: int, tail: str = "") -> torch.Tensor:
    """One block for each entry of SPECIAL_BLOCKS, an ordinary one after each.

    Args:
        dtype: float32, float16 or bfloat16; values out of its range become infinite.
        blocksize: of the blocks.
        tail: if given, the entry that a last, partial block of odd length is made by.
    """
    names = list(SPECIAL_BLOCKS)
    extra = blocksize // 2 + 1 if tail else 0
    weight = random_weight(2 * len(names) * blocksize + extra, dtype, seed=1)
    for number, name in enumerate(names):
        SPECIAL_BLOCKS[name](weight[2 * number * blocksize : (2 * number + 1) * blocksize])
    if tail:
        SPECIAL_BLOCKS[tail](weight[-extra:])
    return weight


def tie_weight(dtype: torch.dtype, blocksize: int, quant_type: str) -> torch.Tensor:
    """Blocks whose quotients lie on a cut, one ulp below and one above, for absmax 1 and for other
    absmax.
    """
    cuts = torch.tensor(CODEBOOKS[quant_type].cuts)
    around = torch.cat(
        [cuts.nextafter(torch.tensor(-2.0)), cuts, cuts.nextafter(torch.tensor(2.0))]
    )
    around = torch.cat([around, -around])
    blocks = []
    for absmax in (1.0, 3.7, 0.0213, 1.3e-5, 0.7):
        values = (around * absmax).repeat(-(-blocksize // around.numel()) + 1)
        for start in range(0, around.numel(), blocksize - 1):
            block = torch.full((blocksize,), absmax)
            block[1:] = values[start : start + blocksize - 1]
            blocks.append(block)
    return torch.cat(blocks).to(dtype)


def spread_values(count: int) -> torch.Tensor:
    """[count] float32 between 1/128 and 9/128, exact in any language, for sums whose order matters.

    The i-th is ((i · 2654435761 + 12345) mod 2^32 >> 9) + 2^20, times 2^-27.
    """
    index = torch.arange(count, dtype=torch.int64)
    hashed = (index * 2_654_435_761 + 12_345) & 0xFFFF_FFFF
    return ((hashed >> 9) + (1 << 20)).to(torch.float32) * 2.0**-27


def same_bits(actual: torch.Tensor, expected: torch.Tensor, *, any_nan: bool = False) -> None:
    """Compares dtype, shape and bits; with `any_nan`, one NaN is as good as another."""
    actual = actual.cpu()
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.is_contiguous()
    nans = expected.isnan() & any_nan
    assert torch.equal(actual.isnan() & any_nan, nans)
    kind = {2: torch.int16, 4: torch.int32}[actual.element_size()]
    assert torch.equal(actual.view(kind)[~nans], expected.view(kind)[~nans])
