"""linear_4bit on a GPU: every kernel, every way round them, and bitsandbytes' own product beside
it.
"""

from collections.abc import Iterator

import pytest
import torch
from products import assert_close_to_exact, packed_weight

import nf4conv
from nf4conv.codec.quant_state import decoding_of
from nf4conv.inference.kernels.product import choosing, launches

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 300)


@pytest.fixture(params=["", "not Hopper"])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels for this GPU, then those for GPUs that are not Hopper."""
    if request.param:
        monkeypatch.setattr(launches, "is_hopper", lambda _: False)
    choosing.prepare_multiply.cache_clear()
    yield
    choosing.prepare_multiply.cache_clear()


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("blocksize", [32, 64, 128, 4096], ids="b{}".format)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_number(
    dtype: torch.dtype, quant_type: str, blocksize: int, nested: bool
) -> None:
    for n, k in ((1, 64), (7, 33), (70, 96), (200, 1088), (300, 192), (4096, 4160), (33, 14336)):
        packed, state = packed_weight(n, k, quant_type, blocksize, nested, "cuda")
        bias = torch.randn(n, device="cuda").to(dtype)
        for m in ROWS:
            x = torch.randn(m, k, device="cuda").to(dtype)
            assert_close_to_exact(
                nf4conv.linear_4bit(x, packed, state, bias), x, packed, state, bias
            )


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("blocksize", [32, 64], ids="b{}".format)
def test_one_row_or_two_in_registers(blocksize: int, nested: bool) -> None:
    """Weights of so many rows that x is held."""
    for n, k in ((4700, 1024), (6001, 4064), (6100, 4096), (5120, 5120)):
        packed, state = packed_weight(n, k, "nf4", blocksize, nested, "cuda")
        for m in (1, 2):
            x = torch.randn(m, k, device="cuda").bfloat16()
            assert_close_to_exact(nf4conv.linear_4bit(x, packed, state), x, packed, state)


@pytest.mark.parametrize(("n", "k"), [(5120, 5120), (6144, 4096), (11008, 4096)], ids=str)
def test_more_than_two_programs_on_a_multiprocessor(n: int, k: int) -> None:
    """Sizes for which balancing.py chooses them on an H200."""
    packed, state = packed_weight(n, k, device="cuda")
    for m in (5, 8, 16, 32):
        x = torch.randn(m, k, device="cuda").bfloat16()
        assert_close_to_exact(nf4conv.linear_4bit(x, packed, state), x, packed, state)


@pytest.mark.parametrize("m", [1, 3, 7, 40, 90])
@pytest.mark.parametrize("shift", [1, 8])
def test_x_of_any_layout(m: int, shift: int) -> None:
    packed, state = packed_weight(256, 512, device="cuda")
    line = torch.randn(m * 512 + shift, device="cuda").half()
    shifted, turned = line[shift:].view(m, 512), torch.randn(512, m, device="cuda").half().T
    for x in (shifted, turned, shifted.view(m, 1, 512).expand(m, 2, 512)):
        assert_close_to_exact(nf4conv.linear_4bit(x, packed, state), x, packed, state)


@pytest.mark.parametrize("m", [1, 4, 12, 50])
def test_a_weight_of_more_than_two_to_the_31(m: int) -> None:
    packed, state = packed_weight((1 << 18) + 24, 8256, device="cuda")
    x = torch.randn(m, 8256, device="cuda").bfloat16()
    out = nf4conv.linear_4bit(x, packed, state)
    weight = nf4conv.dequantize_4bit(packed, state)
    assert ((out - x @ weight.T).norm() / out.norm()).item() < 4e-3
    last = out[:, -8:].double() - x.double() @ weight[-8:].double().T
    assert (last.norm() / out[:, -8:].double().norm()).item() < 4e-3


@pytest.mark.parametrize(
    ("m", "size"), [(1, 4096), (1, 5120), (4, 4096), (16, 4096), (64, 4096)], ids=str
)
def test_what_came_just_before_is_seen(m: int, size: int) -> None:
    """A kernel begins before its predecessor ends. It must not read x or the weight too early."""
    weights = [packed_weight(size, size, device="cuda") for _ in range(2)]
    for _, state in weights:
        state.offset.fill_(0.0)
        state.state2.absmax.mul_(0.1)
    start = torch.randn(m, size, device="cuda").half()

    def chain(wait: bool) -> torch.Tensor:
        x = start
        for turn in range(12):
            packed, state = weights[turn % 2]
            packed.copy_((packed + turn) ^ (255 if turn % 3 else 0))
            if wait:
                torch.cuda.synchronize()
            x = nf4conv.linear_4bit(x, packed, state) + start
            if wait:
                torch.cuda.synchronize()
        return x

    before = [packed.clone() for packed, _ in weights]
    results = []
    for wait in (True, False, False, False):
        for (packed, _), original in zip(weights, before, strict=True):
            packed.copy_(original)
        results.append(chain(wait))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("m", [1, 12, 64, 200])
def test_runs_in_a_graph_and_compiled(m: int) -> None:
    packed, state = packed_weight(1024, 2048, device="cuda")
    x = torch.randn(m, 2048, device="cuda").bfloat16()
    expected = nf4conv.linear_4bit(x, packed, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = nf4conv.linear_4bit(x, packed, state)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    compiled = torch.compile(
        lambda x: nf4conv.linear_4bit(x, packed, state), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x), expected)


def test_gradient() -> None:
    packed, state = packed_weight(1024, 2048, device="cuda")
    x = torch.randn(5, 2048, device="cuda").bfloat16().requires_grad_()
    out = nf4conv.linear_4bit(x, packed, state)
    probe = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, x, probe)
    assert torch.equal(found, probe @ nf4conv.dequantize_4bit(packed, state, dtype=torch.bfloat16))


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_error_is_at_most_that_of_bitsandbytes(dtype: torch.dtype) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    squares = torch.zeros(2, dtype=torch.float64)
    for m in (1, 2, 4, 8, 16, 32, 64, 256):
        for n, k in ((1024, 4096), (4096, 1024)):
            weight = torch.randn(n, k, device="cuda").to(dtype) * 0.02
            packed, state = bitsandbytes.functional.quantize_4bit(
                weight, quant_type="nf4", compress_statistics=True
            )
            x = torch.randn(m, k, device="cuda").to(dtype)
            exact = (
                x.double() @ nf4conv.dequantize_4bit(packed, state, dtype=torch.float32).double().T
            )
            ours = nf4conv.linear_4bit(x, packed, state)
            theirs = bitsandbytes.matmul_4bit(x, packed.t(), state)
            errors = [
                ((out.double() - exact).norm() / exact.norm()).item() for out in (ours, theirs)
            ]
            squares += torch.tensor(errors, dtype=torch.float64) ** 2
            assert errors[0] <= 1.02 * errors[1], f"{m} rows: {errors}"
    print(
        f"{dtype}: root mean square over the suite {(squares[0] / squares[1]).sqrt().item():.3f} "
        f"of bitsandbytes'"
    )


def test_fused_kernels_are_what_runs() -> None:
    packed, state = packed_weight(256, 512, device="cuda")
    alignment = choosing.alignment_of(packed.data_ptr())
    matrix = choosing.Matrix(256, 512, decoding_of(state).form(), alignment)
    assert [choosing.has_kernel(matrix, dtype) for dtype in DTYPES] == [True, True, False]
