"""What a caller has set of torch for its thread changes no result: inference mode, gradients,
autocast, the default device. With two threads, and with nothing in the caches before.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch

import nf4conv

ROWS, COLUMNS = 1050, 1024  # more than one range for each of two threads, and a partial one

STATES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    empty_caches()
    yield
    empty_caches()
    torch.set_num_threads(before)


def empty_caches() -> None:
    """A table that is made under a state is kept, and must be right without it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("nf4conv.codec"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def values_of(rows: int, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(mode=False), torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        return torch.randn(rows, COLUMNS, generator=generator).to(dtype)


def quantized(scales: str, quant_type: str, dtype: torch.dtype) -> list[torch.Tensor]:
    packed, state = nf4conv.quantize_4bit(values_of(ROWS, dtype), quant_type, scales=scales)
    assert state.state2 is not None
    assert state.offset is not None
    nested = [state.state2.absmax, state.state2.code, state.offset]
    return [packed, state.absmax, state.code, *nested]


def decoded(dtype: torch.dtype) -> list[torch.Tensor]:
    packed, state = nf4conv.quantize_4bit(values_of(ROWS, torch.bfloat16))
    out = torch.empty(ROWS, COLUMNS, dtype=dtype, device="cpu")
    nf4conv.dequantize_4bit(packed, state, out=out)
    return [out, nf4conv.dequantize_4bit(packed, state, dtype=dtype)]


def multiplied(dtype: torch.dtype) -> list[torch.Tensor]:
    packed, state = nf4conv.quantize_4bit(values_of(ROWS, torch.bfloat16))
    x = values_of(4, dtype).requires_grad_()
    y = nf4conv.linear_4bit(x, packed, state)
    if y.requires_grad:
        y.float().sum().backward()
        assert x.grad is not None
    return [y.detach()]


CALLS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "quantize float32": lambda: quantized("absmax", "nf4", torch.float32),
    "quantize bfloat16": lambda: quantized("absmax", "fp4", torch.bfloat16),
    "search nf4": lambda: quantized("search", "nf4", torch.bfloat16),
    "search fp4": lambda: quantized("search", "fp4", torch.float32),
    "dequantize": lambda: decoded(torch.float16),
    "linear_4bit": lambda: multiplied(torch.bfloat16),
    "linear_4bit float32": lambda: multiplied(torch.float32),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_state_of_the_caller_changes_nothing(call: str) -> None:
    for state in STATES:
        with STATES[state]():
            under_state = CALLS[call]()
        with_its_tables = CALLS[call]()
        empty_caches()
        expected = CALLS[call]()
        for found in (under_state, with_its_tables):
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
