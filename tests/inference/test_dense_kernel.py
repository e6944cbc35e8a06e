"""The kernel for weights in blocks of 32, and for rows that do not end with a whole 64, by Triton's
interpreter.
"""

import pytest
import torch
from products import assert_close_to_exact, packed_weight

from nf4conv.codec.kernels.tables import value_table
from nf4conv.codec.quant_state import decoding_of
from nf4conv.inference.kernels.product.dense import TILES, dense_kernel
from nf4conv.inference.kernels.product.launches import PackedWeight


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("m", "n", "k", "blocksize", "nested"),
    [
        (1, 70, 96, 32, True),
        (16, 65, 352, 32, False),
        (30, 40, 224, 64, True),
        (40, 64, 64, 128, False),
    ],
)
def test_multiplies(m: int, n: int, k: int, blocksize: int, nested: bool, parts: int) -> None:
    packed, state = packed_weight(n, k, "nf4", blocksize, nested)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).half()
    tile = next(one for one in TILES if m <= one.columns)
    steps = -(-k // (32 * tile.chunks * parts))
    found = torch.full((parts, m, n), float("nan"), dtype=torch.float32)
    weight = PackedWeight(packed, *decoding_of(state).pointers())
    arguments = (
        x, found, weight, value_table("nf4", x.device),
        m, n, k, steps, (blocksize // 32).bit_length() - 1,
    )  # fmt: skip
    programs = -(-n // tile.rows) * parts
    dense_kernel[(programs,)](*arguments, *tile[:4], nested, parts == 1, False)
    assert_close_to_exact(found.sum(0).half(), x, packed, state)
