"""Single kernels on a GPU, side by side with others' in one run.

    python -m benchmarks.kernels_gpu codec|products|calibration [--tiny] [--json FILE]

codec        packing and decoding beside bitsandbytes, Unsloth's kernel and a copy of the same bytes
products     `linear_4bit` with few to hundreds of rows beside bitsandbytes and cuBLAS
calibration  the steps of calibrated rounding, for the matrices of an 8B and a 70B model

Device times are medians of CUDA events over graph replays, the providers taking turns; inputs
rotate through buffers that together exceed the L2 cache. "wall" is what a Python caller pays for
one call of a loop of them. Bytes counted: dequantize n · (2 + 1/2 + 1/64), quantize n · (input +
1/2 + 4/64). bitsandbytes quantizes on the legacy default stream, which no graph can capture, so
quantizers are timed with events around plain calls. Unsloth's kernel is run from its own package
(`unsloth/kernels/nf4.py`, AGPL: never copied here) if that is importable. Calibration is timed in
whole calls. `--tiny` tries the script on small shapes, without a GPU too.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import bitsandbytes
import torch
from bitsandbytes import functional

import nf4conv
from benchmarks.running import DEVICE, parser, save
from benchmarks.timing import (
    L2_BYTES,
    Call,
    Timer,
    copies_beyond_l2,
    graph,
    loop,
    seconds,
    take_turns,
)  # fmt: skip
from nf4conv.calibrate.moments import SecondMoments
from nf4conv.calibrate.rounding.calibrated import round_calibrated
from nf4conv.calibrate.rounding.factor import factor as factor_of
from nf4conv.calibrate.rounding.rounded import layer_cost, search
from nf4conv.calibrate.rounding.two_sided import round_two_sided
from nf4conv.codec import kernels, ops
from nf4conv.codec.quant_state import decoding_of

Row = dict[str, object]
Shape = tuple[int, ...]

DECODED: Final = (
    (1024, 1024), (4096, 4096), (4096, 11008), (8192, 8192), (8192, 28672), (16384, 53248)
)  # fmt: skip
LARGE: Final = (8192, 28672)
PRODUCTS: Final = (
    (4096, 4096), (14336, 4096), (4096, 14336), LARGE, (6144, 4096), (5120, 5120), (11008, 4096)
)  # fmt: skip
ROWS: Final = (1, 2, 4, 8, 16, 32, 33, 48, 64, 96, 128, 256, 512)
GROUPS: Final = {
    "8B qkv": ((4096, 1024, 1024), 4096),
    "8B o": ((4096,), 4096),
    "8B gate, up": ((14336, 14336), 4096),
    "8B down": ((4096,), 14336),
    "70B qkv": ((8192, 1024, 1024), 8192),
    "70B gate, up": ((28672, 28672), 8192),
    "70B down": ((8192,), 28672),
}
"""Outputs and inputs of matrices that share their inputs."""


def codec(*, tiny: bool) -> Iterator[Row]:
    shapes = ((64, 128),) if tiny else DECODED
    for shape in shapes:
        yield from dequantize_rows(shape)
    yield from wall_rows(shapes[0])
    flat, large = ((1 << 12,), shapes[0]) if tiny else ((1 << 28,), LARGE)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        yield from quantize_rows(flat, dtype, "nf4")
    yield from quantize_rows(flat, torch.bfloat16, "fp4")
    yield from quantize_rows(large, torch.bfloat16, "nf4", nested=True)
    yield from error_rows(large)


def rows_of(
    kernel: str, shape: Shape, moved: int, timers: Mapping[str, Timer], calls: int = 1
) -> Iterator[Row]:
    """Times providers in turns. Yields a row for each, with the µs of one of its calls."""
    for provider, value in take_turns(timers).items():
        yield {
            "kernel": kernel,
            "shape": "×".join(map(str, shape)),
            "provider": provider,
            "microseconds": round(value / calls, 2),
            "gigabytes_per_second": round(moved * calls / value / 1e3, 1),
        }


def decoded_bytes(shape: Shape) -> int:
    return int(math.prod(shape) * (2 + 1 / 2 + 1 / 64))


def dequantize_rows(shape: Shape) -> Iterator[Row]:
    moved = decoded_bytes(shape)
    sets = [dequantize_calls(shape) for _ in range(max(1, -(-4 * L2_BYTES // moved)))]
    timers = {name: graph([calls[name] for calls in sets]) for name in sets[0]}
    copies = [copy_call(moved) for _ in sets]
    # as a node of a graph, a copy of more than a gigabyte runs at two thirds of its speed
    timers["copy"] = graph(copies) if moved < 1 << 30 else loop(copies[0], 10)
    return rows_of("dequantize nested nf4 → bf16", shape, moved, timers, len(sets))


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype).mul_(0.02)


def dequantize_calls(shape: Shape) -> dict[str, Call]:
    weight = normal(*shape)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    out = torch.empty_like(weight)
    given = {"out": out} if DEVICE == "cuda" else {}  # which bitsandbytes has on GPUs only
    calls: dict[str, Call] = {
        "nf4conv": partial(ops.dequantize_4bit, packed, state, out),
        "bitsandbytes": partial(functional.dequantize_4bit, packed, state, **given),
        "fill of the output": partial(out.fill_, 1.0),
    }
    try:
        from unsloth.kernels import nf4
    except ImportError:
        return calls
    nested = state.state2
    states = (state.absmax, nested.code, nested.absmax, state.offset, state.code)
    calls["Unsloth"] = partial(
        nf4.dequantize_nf4, packed, *states, 64, 256, out.shape, out.dtype, out
    )
    return calls


def copy_call(moved: int) -> Call:
    source = torch.ones(moved // 2 // 4096 * 4096, dtype=torch.uint8, device=DEVICE)
    return partial(torch.empty_like(source).copy_, source)


def wall_rows(shape: Shape) -> Iterator[Row]:
    def wall(call: Call, repeats: int = 300) -> float:
        call()
        return 1e6 * seconds(lambda: [call() for _ in range(repeats)]) / repeats

    calls = dequantize_calls(shape)
    del calls["fill of the output"]
    timers = {name: partial(wall, call) for name, call in calls.items()}
    return rows_of("dequantize, wall a call", shape, decoded_bytes(shape), timers)


def quantize_rows(
    shape: Shape, dtype: torch.dtype, quant_type: str, nested: bool = False
) -> Iterator[Row]:
    """Times quantizing: the kernel, with searched scales too, or the whole nested call."""
    weight = normal(*shape, dtype=dtype)
    moved = int(weight.numel() * (dtype.itemsize + 1 / 2 + 4 / 64))
    theirs = partial(
        functional.quantize_4bit, weight, quant_type=quant_type, compress_statistics=nested
    )
    timers = {"bitsandbytes": loop(theirs, 4), "copy": loop(copy_call(moved), 20)}
    what = f"quantize {quant_type} from {str(dtype)[6:]}"
    if nested:
        timers["nf4conv"] = loop(partial(ops.quantize_4bit, weight, quant_type), 20)
        return rows_of(f"{what}, whole nested call", shape, moved, timers)
    packed = torch.empty(weight.numel() // 2, dtype=torch.uint8, device=DEVICE)
    absmax = torch.empty(weight.numel() // 64, device=DEVICE)
    kernel = partial(kernels.quantize_blocks, weight, packed, absmax, quant_type, 64)
    timers["nf4conv"] = loop(kernel, 20)
    timers["nf4conv, searched scales"] = loop(partial(kernel, True), 10)
    return rows_of(f"{what}, packed + absmax", shape, moved, timers)


def error_rows(shape: Shape) -> Iterator[Row]:
    weight = normal(*shape)
    packed, state = ops.quantize_4bit(weight)
    moved = decoded_bytes(shape)
    sums = partial(kernels.error_sums, weight.view(-1), packed.view(-1), decoding_of(state))
    timers = {"nf4conv": loop(sums, 10), "copy": loop(copy_call(moved), 10)}
    return rows_of("error sums", shape, moved, timers)


def products(*, tiny: bool) -> Iterator[Row]:
    """Times x · Wᵀ in bfloat16, nested NF4 in blocks of 64. Yields the µs of all providers."""
    for n, k in ((256, 128),) if tiny else PRODUCTS:
        weights = [normal(n, k) for _ in range(copies_beyond_l2(n * k // 2))]
        packed = [
            functional.quantize_4bit(one, quant_type="nf4", compress_statistics=True)
            for one in weights
        ]
        dense = weights[: copies_beyond_l2(2 * n * k)]
        for m in ROWS[:2] if tiny else ROWS:
            x = torch.randn(m, k, device=DEVICE).bfloat16()
            calls: dict[str, list[Call]] = {
                "nf4conv": [partial(nf4conv.linear_4bit, x, *pair) for pair in packed],
                "bitsandbytes": [
                    partial(bitsandbytes.matmul_4bit, x, codes.t(), state)
                    for codes, state in packed
                ],
                "cuBLAS": [partial(torch.nn.functional.linear, x, one) for one in dense],
            }
            times = take_turns({name: graph(several) for name, several in calls.items()})
            of_one = {name: round(times[name] / len(calls[name]), 2) for name in calls}
            yield {"shape": [n, k], "rows": m} | of_one


def calibration(*, tiny: bool) -> Iterator[Row]:
    """Times the rounding of matrices that share their inputs. Yields seconds, and peaks in GiB."""
    yield from rounded("compiling", (64,), 128)
    for name, (outputs, inputs) in {} if tiny else GROUPS.items():
        yield from rounded(name, outputs, inputs)


def rounded(name: str, outputs: Shape, inputs: int) -> Iterator[Row]:
    row: Row = {"name": name, "outputs": outputs, "inputs": inputs}

    def step(what: str, call: Callable[[], Any]) -> Any:
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found: list[Any] = []
        row[what] = seconds(lambda: found.append(call()))
        if DEVICE == "cuda":
            row[f"{what}, peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        return found[0]

    moments = SecondMoments.zeros(inputs, torch.device(DEVICE))
    tokens = tokens_of(inputs, 8192)
    step("moments of 8192 tokens", partial(moments.add, tokens))
    del tokens
    mean = more_than_full(moments, inputs)
    factor = step("factor", lambda: factor_of(mean, 64))
    weights = [normal(n, inputs) for n in outputs]
    searched = step("search", lambda: [search(weight) for weight in weights])
    step("whole", lambda: round_calibrated(weights, searched, factor))
    step("one judgement", lambda: layer_cost(weights[0], searched[0], factor.moments))
    if outputs[0] * inputs < 1 << 27:
        gradients = more_than_full(
            SecondMoments.zeros(outputs[0], torch.device(DEVICE)), outputs[0]
        )
        two_sided = partial(round_two_sided, weights[0], searched[0], factor, gradients)
        step("two-sided", two_sided)
    yield row


def more_than_full(moments: SecondMoments, inputs: int) -> torch.Tensor:
    """Returns the mean of moments with twice as many tokens as inputs."""
    moments.add(tokens_of(inputs, 2 * inputs))
    return moments.mean()


def tokens_of(inputs: int, count: int) -> torch.Tensor:
    """Returns inputs that are correlated and differ in energy."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    scale = torch.rand(inputs, device=DEVICE, generator=generator) + 0.2
    shared = torch.randn(count, 64, device=DEVICE, generator=generator)
    mixing = torch.randn(64, inputs, device=DEVICE, generator=generator) / 8
    own = torch.randn(count, inputs, device=DEVICE, generator=generator)
    return (own + shared @ mixing) * scale


KINDS: Final = {"codec": codec, "products": products, "calibration": calibration}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("kind", choices=KINDS)
    options.add_argument("--tiny", action="store_true")
    chosen = options.parse_args()
    rows = []
    for row in KINDS[chosen.kind](tiny=chosen.tiny):
        print(row, flush=True)
        rows.append(row)
        save(chosen, rows=rows)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
