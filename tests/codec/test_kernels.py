"""The kernels against the reference, byte for byte, in Triton's interpreter where there is no GPU.

The interpreter truncates float32 → bfloat16 where a GPU rounds, so it decodes to float16 and
float32 only.
"""

import numpy as np
import pytest
import torch
from batched import means_of, quantize_batch
from four_bit import sums_of
from weights import DTYPES, SPECIAL_BLOCKS, random_weight, spread_values

from nf4conv.codec import kernels, ops, reference
from nf4conv.codec.kernels import tables, vectors
from nf4conv.codec.kernels.packing import nested
from nf4conv.codec.quant_state import Decoding, code_table, decoding_of
from nf4conv.codec.reduction import cuda_mean
from nf4conv.codec.reference.dequantize import decoded_absmax
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP

# 1 / 0 is meant
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

QUANT_TYPES = ("nf4", "fp4")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8).cpu()


def quantized(
    backend: object, weight: torch.Tensor, quant_type: str, blocksize: int
) -> list[torch.Tensor]:
    """packed and absmax, in poisoned buffers that are longer than needed."""
    packed = torch.full(
        (-(-weight.numel() // 2) + 5,), 0xAB, dtype=torch.uint8, device=weight.device
    )
    absmax = torch.full((-(-weight.numel() // blocksize) + 3,), -7.0, device=weight.device)
    backend.quantize_blocks(weight, packed[:-5], absmax[:-3], quant_type, blocksize)
    return [packed, absmax]


def assert_quantizes_like_the_reference(
    weight: torch.Tensor, quant_type: str, blocksize: int
) -> None:
    ours = quantized(kernels, weight.to(DEVICE), quant_type, blocksize)
    for found, expected in zip(
        ours, quantized(reference, weight, quant_type, blocksize), strict=True
    ):
        assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("blocksize", [32, 64, 4096], ids="b{}".format)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_quantize_any_size(quant_type: str, dtype: str, blocksize: int) -> None:
    for elements in [1, 64, 4096, 8192 + 8, 5003]:
        assert_quantizes_like_the_reference(
            random_weight(elements, DTYPES[dtype]), quant_type, blocksize
        )


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_dequantize(quant_type: str, dtype: str, nested: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    for elements, blocksize in ((64 * 300, 64), (5003, 32), (4096 * 3 + 8, 4096)):
        packed = torch.randint(256, (-(-elements // 2),), generator=generator, dtype=torch.uint8)
        blocks = -(-elements // blocksize)
        absmax = torch.rand(blocks, generator=generator) * 10.0 ** torch.randint(
            -40, 30, (blocks,), generator=generator
        )
        absmax[0] = 0.0
        nested_tensors = []
        if nested:
            absmax = torch.randint(256, (blocks,), generator=generator, dtype=torch.uint8)
            nested_absmax = torch.rand(-(-blocks // 256), generator=generator)
            code = code_table("dynamic", torch.device("cpu"))
            nested_tensors = [nested_absmax, code, torch.tensor(0.0871)]
        expected = torch.empty(elements, dtype=DTYPES[dtype])
        decoding = Decoding(absmax, quant_type, blocksize, *nested_tensors)
        reference.dequantize_blocks(packed, decoding, expected)
        out = torch.full((elements + 9,), 9.0, dtype=DTYPES[dtype], device=DEVICE)
        nested_tensors = [tensor.to(DEVICE) for tensor in nested_tensors]
        decoding = Decoding(absmax.to(DEVICE), quant_type, blocksize, *nested_tensors)
        kernels.dequantize_blocks(packed.to(DEVICE), decoding, out[:elements])
        assert torch.equal(bits(out[:elements]), bits(expected))
        assert (out[elements:] == 9).all()


@pytest.mark.parametrize("blocks", [1, 255, 256, 257, 1500])
def test_compress_absmax_codes(blocks: int) -> None:
    absmax = random_weight(blocks, torch.float32).abs().to(DEVICE)
    codes = torch.zeros(blocks, dtype=torch.uint8, device=DEVICE)
    nested_absmax = torch.zeros(-(-blocks // 256), device=DEVICE)
    offset = kernels.compress_absmax(absmax, codes, nested_absmax)
    difference = torch.nn.functional.pad(absmax - offset, (0, -blocks % 256)).view(-1, 256)
    peaks = difference.abs().amax(1)
    assert torch.equal(bits(nested_absmax), bits(peaks))
    quotient = (difference * (1 / peaks)[:, None]).view(-1)[:blocks].double().cpu()
    values = torch.tensor(DYNAMIC_MAP, dtype=torch.float64)
    distance = (quotient[:, None] - values).abs()
    chosen = distance.gather(1, codes.cpu().long()[:, None])[:, 0]
    assert (
        (chosen <= distance.amin(1) + 1e-7)
        .logical_or(peaks.repeat_interleave(256)[:blocks].cpu() == 0)
        .all()
    )


def test_ties_between_nested_codes_go_to_the_even_code() -> None:
    middles = tables.middle_table(DEVICE)[:8].t().flatten()[:255]
    # symmetric about zero and with a one, so that the mean is zero and the reciprocal is exact
    values = torch.cat([middles, -middles, torch.tensor([1.0, -1.0], device=DEVICE)])
    codes = torch.zeros(values.numel(), dtype=torch.uint8, device=DEVICE)
    nested_absmax = torch.zeros(2, device=DEVICE)
    padded = torch.zeros(512, device=DEVICE)
    padded[:255], padded[255] = middles, 1.0
    nested._launch(
        1,
        (
            padded,
            torch.zeros((), device=DEVICE),
            codes[:256],
            nested_absmax,
            tables.middle_table(DEVICE),
            256,
        ),
        (DEVICE.type == "cuda",),
        None,
        nested.NUM_WARPS,
    )
    expected = [index if index % 2 == 0 else index + 1 for index in range(255)]
    assert codes[:255].tolist() == expected
    assert codes[255].item() == 255


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_no_bucket_holds_two_cuts_and_none_is_near_an_edge(quant_type: str) -> None:
    book = CODEBOOKS[quant_type]
    positions = [15.25 * cut if book.signed_cuts else 16 * cut for cut in book.cuts]
    assert len({round(position) for position in positions}) == len(positions)
    assert min(abs(abs(position - round(position)) - 0.5) for position in positions) > 0.04
    table = tables.bucket_table(quant_type, torch.device("cpu"))
    assert table.shape == (64 + 3 * 128,)
    assert table[63] == 0


def test_mean_kernel_repeats_torchs_order() -> None:
    counts = np.array([1, 2, 5, 31, 33, 100, 127, 128, 129, 131, 1000, 2047, 2048, 4099, 20_003])
    offsets = np.concatenate([[0], np.cumsum(-(-counts // 4) * 4)[:-1]])
    values = spread_values(int(offsets[-1] + counts[-1])).to(DEVICE)
    means = means_of(values, offsets, counts)
    expected = [
        cuda_mean(values[start : start + count].cpu())
        for start, count in zip(offsets, counts, strict=True)
    ]
    assert torch.equal(means.cpu(), torch.stack(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_batch_equals_one_by_one(quant_type: str, dtype: str) -> None:
    weights = [
        random_weight(n, DTYPES[dtype], seed=n).to(DEVICE) for n in (64, 4096, 0, 1000, 7, 8192, 0)
    ]
    for weight, found in zip(weights, quantize_batch(weights, quant_type, 64), strict=True):
        if not weight.numel():
            continue
        packed, absmax = (
            part[:-p]
            for part, p in zip(quantized(kernels, weight, quant_type, 64), (5, 3), strict=True)
        )
        codes, nested_absmax = (
            torch.zeros_like(absmax, dtype=torch.uint8),
            torch.zeros(1, device=DEVICE),
        )
        offset = cuda_mean(absmax)
        nested._launch(
            1,
            (absmax, offset, codes, nested_absmax, tables.middle_table(DEVICE), absmax.numel()),
            (DEVICE.type == "cuda",),
            None,
            nested.NUM_WARPS,
        )
        for part, expected in zip(
            found, (packed, absmax, codes, nested_absmax, offset), strict=True
        ):
            assert torch.equal(part, expected)


@pytest.mark.parametrize("words", [1, 8191, 8192, 8193, 3 * 8192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_search_for_non_finite_values_sees_every_word(dtype: str, words: int) -> None:
    values = random_weight(words * 4 // DTYPES[dtype].itemsize, DTYPES[dtype]).to(DEVICE)

    def found() -> bool:
        flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        mask, halves = vectors.exponent_mask(values.dtype), values.itemsize == 2
        grid = (-(-words // vectors.FINITE_TILE.value),)
        vectors.non_finite_kernel[grid](values.view(torch.int32), flag, words, mask, halves)
        return bool(flag)

    assert not found()
    for index in {0, 1 % values.numel(), values.numel() // 2, values.numel() - 1}:
        for value in (torch.nan, torch.inf, -torch.inf):
            before, values[index] = values[index].clone(), value
            assert found()
            values[index] = before
    values[:] = torch.finfo(values.dtype).max
    assert not found()


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_error_sums(quant_type: str, dtype: str, nested: bool) -> None:
    for elements in (4096 * 6, 5003, 64 * 70 + 8):  # several programs; less than one
        weight = random_weight(elements, DTYPES[dtype]).to(DEVICE)
        packed, state = ops.quantize_4bit(weight, quant_type, 64, nested)
        sums = sums_of(kernels, weight, packed.view(-1), decoding_of(state))
        error = weight.float() - ops.dequantize_4bit(packed, state, dtype=torch.float32)
        assert sums.max_error == error.abs().max().item()
        assert sums.squared_error == pytest.approx(error.double().square().sum().item(), rel=1e-12)
        assert sums.squared_weight == pytest.approx(
            weight.double().square().sum().item(), rel=1e-12
        )
        absmax = decoded_absmax(decoding_of(state))
        peaks = torch.nn.functional.pad(error.abs(), (0, -elements % 64)).view(-1, 64).amax(1)
        assert sums.max_relative_error == (peaks / absmax)[absmax > 0].max().item()
        assert sums.outside == 0
        packed[elements // 4] ^= 0x88
        assert sums_of(kernels, weight, packed.view(-1), decoding_of(state)).outside > 0


@pytest.mark.parametrize("name", SPECIAL_BLOCKS)
def test_error_bound_fails_only_where_the_format_does(name: str) -> None:
    weight = torch.full((64,), 0.5)
    SPECIAL_BLOCKS[name](weight)
    weight = weight.to(DEVICE)
    packed, absmax = (
        part[:-p] for part, p in zip(quantized(kernels, weight, "nf4", 64), (5, 3), strict=True)
    )
    outside = sums_of(kernels, weight, packed, Decoding(absmax, "nf4", 64)).outside
    broken = name in {"above-two-to-the-126"} or "nan" in name or "infinity" in name
    assert (outside > 0) == broken
