"""Searched scales: every backend against an element-at-a-time definition, and that against what it
promises.
"""

from types import ModuleType

import hypothesis.extra.numpy as hypothesis_numpy
import numpy as np
import pytest
import scalar
import torch
from batched import quantize_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from weights import DTYPES, random_weight, special_weight, tie_weight

from nf4conv import CodecError, dequantize_4bit, quantize_4bit
from nf4conv.codec import cpu, kernels, reference
from nf4conv.codec.quant_state import Decoding
from nf4conv.codec.search import FACTORS, GROUP, nearest_levels
from nf4conv.format.codebook import BLOCKSIZES, CODEBOOKS

# 1 / 0 is meant
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Of the kernels; without a GPU Triton's interpreter runs them."""

BACKENDS = {"reference": reference, "cpu": cpu, "kernels": kernels}
backends = pytest.mark.parametrize("backend", list(BACKENDS.values()), ids=list(BACKENDS))
quant_types = pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
dtypes = pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))


def search(
    backend: ModuleType, weight: torch.Tensor, quant_type: str, blocksize: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes and scales, written into poisoned outputs that are longer than needed."""
    device = DEVICE if backend is kernels else torch.device("cpu")
    count, blocks = -(-weight.numel() // 2), -(-weight.numel() // blocksize)
    packed = torch.full((count + 9,), 0xA5, dtype=torch.uint8, device=device)
    scales = torch.full((blocks + 9,), -7.0, device=device)
    outputs = (packed[:count], scales[:blocks])
    backend.quantize_blocks(weight.to(device), *outputs, quant_type, blocksize, searches=True)
    assert (packed[count:] == 0xA5).all()
    assert (scales[blocks:] == -7).all()
    return packed[:count].cpu(), scales[:blocks].cpu()


def assert_same(
    found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    assert torch.equal(found[1].view(torch.int32), expected[1].view(torch.int32))
    assert torch.equal(found[0], expected[0])


def decoded(
    packed: torch.Tensor, scales: torch.Tensor, count: int, quant_type: str, blocksize: int
) -> torch.Tensor:
    out = torch.empty(count, dtype=torch.float32)
    reference.dequantize_blocks(packed, Decoding(scales, quant_type, blocksize), out)
    return out


def block_errors(weight: torch.Tensor, decoded: torch.Tensor, blocksize: int) -> torch.Tensor:
    """[blocks] float64, the sums of squares."""
    squares = (weight.double() - decoded.double()).square()
    return (
        torch.nn.functional.pad(squares, (0, -squares.numel() % blocksize))
        .view(-1, blocksize)
        .sum(dim=1)
    )


@backends
@quant_types
def test_ordinary_blocks_are_as_defined(backend, quant_type):
    for blocksize, blocks in [(32, 9), (64, 5), (128, 3), (512, 1)]:
        weight = random_weight(blocksize * blocks - 13, torch.float32, seed=blocksize)
        packed, scales = search(backend, weight, quant_type, blocksize)
        expected, expected_scales = scalar.search(weight.numpy(), quant_type, blocksize)
        assert_same(
            (packed, scales),
            (torch.tensor(list(expected), dtype=torch.uint8), torch.from_numpy(expected_scales)),
        )
        assert (scales.numpy() != scalar.quantize(weight.numpy(), quant_type, blocksize)[1]).any()


@quant_types
@dtypes
def test_special_blocks_are_as_defined(quant_type, dtype):
    weight = special_weight(dtype, 64, "all-nan")
    expected, expected_scales = scalar.search(weight.float().numpy(), quant_type, 64)
    found = search(reference, weight, quant_type, 64)
    assert_same(
        found, (torch.tensor(list(expected), dtype=torch.uint8), torch.from_numpy(expected_scales))
    )


@pytest.mark.parametrize("backend", [cpu, kernels], ids=["cpu", "kernels"])
@quant_types
@dtypes
def test_special_blocks_and_ties_are_those_of_the_reference(backend, quant_type, dtype):
    for blocksize in [32, 1024]:
        for weight in (
            special_weight(dtype, blocksize, "nan"),
            tie_weight(dtype, blocksize, quant_type)[:-3],
        ):
            for piece in (weight, weight[: blocksize // 2 + 1]):
                expected = search(reference, piece, quant_type, blocksize)
                assert_same(search(backend, piece, quant_type, blocksize), expected)


HOSTILE = hypothesis_numpy.arrays(
    np.float32,
    st.integers(1, 300),
    elements=st.one_of(
        st.floats(width=32),
        st.floats(-1, 1, width=32),
        st.sampled_from(
            [0.0, 1.0, -1.0, 0.5, -0.5, 2.0**-100, -(2.0**100), 1e-30, *CODEBOOKS["nf4"].values]
        ),
    ),
)


@given(
    HOSTILE,
    st.sampled_from(["nf4", "fp4"]),
    st.sampled_from([32, 64, 128]),
    st.sampled_from(list(DTYPES.values())),
)
@settings(max_examples=150, deadline=None)
def test_no_block_is_worse_than_with_its_absmax(values, quant_type, blocksize, dtype):
    """And the fast path has the bytes of the reference, whatever it is given."""
    weight = torch.from_numpy(values).to(dtype)
    packed, scales = search(cpu, weight, quant_type, blocksize)
    assert_same((packed, scales), search(reference, weight, quant_type, blocksize))
    absmax, codes = torch.empty_like(scales), torch.empty_like(packed)
    reference.quantize_blocks(weight, codes, absmax, quant_type, blocksize)
    found = block_errors(
        weight, decoded(packed, scales, weight.numel(), quant_type, blocksize), blocksize
    )
    kept = block_errors(
        weight, decoded(codes, absmax, weight.numel(), quant_type, blocksize), blocksize
    )
    assert not (found > kept).any()
    unchanged = (scales == absmax).repeat_interleave(blocksize // 2)[: packed.numel()]
    assert torch.equal(packed[unchanged], codes[unchanged])


@quant_types
def test_threads_give_the_bytes_of_one(quant_type):
    weight = random_weight(1 << 20, torch.float16)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(search(cpu, weight, quant_type, 64))
    torch.set_num_threads(before)
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


@quant_types
def test_many_weights_in_one_launch_have_the_bytes_of_each(quant_type):
    weights = [
        random_weight(elements, torch.bfloat16, seed=elements)
        for elements in (64, 8192, 5003, 0, 4096)
    ]
    found = quantize_batch([weight.to(DEVICE) for weight in weights], quant_type, 64, search=True)
    for weight, encoded in zip(weights, found, strict=True):
        assert_same(
            (encoded.packed.cpu(), encoded.absmax.cpu()), search(reference, weight, quant_type, 64)
        )


def student(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return (
        torch.randn(count, generator=generator)
        / torch.randn(5, count, generator=generator).square().mean(0).sqrt()
    )


def exhaustive_error(blocks: torch.Tensor, quant_type: str) -> float:
    """Σ over blocks of the least squared error of 64 factors of absmax from 0.7 to 1.1, and as many
    below zero.
    """
    values = torch.tensor(sorted(set(CODEBOOKS[quant_type].values)))
    middles = (values[1:] + values[:-1]) / 2
    absmax = blocks.abs().amax(dim=1, keepdim=True)
    errors = []
    factors = torch.linspace(0.7, 1.1, 64)
    for factor in torch.cat((factors, -factors)).tolist():
        scale = absmax * factor
        errors.append(
            (blocks - scale * values[torch.bucketize(blocks / scale, middles)]).square().sum(dim=1)
        )
    return float(torch.stack(errors).amin(dim=0).double().sum())


@quant_types
@pytest.mark.parametrize("blocksize", [32, 64, 256, 4096], ids="b{}".format)
@pytest.mark.parametrize("kind", ["normal", "student"])
def test_the_search_comes_near_an_exhaustive_one(quant_type, blocksize, kind):
    count = 1 << 17
    weight = student(count)
    if kind == "normal":
        weight = torch.randn(count, generator=torch.Generator().manual_seed(0))
    packed, scales = search(cpu, weight, quant_type, blocksize)
    error = block_errors(
        weight, decoded(packed, scales, count, quant_type, blocksize), blocksize
    ).sum()
    assert error <= 1.005 * exhaustive_error(weight.view(-1, blocksize), quant_type)


@quant_types
def test_sums_of_a_group_are_exact_in_float32(quant_type):
    """Whatever the positions are: so the order of additions cannot matter."""
    levels = nearest_levels(quant_type).astype(np.int64)
    positions = np.arange(-1024, 1025)
    assert np.square(positions - levels).max() * GROUP <= 2**24
    assert np.abs((positions - levels) * levels).max() * GROUP <= 2**24
    assert (np.square(levels) // 16).max() * GROUP <= 2**24
    assert np.square(levels).max() // 16 * max(BLOCKSIZES) < 2**31
    assert min(FACTORS) == 0.5  # the error of an absmax of 2 is then 1 at most, in cost 2^18


@quant_types
@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
def test_quantize_4bit_searches_when_asked(quant_type, double_quant):
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    errors = []
    for scales in ("absmax", "search"):
        packed, state = quantize_4bit(weight, quant_type, 64, double_quant, scales=scales)
        errors.append(float((dequantize_4bit(packed, state).float() - weight.float()).norm()))
    assert errors[1] < 0.97 * errors[0]
    assert double_quant or (quant_type == "fp4") == bool((state.absmax >= 0).all())


def test_other_scales_are_refused():
    with pytest.raises(CodecError, match="unknown scales 'best'; expected one of absmax, search"):
        quantize_4bit(torch.ones(64), scales="best")
