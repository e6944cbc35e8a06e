"""The compiled kernels against bitsandbytes CUDA: every byte equal.

Run on a GPU with `pytest -m gpu`. bitsandbytes launches its quantizer on the legacy default stream,
as do these tests.
"""

import numpy as np
import pytest
import torch
from batched import means_of
from four_bit import error_sums
from weights import DTYPES, SPECIAL_BLOCKS, random_weight, special_weight, spread_values, tie_weight

from nf4conv.codec import kernels, ops
from nf4conv.codec.quant_state import Decoding, code_table
from nf4conv.format.codebook import BLOCKSIZES

pytestmark = pytest.mark.gpu

QUANT_TYPES = ("nf4", "fp4")
CUDA = torch.device("cuda", 0)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    different = (bits(ours) != bits(theirs)).sum().item()
    assert different == 0, f"{different} of {bits(ours).numel()} bytes differ"


def assert_equals_bitsandbytes(
    weight: torch.Tensor, quant_type: str, blocksize: int, double_quant: bool
) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = ops.quantize_4bit(weight, quant_type, blocksize, double_quant)
    theirs, their_state = functional.quantize_4bit(
        weight, blocksize=blocksize, compress_statistics=double_quant, quant_type=quant_type
    )
    assert_same_bits(packed, theirs)
    assert_same_bits(state.absmax, their_state.absmax)
    if double_quant:
        assert_same_bits(state.offset, their_state.offset)
        assert_same_bits(state.state2.absmax, their_state.state2.absmax)
        assert_same_bits(state.state2.code, their_state.state2.code)
    decoded = functional.dequantize_4bit(theirs, their_state)
    assert_same_bits(ops.dequantize_4bit(packed, state), decoded)
    assert_same_bits(ops.dequantize_4bit(theirs, their_state), decoded)


@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_random_weights_of_any_size(
    quant_type: str, dtype: str, blocksize: int, double_quant: bool
) -> None:
    sizes = (2, 7, 63, 64, 65, 1000, 4096, 8192 + 8, 8192 * 3 + 5, 256 * blocksize + 1, 1 << 20)
    for elements in sizes:
        weight = random_weight(elements, DTYPES[dtype], seed=elements).to(CUDA)
        assert_equals_bitsandbytes(weight, quant_type, blocksize, double_quant)


@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_special_blocks(quant_type: str, dtype: str, blocksize: int) -> None:
    for tail in ("", *SPECIAL_BLOCKS):
        weight = special_weight(DTYPES[dtype], blocksize, tail).to(CUDA)
        assert_equals_bitsandbytes(weight, quant_type, blocksize, False)


@pytest.mark.parametrize("blocksize", [32, 64, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_quotients_on_a_cut(quant_type: str, dtype: str, blocksize: int) -> None:
    assert_equals_bitsandbytes(
        tie_weight(DTYPES[dtype], blocksize, quant_type).to(CUDA), quant_type, blocksize, False
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_two_to_the_thirty_elements(quant_type: str, dtype: str) -> None:
    generator = torch.Generator(CUDA).manual_seed(7)
    for _ in range(4):
        weight = torch.randn(1 << 28, device=CUDA, generator=generator, dtype=torch.float32)
        weight = (weight * 0.02 * (1 + 8 * (weight.abs() > 3.5))).to(DTYPES[dtype])
        assert_equals_bitsandbytes(weight, quant_type, 64, True)


@pytest.mark.parametrize("nested_kind", ["random-bytes", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_dequantize_any_bytes(quant_type: str, dtype: str, nested_kind: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    elements, blocksize = 64 * 100_003, 64
    generator = torch.Generator(CUDA).manual_seed(3)
    packed = torch.randint(
        256, (elements // 2, 1), device=CUDA, generator=generator, dtype=torch.uint8
    )
    blocks = elements // blocksize
    state = functional.QuantState(
        absmax=torch.rand(blocks, device=CUDA, generator=generator)
        * 10.0 ** torch.randint(-40, 38, (blocks,), device=CUDA),
        shape=torch.Size([elements]),
        dtype=DTYPES[dtype],
        blocksize=blocksize,
        quant_type=quant_type,
        code=functional.get_4bit_type(quant_type, device="cuda"),
    )
    if nested_kind == "random-bytes":
        nested = torch.rand(-(-blocks // 256), device=CUDA, generator=generator)
        state.state2 = functional.QuantState(
            absmax=nested, blocksize=256, code=code_table("dynamic", CUDA), dtype=torch.float32
        )
        state.absmax = torch.randint(
            256, (blocks,), device=CUDA, generator=generator, dtype=torch.uint8
        )
        state.offset = torch.tensor(0.0871, device=CUDA)
        state.nested = True
    assert_same_bits(ops.dequantize_4bit(packed, state), functional.dequantize_4bit(packed, state))


def test_more_than_two_to_the_thirty_one_elements() -> None:
    """bitsandbytes cannot; a long weight must equal its pieces."""
    elements = (1 << 31) + 64 * 40 + 8
    weight = torch.empty(elements, dtype=torch.bfloat16, device=CUDA)
    for start in range(0, elements, 1 << 28):
        weight[start : start + (1 << 28)].normal_(std=0.02)
    packed, state = ops.quantize_4bit(weight, double_quant=True)
    start = (1 << 31) - (1 << 20)
    piece, piece_state = ops.quantize_4bit(weight[start:], double_quant=False)
    assert_same_bits(packed[start // 2 :], piece)
    out = ops.dequantize_4bit(packed, state)
    codes = state.absmax[start // 64 :]
    nested_absmax = state.state2.absmax[start // 64 // 256 :].repeat_interleave(256)
    scales = state.state2.code[codes.int()] * nested_absmax[: codes.numel()]
    piece_state.absmax = scales + state.offset
    assert_same_bits(out[start:], ops.dequantize_4bit(piece, piece_state))
    sums = error_sums(weight, packed, state)
    assert sums.outside == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_misaligned_and_odd_pieces_equal_the_whole(quant_type: str, dtype: str) -> None:
    weight = random_weight(64 * 200 + 3, DTYPES[dtype]).to(CUDA)
    whole, state = ops.quantize_4bit(weight, quant_type, 64, False)
    shifted = torch.empty(weight.numel() + 1, dtype=weight.dtype, device=CUDA)[1:]
    shifted.copy_(weight)
    packed = torch.zeros(whole.numel() + 3, dtype=torch.uint8, device=CUDA)[3:]
    absmax = torch.zeros(state.absmax.numel(), device=CUDA)
    for start, stop in ((0, 64 * 7), (64 * 7, 64 * 100), (64 * 100, weight.numel())):
        kernels.quantize_blocks(
            shifted[start:stop],
            packed[start // 2 : -(-stop // 2)],
            absmax[start // 64 : -(-stop // 64)],
            quant_type,
            64,
        )
    assert_same_bits(packed, whole)
    assert_same_bits(absmax, state.absmax)
    out = torch.zeros(weight.numel() + 1, dtype=weight.dtype, device=CUDA)[1:]
    kernels.dequantize_blocks(packed, Decoding(absmax, quant_type, 64), out)
    assert_same_bits(out, ops.dequantize_4bit(whole, state))


def test_batch_means_are_torchs() -> None:
    counts = np.array([1, 3, 127, 128, 255, 4097, 30_000, 130_557, 130_560])
    counts = np.append(counts, [130_561, 200_000, 300_007, 917_504, 1_000_003, 5_000_000])
    offsets = np.concatenate([[0], np.cumsum(-(-counts // 4) * 4)[:-1]])
    values = spread_values(int(offsets[-1] + counts[-1])).to(CUDA)
    for offset, count, found in zip(
        offsets.tolist(), counts.tolist(), means_of(values, offsets, counts), strict=True
    ):
        assert_same_bits(found, values[offset : offset + count].clone().mean())


def test_uses_the_current_stream_of_the_calling_thread() -> None:
    weight = random_weight(1 << 22, torch.bfloat16).to(CUDA)
    expected, _ = ops.quantize_4bit(weight)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(weight)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(weight)
        packed, _ = ops.quantize_4bit(late)
    stream.synchronize()
    assert_same_bits(packed, expected)
