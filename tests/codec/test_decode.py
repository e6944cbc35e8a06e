"""Decoding other quantizations: blocks worked out by hand, and the formats' own reference
implementations.
"""

import math
from functools import partial

import bitsandbytes.functional as bnb
import pytest
import torch
import weights
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from nf4conv import dequantize_4bit, quantize_4bit
from nf4conv.codec.decode.floats import decode_fp4, decode_scaled
from nf4conv.codec.ops import decode_packed

same_bits = partial(weights.same_bits, any_nan=True)

BF16 = torch.bfloat16
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def random_scales(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.1 + 1e-4


# --- by hand --------------------------------------------------------------------------------------


def test_every_fp8_value_by_its_definition():
    def e4m3(byte: int) -> float:
        sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
        if (exponent, mantissa) == (15, 7):
            return math.nan
        magnitude = (
            mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        )
        return -magnitude if sign else magnitude

    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    expected = torch.tensor([e4m3(byte) for byte in range(256)]).view(16, 16)
    same_bits(decode_scaled(values, None, None, torch.float32), expected)


@pytest.mark.parametrize("stored_as", [torch.uint8, torch.float8_e8m0fnu], ids=["bytes", "e8m0"])
def test_e8m0_scales_are_powers_of_two(stored_as: torch.dtype):
    values = torch.full((1, 128), 1.5).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0, 126, 127, 130]], dtype=torch.uint8).view(stored_as)
    decoded = decode_scaled(values, scale, (1, 32), torch.float32)
    assert decoded[0, ::32].tolist() == [1.5 * 2**-127, 0.75, 1.5, 12.0]


def test_scales_of_a_tensor_of_rows_and_of_columns():
    values = torch.ones(2, 3).to(torch.float8_e4m3fn)
    for scale, expected in (
        (torch.tensor(2.0), [[2, 2, 2], [2, 2, 2]]),
        (torch.tensor([2.0]), [[2, 2, 2], [2, 2, 2]]),
        (torch.tensor([2.0, 3.0]), [[2, 2, 2], [3, 3, 3]]),
        (torch.tensor([[2.0], [3.0]]), [[2, 2, 2], [3, 3, 3]]),
        (torch.tensor([[2.0, 3.0, 5.0]]), [[2, 3, 5], [2, 3, 5]]),
    ):
        assert decode_scaled(values, scale, None, BF16).tolist() == expected


def test_stacked_matrices_have_grids_of_their_own():
    values = torch.ones(2, 2, 4).to(torch.float8_e5m2)
    scale = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    decoded = decode_scaled(values, scale, (2, 2), BF16)
    assert decoded.tolist() == [[[1, 1, 2, 2]] * 2, [[3, 3, 4, 4]] * 2]


def test_every_fp4_pair_low_nibble_first():
    codes = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    values = torch.arange(256, dtype=torch.uint8).view(16, 16)
    expected = torch.tensor([[codes[byte & 15], codes[byte >> 4]] for byte in range(256)]).view(
        16, 32
    )
    scale = torch.full((16, 1), 127, dtype=torch.uint8)
    same_bits(decode_fp4(values, scale, torch.float32), expected)


def test_the_two_conventions_of_nvfp4_are_each_others_inverse():
    values, scale = (
        torch.tensor([[0x72] + [0] * 7], dtype=torch.uint8),
        torch.tensor([[3.0]]).to(torch.float8_e4m3fn),
    )
    divided = decode_fp4(values, scale, BF16, divisor=torch.tensor([4.0]))
    multiplied = decode_fp4(values, scale, BF16, multiplier=torch.tensor(0.25))
    assert divided[0, :2].tolist() == [0.75, 4.5]
    same_bits(multiplied, divided)


def test_gpt_oss_experts_come_out_transposed():
    blocks = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 0], blocks[0, 1, 0, 15] = 0x21, 0xF0
    scales = torch.tensor([[[127], [128]]], dtype=torch.uint8)
    decoded = decode_fp4(blocks.flatten(2), scales, BF16, is_transposed=True)
    assert decoded.shape == (1, 32, 2)
    assert decoded[0, :2, 0].tolist() == [0.5, 1.0]
    assert decoded[0, 31, 1].item() == -12.0


# --- against the references; tests/sources/test_released.py has those of FP4 ----------------------


@pytest.mark.parametrize("dtype", FP8, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(
    "scales", [torch.float32, BF16, torch.float8_e8m0fnu, torch.uint8], ids=str
)
def test_fp8_blocks_are_those_of_transformers(dtype: torch.dtype, scales: torch.dtype):
    values = random_bytes(384, 256).view(dtype)
    exponents = (random_bytes(3, 2, seed=2) >> 3) + 110
    scale = exponents.view(scales) if scales.itemsize == 1 else random_scales(3, 2).to(scales)
    expected = Fp8Dequantize(None)._dequantize_one(values, scale, output_dtype=BF16)
    same_bits(decode_scaled(values, scale, (128, 128), BF16), expected)


def scheme(**weights: object) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


@pytest.mark.parametrize(
    ("strategy", "shape", "block", "extra"),
    [
        ("tensor", (1,), None, {}),
        ("channel", (96, 1), None, {}),
        ("block", (3, 2), (32, 64), {"block_structure": [32, 64]}),
        ("group", (96, 4), (1, 32), {"group_size": 32}),
    ],
    ids=["tensor", "channel", "block", "group"],
)
@pytest.mark.parametrize("scale_dtype", [torch.float32, BF16], ids=["f32", "bf16"])
def test_fp8_is_that_of_compressed_tensors(
    strategy: str,
    shape: tuple[int, ...],
    block: tuple[int, int] | None,
    extra: dict[str, object],
    scale_dtype: torch.dtype,
):
    values, scale = (
        torch.randn(96, 128).to(torch.float8_e4m3fn),
        random_scales(*shape).to(scale_dtype),
    )
    state = {"weight": values, "weight_scale": scale}
    kind = scheme(num_bits=8, type="float", strategy=strategy, **extra)
    expected = NaiveQuantizationCompressor.decompress(state, kind)["weight"].to(BF16)
    same_bits(decode_scaled(values, scale, block, BF16), expected)


def test_int8_is_that_of_compressed_tensors():
    values, scale = random_bytes(96, 128).view(torch.int8), random_scales(96, 1)
    state = {"weight": values, "weight_scale": scale}
    expected = NaiveQuantizationCompressor.decompress(
        state, scheme(num_bits=8, type="int", strategy="channel")
    )
    same_bits(
        decode_scaled(values, scale, None, BF16),
        expected["weight"].to(BF16),
    )


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32], ids=["f16", "bf16", "f32"])
def test_int8_rows_are_those_of_bitsandbytes(dtype: torch.dtype):
    values, scale = random_bytes(64, 96).view(torch.int8), random_scales(64) * 30
    expected = bnb.int8_vectorwise_dequant(values, scale).to(dtype)
    same_bits(decode_scaled(values, scale, None, dtype, by_127=True), expected)


@pytest.mark.parametrize("double_quant", [False, True], ids=["plain", "nested"])
def test_4bit_is_dequantize_4bit(double_quant: bool):
    packed, state = quantize_4bit(
        torch.randn(64, 96, dtype=torch.float16), double_quant=double_quant
    )
    offset = None if state.offset is None else state.offset.item()
    said = {"shape": (64, 96), "quant_type": "nf4", "blocksize": 64, "nested_offset": offset}
    parts = {"values": packed, **state.components()}
    decoded = decode_packed(**parts, **said, dtype=torch.float16)
    same_bits(decoded, dequantize_4bit(packed, state))


# --- shapes and refusals --------------------------------------------------------------------------


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    height=st.integers(1, 5),
    width=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_every_value_gets_the_scale_of_its_block(
    rows: int, columns: int, height: int, width: int, seed: int
):
    values = torch.ones(rows, columns, dtype=torch.int8)
    grid = -(-rows // height), -(-columns // width)
    scale = random_scales(*grid, seed=seed)
    decoded = decode_scaled(values, scale, (height, width), torch.float32)
    for row in range(rows):
        for column in range(columns):
            assert decoded[row, column] == scale[row // height, column // width]
