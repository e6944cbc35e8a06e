"""Packed experts decode as bitsandbytes decodes each of them, in both layouts."""

from collections.abc import Callable

import bitsandbytes.functional as bnb
import pytest
import torch

from nf4conv import quantize_4bit
from nf4conv.codec.quant_state import QuantState
from nf4conv.errors import CodecError
from nf4conv.inference.experts.packed import PackedExperts, decode, split_stack, stack_experts

EXPERTS = 5
ROWS = 24
COLUMNS = 192  # 72 blocks of 64 an expert: nested blocks of 256 run over experts' borders


def matrices(rows: int = ROWS) -> torch.Tensor:
    torch.manual_seed(rows)
    return torch.randn(EXPERTS, rows, COLUMNS) * 0.05


def quantized(
    matrix: torch.Tensor, quant_type: str, nested: bool, scales: str = "absmax"
) -> tuple[torch.Tensor, QuantState]:
    return quantize_4bit(matrix, quant_type, 64, nested, scales)


def oracle(packed: torch.Tensor, state: QuantState, dtype: torch.dtype) -> torch.Tensor:
    """Decodes by bitsandbytes."""
    nested = None
    if state.state2 is not None:
        nested = bnb.QuantState(
            absmax=state.state2.absmax, code=state.state2.code, blocksize=256, dtype=torch.float32
        )
    theirs = bnb.QuantState(
        absmax=state.absmax,
        shape=state.shape,
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=dtype,
        offset=state.offset,
        state2=nested,
    )
    return bnb.dequantize_4bit(packed, theirs)


def one_by_one(
    weights: torch.Tensor, quant_type: str, nested: bool, scales: str
) -> tuple[PackedExperts, Callable[[torch.dtype], torch.Tensor]]:
    made = [quantized(matrix, quant_type, nested, scales) for matrix in weights]
    packed = stack_experts([codes for codes, _ in made], [state for _, state in made])
    return packed, lambda dtype: torch.stack([oracle(*one, dtype) for one in made])


def as_a_stack(
    weights: torch.Tensor, quant_type: str, nested: bool, scales: str
) -> tuple[PackedExperts, Callable[[torch.dtype], torch.Tensor]]:
    codes, state = quantized(weights, quant_type, nested, scales)
    return split_stack(codes, state), lambda dtype: oracle(codes, state, dtype)


@pytest.mark.parametrize("scales", ["absmax", "search"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("layout", [one_by_one, as_a_stack])
def test_experts_decode_as_bitsandbytes_decodes_them(layout, quant_type, nested, scales):
    packed, expected = layout(matrices(), quant_type, nested, scales)
    if scales == "search" and quant_type == "nf4" and not nested:
        assert (packed.absmax < 0).any()
    ids = torch.tensor([3, 0, 3, 4])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        decoded = decode(packed, ids, dtype)
        assert decoded.dtype == dtype
        assert torch.equal(decoded, expected(dtype)[ids])


def test_a_last_block_may_be_shorter():
    weights = torch.randn(EXPERTS, 3, 36)
    packed, expected = one_by_one(weights, "nf4", True, "absmax")
    ids = torch.tensor([4, 1])
    assert torch.equal(decode(packed, ids, torch.float32), expected(torch.float32)[ids])


@pytest.mark.parametrize("nested", [False, True])
def test_its_tensors(nested):
    packed, _ = one_by_one(matrices(), "nf4", nested, "absmax")
    tensors = packed.tensors()
    names = ["codes", "absmax", "nested_absmax", "nested_quant_map", "nested_offset"]
    assert list(tensors) == (names if nested else names[:2])
    assert packed.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert packed.to("cpu") is packed
    assert packed.to("meta").device.type == "meta"


def test_what_does_not_belong_together_is_refused():
    weights = matrices()
    made = [quantized(matrix, "nf4", True) for matrix in weights]
    codes = [packed for packed, _ in made]
    states = [state for _, state in made]
    other_codes, other_state = quantized(matrices(rows=16)[0], "nf4", True)
    with pytest.raises(CodecError, match=r"expert 1 is 16 × 192 nf4.*but expert 0 24 × 192"):
        stack_experts([codes[0], other_codes], [states[0], other_state])
    with pytest.raises(CodecError, match=r"packed: .* bytes, expected"):
        stack_experts([codes[0][:-1], codes[1]], states[:2])
    with pytest.raises(CodecError, match="expected three dimensions"):
        split_stack(codes[0], states[0])
    odd_codes, odd_state = quantized(torch.randn(2, 3, 36), "nf4", True)
    with pytest.raises(CodecError, match="a block belongs to two"):
        split_stack(odd_codes, odd_state)
