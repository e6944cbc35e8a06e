"""linear_4bit: its definition on a CPU, and what torch asks of an operator."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import torch
from products import assert_close_to_exact, packed_weight

import nf4conv
from nf4conv.codec.ops import dequantize_4bit, quantize_4bit
from nf4conv.errors import CodecError
from nf4conv.inference import linear, linear_op

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_is_the_product(dtype: torch.dtype) -> None:
    for (n, k, blocksize), shape, bias in product(
        [(7, 33, 64), (96, 128, 32), (1, 1, 64), (40, 192, 256)],
        [(), (3,), (2, 0), (2, 3)],
        [False, True],
    ):
        packed, state = packed_weight(n, k, "fp4", blocksize)
        x, added = torch.randn(*shape, k).to(dtype), torch.randn(n).to(dtype) if bias else None
        assert_close_to_exact(nf4conv.linear_4bit(x, packed, state, added), x, packed, state, added)


@pytest.mark.oracle
@pytest.mark.parametrize("trains", [False, True], ids=["", "trains"])
def test_a_patched_layer_of_bitsandbytes_means_the_same(trains: bool) -> None:
    modules = pytest.importorskip("bitsandbytes.nn")
    layer = modules.Linear4bit(128, 40, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    model = torch.nn.Sequential(layer, torch.nn.ReLU())
    x, patched = torch.randn(2, 3, 128), torch.randn(2, 3, 128)
    patched.copy_(x)
    inputs = [tensor.requires_grad_(trains) for tensor in (x, patched)]
    expected = model(inputs[0])
    assert nf4conv.patch_linear_4bit(model) == 1
    found = model(inputs[1])
    torch.testing.assert_close(found, expected)
    if trains:
        for out in (expected, found):
            out.square().sum().backward()
        torch.testing.assert_close(patched.grad, x.grad)


def test_the_gradient_is_that_of_the_decoded_weight() -> None:
    packed, state = quantize_4bit(torch.randn(24, 128))
    x = torch.randn(2, 3, 128, requires_grad=True)
    bias = torch.randn(24, requires_grad=True)
    weight = dequantize_4bit(packed, state)
    probe = torch.randn(2, 3, 24)
    ours = torch.autograd.grad(
        (nf4conv.linear_4bit(x, packed, state, bias) * probe).sum(), (x, bias)
    )
    theirs = torch.autograd.grad(
        (torch.nn.functional.linear(x, weight, bias) * probe).sum(), (x, bias)
    )
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected)


def test_custom_op_is_registered_correctly() -> None:
    packed, state = quantize_4bit(torch.randn(24, 128, device=DEVICE))
    x = torch.randn(2, 128, device=DEVICE, requires_grad=True)
    nested = state.state2.absmax, state.state2.code, state.offset
    arguments = (None, packed, state.absmax, *nested, 24, "nf4", 64)
    torch.library.opcheck(linear_op.train_op, (x, *arguments))
    torch.library.opcheck(linear_op.linear_op, (x.detach(), *arguments))
    decoded = (packed, state.absmax, *nested, 24, 128, torch.float32, "nf4", 64)
    torch.library.opcheck(linear_op.decode_op, decoded)


def test_notices_what_has_been_replaced_and_forgets_what_is_gone() -> None:
    packed, state = quantize_4bit(torch.randn(24, 128))
    x = torch.randn(2, 128)
    first = nf4conv.linear_4bit(x, packed, state)
    state.absmax, state.offset, state.state2 = torch.ones(48), None, None
    second = nf4conv.linear_4bit(x, packed, state)
    assert not torch.equal(first, second)
    assert not torch.equal(nf4conv.linear_4bit(x, packed.clone() ^ 1, state), second)
    known = id(state)
    assert known in linear._weights
    del state
    gc.collect()
    assert known not in linear._weights


def test_keeps_no_codes_of_a_weight_that_has_moved() -> None:
    array = np.zeros(24 * 64, np.uint8)
    lives = weakref.ref(array)
    packed = torch.from_numpy(array)
    del array
    _, state = packed_weight(24, 128)
    nf4conv.linear_4bit(torch.randn(2, 128), packed, state)
    packed = packed.clone()  # as when a model moves: the same state, other codes
    gc.collect()
    assert lives() is None


@pytest.mark.parametrize("known", [False, True], ids=["", "known"])
def test_refuses_codes_that_are_too_few_or_not_side_by_side(known: bool) -> None:
    packed, state = packed_weight(24, 128)
    x = torch.randn(2, 128)
    if known:
        nf4conv.linear_4bit(x, packed, state)
    with pytest.raises(CodecError, match="1535 bytes"):
        nf4conv.linear_4bit(x, packed[:-1], state)
    with pytest.raises(CodecError, match="contiguous"):
        nf4conv.linear_4bit(x, packed.view(2, -1).t(), state)


@pytest.mark.parametrize("part", ["absmax", "offset", "nested absmax", "nested code"])
def test_notices_each_part_that_is_replaced(part: str) -> None:
    packed, state = packed_weight(24, 128)
    x = torch.randn(2, 128)
    first = nf4conv.linear_4bit(x, packed, state)
    weight = linear._weights[id(state)]
    if part == "absmax":
        state.absmax = state.absmax ^ 1
    elif part == "offset":
        state.offset = state.offset + 1
    elif part == "nested absmax":
        state.state2.absmax = state.state2.absmax * 2
    else:
        state.state2.code = state.state2.code * 2
    assert not torch.equal(nf4conv.linear_4bit(x, packed, state), first)
    assert linear._weights[id(state)] is not weight


@pytest.mark.parametrize("trains", [False, True], ids=["", "trains"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(dtype: torch.dtype, trains: bool) -> None:
    packed, state = packed_weight(24, 128)
    x = torch.randn(3, 128).to(dtype).requires_grad_(trains)
    expected = nf4conv.linear_4bit(x, packed, state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = nf4conv.linear_4bit(x, packed, state)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_bias_of_another_dtype(dtype: torch.dtype) -> None:
    packed, state = packed_weight(24, 128)
    x = torch.randn(3, 128).bfloat16().requires_grad_()
    bias = torch.randn(24).to(dtype).requires_grad_()
    out = nf4conv.linear_4bit(x, packed, state, bias)
    assert_close_to_exact(out.detach(), x.detach(), packed, state, bias.detach())
    out.sum().backward()
    assert (x.grad.dtype, bias.grad.dtype) == (torch.bfloat16, dtype)


@pytest.mark.parametrize("offset", [1, 4, 8, 16])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_codes_that_begin_anywhere_and_are_stored_as_anything(
    storage: torch.dtype, offset: int
) -> None:
    packed, state = packed_weight(24, 128, "fp4", 32)
    room = torch.zeros(packed.numel() + 16, dtype=torch.uint8)
    room[offset : offset + packed.numel()] = packed.view(-1)
    codes = room[offset : offset + packed.numel()]
    if offset % storage.itemsize == 0:
        codes = codes.view(storage)
    x = torch.randn(128)
    assert_close_to_exact(nf4conv.linear_4bit(x, codes, state), x, packed, state)


def test_several_threads_at_once() -> None:
    weights = [packed_weight(24, 128, blocksize=size) for size in (32, 64, 128)]
    x = [torch.randn(rows, 128) for rows in range(1, 6)]

    def work(start: int) -> None:
        for turn in range(start, start + 60):
            packed, state = weights[turn % 3]
            found = nf4conv.linear_4bit(x[turn % 5], packed, state)
            assert_close_to_exact(found, x[turn % 5], packed, state)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))


@pytest.mark.parametrize(
    ("x", "bias", "told"),
    [
        (torch.zeros(2, 64), None, r"\[2, 64\]"),
        (torch.zeros(2, 128, dtype=torch.float64), None, "float64"),
        (torch.zeros(2, 128), torch.zeros(23), r"\[23\] on"),
    ],
    ids=["columns", "dtype", "bias"],
)
def test_says_what_does_not_belong_together(
    x: torch.Tensor, bias: torch.Tensor | None, told: str
) -> None:
    packed, state = quantize_4bit(torch.randn(24, 128))
    with pytest.raises(CodecError, match=told):
        nf4conv.linear_4bit(x, packed, state, bias)
