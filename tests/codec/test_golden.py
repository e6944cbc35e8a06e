"""Every backend against bytes recorded from bitsandbytes CUDA: tests/golden/README.md says what
they are.

On a CPU the kernels run in Triton's interpreter, which truncates float32 → bfloat16: there they
decode to the others.
"""

import json
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from weights import DTYPES, spread_values

from nf4conv.codec import backends, cpu, reference
from nf4conv.codec.quant_state import Decoding, code_table
from nf4conv.codec.reduction import cuda_mean

# 1 / 0 is meant
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

GOLDEN = Path(__file__).parents[1] / "golden"
BACKENDS = {"reference": reference, "cpu": cpu}
if not backends.why_plain((9, 0)):
    from nf4conv.codec import kernels

    BACKENDS["kernels"] = kernels
VECTORS = {name: load_file(GOLDEN / f"{name}.safetensors") for name in DTYPES}
CASES = {
    name: [key.removesuffix("/packed") for key in vectors if key.endswith("/packed")]
    for name, vectors in VECTORS.items()
}
each = pytest.mark.parametrize(("dtype", "name"), [*product(VECTORS, BACKENDS)])


def device_of(backend: ModuleType) -> torch.device:
    return torch.device("cuda" if is_kernels(backend) and torch.cuda.is_available() else "cpu")


def is_kernels(backend: ModuleType) -> bool:
    return backend is BACKENDS.get("kernels")


def blocksize_of(case: str) -> int:
    return (
        64
        if case.startswith(("ties", "short"))
        else int(case.removeprefix("special-").split("-")[0].split("/")[0])
    )


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.cpu().view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


@each
def test_quantizes_to_the_recorded_bytes(name: str, dtype: str) -> None:
    backend, vectors = BACKENDS[name], VECTORS[dtype]
    for case in CASES[dtype]:
        device, (family, quant_type) = device_of(backend), case.split("/")
        weight = vectors[f"{family}/weight"].to(device)
        packed = torch.empty_like(vectors[f"{case}/packed"], device=device)
        absmax = torch.empty_like(vectors[f"{case}/absmax"], device=device)
        backend.quantize_blocks(weight, packed, absmax, quant_type, blocksize_of(case))
        assert same_bits(absmax, vectors[f"{case}/absmax"])
        assert same_bits(packed, vectors[f"{case}/packed"]), case


@each
def test_dequantizes_to_the_recorded_bytes(name: str, dtype: str) -> None:
    backend, vectors = BACKENDS[name], VECTORS[dtype]
    device = device_of(backend)
    if is_kernels(backend) and device.type == "cpu" and dtype == "bf16":
        pytest.skip("the interpreter truncates to bfloat16")
    for case in CASES[dtype]:
        expected = vectors[f"{case}/dequantized"]
        absmax, nested = vectors[f"{case}/absmax"].to(device), ()
        if f"{case}/codes" in vectors:
            absmax = vectors[f"{case}/codes"].to(device)
            nested = (
                vectors[f"{case}/nested_absmax"].to(device),
                code_table("dynamic", device),
                vectors[f"{case}/offset"].to(device),
            )
        out = torch.empty_like(expected, device=device)
        decoding = Decoding(absmax, case.split("/")[1], blocksize_of(case), *nested)
        backend.dequantize_blocks(vectors[f"{case}/packed"].to(device), decoding, out)
        finite = ~expected.isnan()
        assert torch.equal(out.cpu().isnan(), ~finite)
        assert same_bits(out.cpu()[finite], expected[finite]), case


@each
def test_compresses_absmax_to_the_recorded_bytes(name: str, dtype: str) -> None:
    backend, vectors = BACKENDS[name], VECTORS[dtype]
    for case in CASES[dtype]:
        if f"{case}/codes" not in vectors:
            assert case.startswith(("special", "ties"))
            continue
        device = device_of(backend)
        codes = torch.empty_like(vectors[f"{case}/codes"], device=device)
        nested_absmax = torch.empty_like(vectors[f"{case}/nested_absmax"], device=device)
        offset = backend.compress_absmax(vectors[f"{case}/absmax"].to(device), codes, nested_absmax)
        if is_kernels(backend) and device.type == "cpu":
            # its mean is torch's on the CPU, in another order than on a GPU
            assert offset.item() == pytest.approx(vectors[f"{case}/offset"].item(), rel=1e-6)
            continue
        assert same_bits(offset, vectors[f"{case}/offset"])
        assert same_bits(nested_absmax, vectors[f"{case}/nested_absmax"])
        assert same_bits(codes, vectors[f"{case}/codes"]), case


def test_mean_has_the_recorded_bits() -> None:
    recorded = json.loads((GOLDEN / "means.json").read_text())["means"]
    for count, bits in recorded.items():
        if int(count) <= 5_000_000:
            assert f"{cuda_mean(spread_values(int(count))).view(torch.int32).item():08x}" == bits, (
                count
            )
