"""The codec on a GPU against bitsandbytes, Unsloth's kernel and a copy of the same bytes, side by
side in one run.

    python -m benchmarks.codec_gpu [--json FILE] [--commit HASH]

Device times are medians of CUDA events over graph replays, the providers taking turns; inputs of
small shapes rotate through buffers that together exceed the L2 cache. "wall" is what a Python
caller pays for one call of a loop of them. Bytes counted: dequantize n · (2 + 1/2 + 1/64), quantize
n · (input + 1/2 + 4/64). bitsandbytes quantizes on the legacy default stream, which no graph can
capture, so quantizers are timed with events around plain calls. Unsloth's kernel is run from its
own package (`unsloth/kernels/nf4.py`, AGPL: never copied here) if that is importable.
"""

import math
import time
from collections.abc import Mapping
from functools import partial

import torch
from bitsandbytes import functional

from benchmarks.records import parser, save
from benchmarks.timing import L2_BYTES, Call, Timer, graph, loop, take_turns
from nf4conv.codec import kernels, ops
from nf4conv.codec.quant_state import decoding_of

SHAPES = ((1024, 1024), (4096, 4096), (4096, 11008), (8192, 8192), (8192, 28672), (16384, 53248))

Rows = list[dict[str, object]]


def main() -> None:
    chosen = parser(__doc__).parse_args()
    rows: Rows = []

    def add(found: Rows) -> None:
        for one in found:
            print(one, flush=True)
        rows.extend(found)
        save(chosen, rows=rows)
        torch.cuda.empty_cache()

    for shape in SHAPES:
        add(dequantize_rows(shape))
    add(wall_rows(SHAPES[0]))
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        add(quantize_rows((1 << 28,), dtype, "nf4"))
    add(quantize_rows((1 << 28,), torch.bfloat16, "fp4"))
    add(quantize_rows((8192, 28672), torch.bfloat16, "nf4", nested=True))
    add(error_rows((8192, 28672)))


def rows_of(
    kernel: str, shape: tuple[int, ...], moved: int, timers: Mapping[str, Timer], calls: int = 1
) -> Rows:
    """Times providers in turns. Returns a row for each, with the µs of one of its calls."""
    found = {provider: value / calls for provider, value in take_turns(timers).items()}
    return [
        {
            "kernel": kernel,
            "shape": "×".join(map(str, shape)),
            "provider": provider,
            "microseconds": round(microseconds, 2),
            "gigabytes_per_second": round(moved / microseconds / 1e3, 1),
        }
        for provider, microseconds in found.items()
    ]


def decoded_bytes(shape: tuple[int, ...]) -> int:
    return int(math.prod(shape) * (2 + 1 / 2 + 1 / 64))


def dequantize_rows(shape: tuple[int, int]) -> Rows:
    moved = decoded_bytes(shape)
    sets = [dequantize_calls(shape) for _ in range(max(1, -(-4 * L2_BYTES // moved)))]
    timers = {name: graph([calls[name] for calls in sets]) for name in sets[0]}
    copies = [copy_call(moved) for _ in sets]
    # as a node of a graph, a copy of more than a gigabyte runs at two thirds of its speed
    timers["copy"] = graph(copies) if moved < 1 << 30 else loop(copies[0], 10)
    return rows_of("dequantize nested nf4 → bf16", shape, moved, timers, len(sets))


def dequantize_calls(shape: tuple[int, int]) -> dict[str, Call]:
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    out = torch.empty_like(weight)
    calls: dict[str, Call] = {
        "nf4conv": partial(ops.dequantize_4bit, packed, state, out),
        "bitsandbytes": partial(functional.dequantize_4bit, packed, state, out=out),
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
    source = torch.ones(moved // 2 // 4096 * 4096, dtype=torch.uint8, device="cuda")
    return partial(torch.empty_like(source).copy_, source)


def wall_rows(shape: tuple[int, int]) -> Rows:
    calls = dequantize_calls(shape)
    del calls["fill of the output"]
    timers = {name: partial(wall, call) for name, call in calls.items()}
    return rows_of("dequantize, wall a call", shape, decoded_bytes(shape), timers)


def quantize_rows(
    shape: tuple[int, ...], dtype: torch.dtype, quant_type: str, nested: bool = False
) -> Rows:
    """Times quantizing: the kernel, with searched scales too, or the whole nested call."""
    weight = torch.randn(shape, device="cuda", dtype=dtype).mul_(0.02)
    moved = int(weight.numel() * (dtype.itemsize + 1 / 2 + 4 / 64))
    theirs = partial(
        functional.quantize_4bit, weight, quant_type=quant_type, compress_statistics=nested
    )
    timers = {"bitsandbytes": loop(theirs, 4), "copy": loop(copy_call(moved), 20)}
    what = f"quantize {quant_type} from {str(dtype)[6:]}"
    if nested:
        timers["nf4conv"] = loop(partial(ops.quantize_4bit, weight, quant_type), 20)
        return rows_of(f"{what}, whole nested call", shape, moved, timers)
    packed = torch.empty(weight.numel() // 2, dtype=torch.uint8, device="cuda")
    absmax = torch.empty(weight.numel() // 64, device="cuda")
    kernel = partial(kernels.quantize_blocks, weight, packed, absmax, quant_type, 64)
    timers["nf4conv"] = loop(kernel, 20)
    timers["nf4conv, searched scales"] = loop(partial(kernel, True), 10)
    return rows_of(f"{what}, packed + absmax", shape, moved, timers)


def error_rows(shape: tuple[int, int]) -> Rows:
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    packed, state = ops.quantize_4bit(weight)
    moved = decoded_bytes(shape)
    sums = partial(kernels.error_sums, weight.view(-1), packed.view(-1), decoding_of(state))
    timers = {"nf4conv": loop(sums, 10), "copy": loop(copy_call(moved), 10)}
    return rows_of("error sums", shape, moved, timers)


def wall(call: Call, repeats: int = 300) -> float:
    """Host time in µs for one call of a loop of them, the device's work included."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e6


if __name__ == "__main__":
    main()
