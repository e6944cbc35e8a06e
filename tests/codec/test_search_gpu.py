"""Searched scales on a GPU: the bytes of the CPU, and what bitsandbytes' CUDA kernels make of
negative scales.

Run on a GPU with `pytest -m gpu`.
"""

import pytest
import torch
from weights import DTYPES, SPECIAL_BLOCKS, random_weight, special_weight, tie_weight

from nf4conv import dequantize_4bit, quantize_4bit
from nf4conv.codec.quant_state import QuantState

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
quant_types = pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
dtypes = pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))


def searched(
    weight: torch.Tensor, quant_type: str, blocksize: int, double_quant: bool
) -> list[torch.Tensor]:
    """The tensors that are stored, on the CPU, as bytes."""
    packed, state = quantize_4bit(weight, quant_type, blocksize, double_quant, scales="search")
    parts = [packed, state.absmax]
    if state.state2 is not None and state.offset is not None:
        parts += [state.state2.absmax, state.offset]
    return [part.cpu().contiguous().view(-1).view(torch.uint8) for part in parts]


def assert_same_on_the_cpu(
    weight: torch.Tensor, quant_type: str, blocksize: int, double_quant: bool = False
) -> None:
    expected = searched(weight, quant_type, blocksize, double_quant)
    found = searched(weight.to(CUDA), quant_type, blocksize, double_quant)
    assert [int((ours != theirs).sum()) for ours, theirs in zip(found, expected, strict=True)] == [
        0
    ] * len(found)


@pytest.mark.parametrize("blocksize", [32, 64, 128, 4096], ids="b{}".format)
@quant_types
@dtypes
def test_bytes_are_those_of_the_cpu(quant_type, dtype, blocksize):
    for elements in (7, 4096, blocksize * 3 + 5, (1 << 22) + 8):
        assert_same_on_the_cpu(
            random_weight(elements, dtype, seed=elements), quant_type, blocksize, True
        )
    for tail in ("", "nan", *list(SPECIAL_BLOCKS)[:3]):
        assert_same_on_the_cpu(special_weight(dtype, blocksize, tail), quant_type, blocksize)
    assert_same_on_the_cpu(tie_weight(dtype, blocksize, quant_type), quant_type, blocksize)


@quant_types
@pytest.mark.parametrize("blocksize", [32, 64, 4096], ids="b{}".format)
@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
def test_bitsandbytes_decodes_them(quant_type, blocksize, double_quant):
    weight = torch.randn(
        1024, 4096, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1)
    ).bfloat16()
    packed, state = quantize_4bit(weight, quant_type, blocksize, double_quant, scales="search")
    decoded = dequantize_4bit(packed, state)
    theirs = pytest.importorskip("bitsandbytes.functional").dequantize_4bit(
        packed, theirs_of(state)
    )
    assert int((decoded.view(torch.int16) != theirs.view(torch.int16)).sum()) == 0
    if quant_type == "nf4":
        assert double_quant or 0.2 < float((state.absmax < 0).float().mean()) < 0.8


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("blocksize", [32, 64], ids="b{}".format)
def test_products_of_bitsandbytes_are_those_of_the_decoded_weight(rows, blocksize):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    generator = torch.Generator(CUDA).manual_seed(2)
    weight = torch.randn(1024, 4096, device=CUDA, generator=generator).bfloat16()
    x = torch.randn(rows, 4096, device=CUDA, generator=generator).bfloat16()
    packed, state = quantize_4bit(weight, "nf4", blocksize, scales="search")
    product = bitsandbytes.matmul_4bit(x, packed.t(), theirs_of(state)).double()
    exact = x.double() @ dequantize_4bit(packed, state, dtype=torch.float32).double().t()
    assert float((product - exact).norm() / exact.norm()) < 0.005  # bfloat16 has 8 bits


def theirs_of(state: QuantState) -> object:
    """bitsandbytes' own state of the same tensors."""
    theirs = pytest.importorskip("bitsandbytes.functional").QuantState
    nested = None
    if state.state2 is not None:
        nested = theirs(
            state.state2.absmax, code=state.state2.code, blocksize=256, dtype=torch.float32
        )
    fields = state.absmax, state.shape, state.code, state.blocksize, state.quant_type, state.dtype
    return theirs(*fields, offset=state.offset, state2=nested)
