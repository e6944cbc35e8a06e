"""The codec's public functions: what they refuse, and how they behave under torch.compile."""

import pytest
import torch
from four_bit import error_sums
from weights import random_weight

from nf4conv.codec import backends, cpu, ops, reference
from nf4conv.codec.quant_state import NestedState, QuantState
from nf4conv.errors import CodecError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def quantized(double_quant: bool = True) -> tuple[torch.Tensor, QuantState]:
    return ops.quantize_4bit(
        random_weight(96 * 64, torch.float32).view(96, 64).to(DEVICE), double_quant=double_quant
    )


def test_out_is_returned_and_dtype_respected() -> None:
    packed, state = quantized()
    out = torch.empty(96, 64, dtype=torch.float16, device=DEVICE)
    assert ops.dequantize_4bit(packed, state, out=out) is out
    assert torch.equal(ops.dequantize_4bit(packed, state, dtype=torch.float16), out)
    assert ops.dequantize_4bit(packed, state).dtype == torch.float32


def test_packed_may_be_viewed_as_another_dtype() -> None:
    packed, state = quantized()
    for storage in (torch.bfloat16, torch.float32):
        view = packed.view(-1).view(storage).view(-1, 1)
        assert torch.equal(ops.dequantize_4bit(view, state), ops.dequantize_4bit(packed, state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scales", ["absmax", "search"])
def test_a_parameter_is_quantized_as_its_values_are(dtype: torch.dtype, scales: str) -> None:
    weight = random_weight(96 * 64 + 3, dtype).to(DEVICE)
    packed, state = ops.quantize_4bit(torch.nn.Parameter(weight), scales=scales)
    expected, expected_state = ops.quantize_4bit(weight, scales=scales)
    assert torch.equal(packed, expected)
    for name, component in state.components().items():
        assert not component.requires_grad
        assert torch.equal(component, expected_state.components()[name])


@pytest.mark.parametrize("blocksize", [48, 64.0, "64"])
def test_quantize_refuses_other_blocksizes(blocksize: object) -> None:
    with pytest.raises(CodecError, match=f"unsupported blocksize {blocksize}"):
        ops.quantize_4bit(torch.ones(64), blocksize=blocksize)


STATE_CHANGES = [
    (lambda s: {"absmax": s.absmax[1:]}, "absmax: .* 95 elements"),
    (lambda s: {"absmax": s.absmax.repeat_interleave(2)[::2]}, "absmax: .*not contiguous"),
    (lambda s: {"absmax": s.absmax.float()}, "absmax: torch.float32, .*expected torch.uint8"),
    (lambda _: {"offset": None}, "nested state"),
    (
        lambda s: {"offset": s.offset.double()},
        "nested_offset: .*expected torch.float32",
    ),
    (lambda s: nested(s.state2.absmax.half(), s.state2.code), "nested_absmax: torch.float16"),
    (lambda s: nested(s.state2.absmax.repeat(3), s.state2.code), "nested_absmax: .* 3 elements"),
    (lambda s: nested(s.state2.absmax, s.state2.code.half()), "nested_quant_map: torch.float16"),
    (lambda _: {"blocksize": 48}, "unsupported blocksize 48"),
    (lambda _: {"quant_type": "int4"}, "unknown quant_type 'int4'"),
]


def nested(absmax: torch.Tensor, code: torch.Tensor) -> dict[str, NestedState]:
    return {"state2": NestedState(absmax, code)}


@pytest.mark.parametrize(("change", "message"), STATE_CHANGES)
def test_dequantize_refuses_a_state(change: object, message: str) -> None:
    packed, state = quantized()
    with pytest.raises(CodecError, match=message):
        ops.dequantize_4bit(packed, QuantState(**{**vars(state), **change(state)}))


def test_dequantize_refuses_codes() -> None:
    packed, state = quantized()
    with pytest.raises(CodecError, match="packed: 3071 bytes, expected 3072"):
        ops.dequantize_4bit(packed[:-1], state)
    with pytest.raises(CodecError, match="packed: not contiguous"):
        ops.dequantize_4bit(packed.repeat(1, 2)[:, :1], state)


@pytest.mark.parametrize(
    ("capability", "why"),
    [
        (None, "not an NVIDIA GPU"),
        ((7, 5), "compute capability is 7.5"),
        ((8, 0), ""),
        ((12, 0), ""),
    ],
)
def test_what_runs_the_kernels(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, why: str
) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda _: True)
    assert why in backends.why_plain(capability)
    assert bool(why) == bool(backends.why_plain(capability))
    assert backends.backend(torch.device("cpu")) is cpu
    assert backends.backend(torch.device("mps")) is reference


def test_without_triton_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda _: None)
    assert backends.why_plain((9, 0)) == "Triton is not installed"


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(64, 96), "shape"),
        (torch.empty(96, 64, dtype=torch.float64), "cannot decode to torch.float64"),
        (torch.empty(64, 96).t(), "not contiguous"),
        (torch.empty(96, 64, device="meta"), "meta"),
    ],
    ids=["shape", "dtype", "strided", "device"],
)
def test_dequantize_refuses_out(out: torch.Tensor, message: str) -> None:
    packed, state = quantized()
    if out.device.type == "cpu":
        out = out.to(DEVICE)
    with pytest.raises(CodecError, match=message):
        ops.dequantize_4bit(packed, state, out=out)


def test_quantize_refuses_integers_and_doubles() -> None:
    for dtype in (torch.int32, torch.float64, torch.float8_e4m3fn):
        with pytest.raises(CodecError, match="cannot quantize"):
            ops.quantize_4bit(torch.zeros(64, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
def test_compiles_without_a_graph_break(double_quant: bool) -> None:
    packed, state = quantized(double_quant)
    compiled = torch.compile(
        lambda p, s: ops.dequantize_4bit(p, s) * 2, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(packed, state), ops.dequantize_4bit(packed, state) * 2)
    out = torch.empty(96, 64, device=DEVICE)
    into = torch.compile(
        lambda p, s, o: ops.dequantize_4bit(p, s, out=o) + 1, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(into(packed, state, out), ops.dequantize_4bit(packed, state) + 1)
    assert torch.equal(out, ops.dequantize_4bit(packed, state))


def test_custom_op_is_registered_correctly() -> None:
    packed, state = quantized()
    out = torch.empty(96 * 64, device=DEVICE)
    torch.library.opcheck(
        ops.dequantize_op,
        (
            packed.view(-1),
            state.absmax,
            state.state2.absmax,
            state.state2.code,
            state.offset,
            out,
            "nf4",
            64,
        ),
    )


def test_error_sums_of_an_exact_weight_are_zero() -> None:
    packed, state = quantized(False)
    exact = ops.dequantize_4bit(packed, state)
    sums = error_sums(exact, packed, state)
    assert (sums.max_error, sums.squared_error, sums.outside) == (0, 0, 0)
    assert sums.squared_weight == pytest.approx(exact.double().square().sum().item(), rel=1e-6)
