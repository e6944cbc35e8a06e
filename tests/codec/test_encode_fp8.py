"""MXFP4 encoded as FP8: what another project's converter gave, and every code at every distance."""

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nf4conv.codec.decode.floats import decode_fp4, decode_scaled
from nf4conv.codec.fp8 import encode_scales, encode_values
from nf4conv.errors import CodecError

GOLDEN = Path(__file__).parents[1] / "golden" / "fp8.safetensors"
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
BLOCK = (128, 128)


def same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(
        actual.view(torch.uint8), expected.view(torch.uint8)
    )


def test_every_byte_is_that_of_the_converter_of_another_project():
    made = load_file(GOLDEN)
    scale = made["mxfp4 scale"]
    for stored in (scale, scale.view(torch.uint8)):
        assert same_bytes(encode_values(made["mxfp4"], stored, E4M3, block=BLOCK), made["fp8"])
        assert same_bytes(encode_scales(stored, E8M0, block=BLOCK), made["fp8 scale"])


def is_exact(code: int, distance: int) -> bool:
    """Tells by arithmetic whether a value of a group is one of E4M3, 2^distance below the block's
    largest scale.
    """
    magnitude = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7]
    steps = magnitude * 2.0 ** (6 - distance) / 2.0**-9  # of the smallest value of E4M3
    return steps == int(steps)


def test_a_value_is_exact_or_refused():
    """The first group has the largest scale, and the second a value at some distance below it."""
    for code, distance in product(range(16), [*range(20), 100, 254]):
        values = torch.zeros(1, 32, dtype=torch.uint8)
        values[0, 0] = 7  # 6, which only the first group can have
        values[0, 16] = code
        largest = 254
        scale = torch.tensor([[largest, largest - distance]], dtype=torch.uint8)
        if not is_exact(code, distance):
            with pytest.raises(CodecError, match=r"^1 values are not exact in FP8"):
                encode_values(values, scale, E4M3, block=BLOCK)
            continue
        encoded = encode_values(values, scale, E4M3, block=BLOCK)
        for dtype in (E8M0, torch.float32):
            scales = encode_scales(scale, dtype, block=BLOCK)
            decoded = decode_scaled(encoded, scales, BLOCK, torch.float32)
            expected = decode_fp4(values, scale, torch.float32)
            assert torch.equal(decoded.view(torch.int32), expected.view(torch.int32))


def test_partial_blocks_and_small_scales():
    for (rows, columns, block), largest in product(
        [
            (128, 128, BLOCK),
            (1, 32, BLOCK),
            (130, 160, BLOCK),
            (64, 96, (32, 32)),
            (100, 128, (7, 64)),
        ],
        [0, 3, 6, 20, 254],
    ):
        generator = torch.Generator().manual_seed(rows + largest)
        values = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
        below = torch.randint(0, 15, (rows, columns // 32), generator=generator)
        scale = (largest - below).clamp(min=0).to(torch.uint8)
        encoded = encode_values(values.view(torch.int8), scale, E4M3, block=block)
        scales = encode_scales(scale, torch.float32, block=block)
        assert scales.shape == (-(-rows // block[0]), -(-columns // block[1]))
        assert torch.equal(scales, encode_scales(scale, E8M0, block=block).to(torch.float32))
        decoded = decode_scaled(encoded, scales, block, torch.float32)
        expected = decode_fp4(values, scale, torch.float32)
        assert torch.equal(decoded.view(torch.int32), expected.view(torch.int32))


def test_a_scale_that_is_nan_is_refused():
    scale = torch.full((1, 4), 127, dtype=torch.uint8)
    scale[0, 3] = 255
    with pytest.raises(CodecError, match="not exact"):
        encode_values(torch.zeros(1, 64, dtype=torch.uint8), scale, E4M3, block=BLOCK)
