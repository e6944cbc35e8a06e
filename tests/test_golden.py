"""The torch backends against bytes that bitsandbytes and torch made on a GPU (tests/golden/record.py)."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from weights import spread_values

from nf4conv.codec import cpu, reference
from nf4conv.codec.quant_state import NestedState, dynamic_table
from nf4conv.codec.reduction import cuda_mean

GOLDEN = Path(__file__).parent / "golden"
MEANS = json.loads((GOLDEN / "means.json").read_text())["means"]
VECTORS = {dtype: load_file(GOLDEN / f"{dtype}.safetensors") for dtype in ("f32", "f16", "bf16")}
CASES = [
    (dtype, *name.removesuffix("/packed").rsplit("/", 1))
    for dtype, vectors in VECTORS.items()
    for name in vectors
    if name.endswith("/packed")
]

backends = pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
cases = pytest.mark.parametrize(("dtype", "case", "quant_type"), CASES, ids=["-".join(case) for case in CASES])


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two contiguous tensors have the same type and the same bytes."""
    return left.dtype == right.dtype and torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8))


def blocksize_of(case: str) -> int:
    return {"special": 32, "ties": 64}.get(case.split("-")[0]) or int(case.split("-")[0])


def compress(backend: ModuleType, absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = torch.empty(absmax.numel(), dtype=torch.uint8)
    nested = torch.empty(-(-absmax.numel() // 256))
    offset = backend.compress_absmax(absmax, codes, nested)
    return codes, nested, offset


@backends
@cases
def test_quantized_as_on_the_gpu(backend, dtype, case, quant_type):
    vectors, prefix = VECTORS[dtype], f"{case}/{quant_type}"
    weight = vectors[f"{case}/weight"]
    packed = torch.empty(-(-weight.numel() // 2), dtype=torch.uint8)
    absmax = torch.empty(-(-weight.numel() // blocksize_of(case)))
    backend.quantize_blocks(weight, packed, absmax, quant_type, blocksize_of(case))
    assert same_bits(absmax, vectors[f"{prefix}/absmax"])
    assert torch.equal(packed, vectors[f"{prefix}/packed"])
    if f"{prefix}/codes" in vectors:
        codes, nested, offset = compress(backend, absmax)
        assert same_bits(offset, vectors[f"{prefix}/offset"])
        assert same_bits(nested, vectors[f"{prefix}/nested_absmax"])
        assert torch.equal(codes, vectors[f"{prefix}/codes"])


@backends
@cases
def test_decoded_as_on_the_gpu(backend, dtype, case, quant_type):
    vectors, prefix = VECTORS[dtype], f"{case}/{quant_type}"
    expected = vectors[f"{prefix}/dequantized"].view(-1)
    absmax, state2, offset = vectors[f"{prefix}/absmax"], None, None
    if f"{prefix}/codes" in vectors:
        absmax, offset = vectors[f"{prefix}/codes"], vectors[f"{prefix}/offset"]
        state2 = NestedState(vectors[f"{prefix}/nested_absmax"], dynamic_table(torch.device("cpu")))
    out = torch.empty_like(expected)
    packed = vectors[f"{prefix}/packed"]
    backend.dequantize_blocks(packed, absmax, state2, offset, out, quant_type, blocksize_of(case))
    assert same_bits(out, expected)


@pytest.mark.parametrize("count", [int(count) for count in MEANS])
def test_the_mean_as_on_an_h200(count):
    mean = cuda_mean(spread_values(count))
    assert f"{mean.view(torch.int32).item() & 0xFFFFFFFF:08x}" == MEANS[str(count)]
