"""The two torch backends against an element-at-a-time definition, bit for bit. `cpu` must equal
`reference` besides.
"""

import math
from itertools import product
from types import ModuleType

import hypothesis.extra.numpy as hypothesis_numpy
import numpy as np
import pytest
import scalar
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from weights import random_weight, special_weight

from nf4conv.codec import cpu, reference
from nf4conv.codec.quant_state import Decoding, code_table
from nf4conv.codec.reduction import cuda_mean
from nf4conv.codec.reference.quantize import dynamic_cuts, nearest_dynamic
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP

CPU = torch.device("cpu")
INTEGER = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}

backends = pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
quant_types = pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
dtypes = pytest.mark.parametrize("dtype", list(INTEGER), ids=["f32", "f16", "bf16"])


def quantize(
    backend: ModuleType, weight: torch.Tensor, quant_type: str, blocksize: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize into poisoned outputs that are longer than needed, and see that what is too long
    stays as it was.
    """
    n_bytes, blocks = -(-weight.numel() // 2), -(-weight.numel() // blocksize)
    packed, absmax = (
        torch.full((n_bytes + 9,), 0xA5, dtype=torch.uint8),
        torch.full((blocks + 9,), -7.0),
    )
    backend.quantize_blocks(weight, packed[:n_bytes], absmax[:blocks], quant_type, blocksize)
    assert (packed[n_bytes:] == 0xA5).all()
    assert (absmax[blocks:] == -7).all()
    return packed[:n_bytes], absmax[:blocks]


def dequantize(
    backend: ModuleType,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    count: int,
    quant_type: str,
    dtype: torch.dtype = torch.float32,
    blocksize: int = 64,
    nested: tuple[torch.Tensor | None, ...] = (),
) -> torch.Tensor:
    out = torch.full((count + 9,), 5.0, dtype=dtype)
    backend.dequantize_blocks(packed, Decoding(absmax, quant_type, blocksize, *nested), out[:count])
    assert (out[count:] == 5).all()
    return out[:count]


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.dtype == right.dtype
    assert torch.equal(left.view(INTEGER[left.dtype]), right.view(INTEGER[right.dtype]))


def assert_quantized_as_defined(
    backend: ModuleType, weight: torch.Tensor, quant_type: str, blocksize: int
) -> None:
    packed, absmax = quantize(backend, weight, quant_type, blocksize)
    expected, maxima = scalar.quantize(weight.float().numpy(), quant_type, blocksize)
    assert bytes(packed.tolist()) == expected
    assert_same_bits(absmax, torch.from_numpy(maxima))


@backends
@quant_types
def test_a_partial_block_of_nan_has_absmax_zero(backend, quant_type):
    packed, absmax = quantize(backend, torch.full((33,), math.nan), quant_type)
    assert bytes(packed.tolist()) == bytes(17)
    assert absmax.tolist() == [0.0]


@backends
def test_the_nibble_after_an_odd_end_is_the_code_of_zero(backend):
    assert quantize(backend, torch.tensor([1.0]), "nf4")[0].tolist() == [0xF7]
    assert quantize(backend, torch.tensor([1.0]), "fp4")[0].tolist() == [0x30]
    assert quantize(backend, torch.tensor([0.0]), "nf4")[0].tolist() == [0x00]


@backends
@quant_types
def test_flushing_near_the_ends_of_the_exponent(backend, quant_type):
    """Elements from the smallest subnormal up, beside an absmax of 1.25 · 2^exponent."""
    for exponent in [*range(-127, -97), 125, 126, 127]:
        magnitudes = 2.0 ** torch.linspace(-149, -110, 62)
        signs = torch.tensor([1.0, -1.0]).repeat(31)
        weight = torch.cat(
            (torch.tensor([1.25, 0.7]) * 2.0**exponent, (magnitudes * signs).float())
        )
        weight = torch.where(weight.abs() > weight[0], weight[0], weight)
        assert_quantized_as_defined(backend, weight, quant_type, 64)
        assert_quantized_as_defined(backend, weight.bfloat16(), quant_type, 32)


@backends
@quant_types
@pytest.mark.parametrize("toward", [-2.0, 0.0, 2.0], ids=["below", "on", "above"])
def test_an_ulp_decides(backend, quant_type, toward):
    codebook = CODEBOOKS[quant_type]
    cuts = torch.tensor(codebook.cuts)
    weight = torch.ones(64)
    weight[1 : 1 + len(cuts)] = cuts if toward == 0 else cuts.nextafter(torch.tensor(toward))
    packed, _ = quantize(backend, weight, quant_type)
    codes = torch.stack((packed >> 4, packed & 15), dim=1).view(-1)[1 : 1 + len(cuts)].tolist()
    assert codes == list(codebook.ranks[1:] if toward == 2.0 else codebook.ranks[:-1])


@backends
@quant_types
@dtypes
def test_odd_sizes(backend, quant_type, dtype):
    for elements in [1, 2, 7, 63, 64, 65, 127, 640, 1001]:
        assert_quantized_as_defined(
            backend, random_weight(elements, dtype, seed=elements), quant_type, 64
        )


@backends
def test_nothing_becomes_nothing(backend):
    packed, absmax = quantize(backend, torch.empty(0), "nf4")
    assert dequantize(backend, packed, absmax, 0, "nf4").numel() == 0


any_block = hypothesis_numpy.arrays(
    np.uint32, st.sampled_from([33, 64]), elements=st.integers(0, 2**32 - 1)
)
near_zero = hypothesis_numpy.arrays(
    np.uint32, 64, elements=st.integers(0, 2**25).map(lambda n: n * 97 % 2**25)
)


@settings(max_examples=150, deadline=None)
@given(patterns=any_block | near_zero | near_zero.map(lambda block: block | 0x80000000))
@example(patterns=np.zeros(64, dtype=np.uint32))
@example(patterns=np.full(64, 0x80800001, dtype=np.uint32))
def test_any_bits(patterns):
    weight = torch.from_numpy(patterns.view(np.float32).copy())
    for backend in (reference, cpu):
        for quant_type in ("nf4", "fp4"):
            assert_quantized_as_defined(backend, weight, quant_type, 64)


@settings(max_examples=150, deadline=None)
@given(patterns=hypothesis_numpy.arrays(np.uint16, 64, elements=st.integers(0, 2**16 - 1)))
def test_any_half_precision_bits(patterns):
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.from_numpy(patterns.view(np.int16).copy()).view(dtype)
        for quant_type in ("nf4", "fp4"):
            assert_quantized_as_defined(reference, weight, quant_type, 32)
            assert_quantized_as_defined(cpu, weight, quant_type, 32)


@quant_types
@dtypes
def test_backends_agree_over_many_chunks(quant_type, dtype):
    weight = random_weight(1_500_001, dtype)
    weight[: special_weight(dtype, 64).numel()] = special_weight(dtype, 64)
    weight[1_000_000 : 1_000_000 + 4096] *= 1e-37
    left, right = quantize(reference, weight, quant_type), quantize(cpu, weight, quant_type)
    assert torch.equal(left[0], right[0])
    assert_same_bits(left[1], right[1])
    for out_dtype in INTEGER:
        decoded = [
            dequantize(backend, *left, weight.numel(), quant_type, out_dtype)
            for backend in (reference, cpu)
        ]
        assert_same_bits(*decoded)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_neither_bytes_nor_torch(threads):
    weight = random_weight(3_000_000, torch.bfloat16)
    expected = quantize(reference, weight, "nf4")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        packed, absmax = quantize(cpu, weight, "nf4")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(packed, expected[0])
    assert torch.equal(absmax, expected[1])


def compress(
    backend: ModuleType, absmax: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    blocks = -(-absmax.numel() // 256)
    codes, nested = (
        torch.full((absmax.numel() + 5,), 0xA5, dtype=torch.uint8),
        torch.full((blocks + 5,), -7.0),
    )
    offset = backend.compress_absmax(absmax, codes[: absmax.numel()], nested[:blocks])
    assert (codes[absmax.numel() :] == 0xA5).all()
    assert (nested[blocks:] == -7).all()
    assert offset.shape == ()
    return codes[: absmax.numel()], nested[:blocks], offset


@backends
def test_nested_codes(backend):
    for blocks, spread in product([1, 2, 255, 256, 257, 1000], [1.0, 1e-37, 1e-40, 1e38, 0.0]):
        absmax = torch.rand(blocks, generator=torch.Generator().manual_seed(blocks)) * spread + (
            spread == 0
        )
        codes, nested, offset = compress(backend, absmax)
        expected, maxima = scalar.compress(absmax.numpy(), np.float32(offset.item()))
        assert bytes(codes.tolist()) == expected
        assert_same_bits(nested, torch.from_numpy(maxima))
        assert_same_bits(offset, cuda_mean(absmax))


@backends
@pytest.mark.parametrize(
    "odd_one", [math.inf, -3.4028234663852886e38], ids=["infinity", "all-nan-block"]
)
def test_nested_codes_of_a_wrecked_offset(backend, odd_one):
    absmax = torch.rand(700)
    absmax[300] = odd_one
    codes, nested, offset = compress(backend, absmax)
    expected, maxima = scalar.compress(absmax.numpy(), np.float32(offset.item()))
    assert bytes(codes.tolist()) == expected
    assert_same_bits(nested, torch.from_numpy(maxima))


def nested_ties() -> torch.Tensor:
    """Quotients on every value and midpoint of the dynamic map, and an ulp to either side."""
    values = torch.tensor(DYNAMIC_MAP)
    points = torch.cat((values, (values[:-1] + values[1:]) * 0.5))
    return torch.cat(
        [points, points.nextafter(torch.tensor(-2.0)), points.nextafter(torch.tensor(2.0))]
    ).clamp(-1, 1)


def test_nested_search_at_every_tie():
    scaled = nested_ties()
    expected = [scalar.dynamic_code(np.float32(value)) for value in scaled.tolist()]
    assert torch.bucketize(scaled, dynamic_cuts(CPU)).tolist() == expected
    assert nearest_dynamic(scaled).tolist() == expected


@backends
@quant_types
def test_every_byte_decodes_to_two_values(backend, quant_type):
    decoded = dequantize(
        backend, torch.arange(256).to(torch.uint8), torch.full((8,), 3.0), 512, quant_type
    )
    values = np.array(CODEBOOKS[quant_type].values, dtype=np.float32)
    expected = np.array([[values[i >> 4], values[i & 15]] for i in range(256)]).reshape(
        -1
    ) * np.float32(3)
    assert decoded.tolist() == expected.tolist()


@backends
def test_signs_of_zero(backend):
    def is_negative(quant_type: str, byte: int, scale: float) -> list[bool]:
        packed = torch.full((32,), byte, dtype=torch.uint8)
        decoded = dequantize(backend, packed, torch.tensor([scale]), 64, quant_type)
        assert (decoded == 0).all()
        return decoded[:2].signbit().tolist()

    assert is_negative("fp4", 0x80, 2.0) == [True, False]
    assert is_negative("nf4", 0x7F, 0.0) == [False, False]
    assert is_negative("nf4", 0x00, 0.0) == [True, True]
    assert is_negative("nf4", 0x08, 1e-40) == [True, False]


@backends
@quant_types
@dtypes
def test_decoding_with_odd_scales(backend, quant_type, dtype):
    for scale in [1e-37, 2.0**-118, 1e-40, 3e38, math.inf, -math.inf, math.nan, 65504.0, 1e5, 7e-8]:
        packed = torch.arange(128).to(torch.uint8)
        scales = torch.tensor([1.0, scale, 0.5, scale])
        decoded = dequantize(backend, packed, scales, 256, quant_type, dtype)
        codes = torch.stack((packed >> 4, packed & 15), dim=1).view(-1).tolist()
        values = [np.float32(value) for value in CODEBOOKS[quant_type].values]
        if quant_type == "fp4":
            values[8] = np.float32(-0.0)
        products = [
            scalar.product(values[code], np.float32(scales[i // 64].item()))
            for i, code in enumerate(codes)
        ]
        expected = torch.tensor(np.array(products)).to(dtype)
        expected.view(INTEGER[dtype])[expected.isnan()] = torch.iinfo(INTEGER[dtype]).max
        assert_same_bits(decoded, expected)


@backends
@dtypes
def test_decoding_a_nested_state_rounds_three_times(backend, dtype):
    generator = torch.Generator().manual_seed(5)
    blocks, count = 600, 600 * 64 - 31
    packed = torch.randint(0, 256, (-(-count // 2),), dtype=torch.uint8, generator=generator)
    codes = torch.randint(0, 256, (blocks,), dtype=torch.uint8, generator=generator)
    nested, offset = torch.rand(3, generator=generator), torch.tensor(0.731)
    decoded = dequantize(
        backend,
        packed,
        codes,
        count,
        "nf4",
        dtype,
        nested=(nested, code_table("dynamic", CPU), offset),
    )
    table, values = np.array(DYNAMIC_MAP, np.float32), np.array(CODEBOOKS["nf4"].values, np.float32)
    scales = table[codes.numpy()] * nested.numpy()[np.arange(blocks) // 256] + np.float32(0.731)
    nibbles = torch.stack((packed >> 4, packed & 15), dim=1).view(-1)[:count].numpy()
    expected = torch.from_numpy(values[nibbles] * scales[np.arange(count) // 64]).to(dtype)
    assert_same_bits(decoded, expected)
