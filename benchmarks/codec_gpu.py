"""The codec on a GPU against bitsandbytes, Unsloth's kernel and a copy of the same bytes, side by
side in one run.

    python -m benchmarks.codec_gpu [--json FILE] [--commit HASH]

Device times are medians of CUDA events over graph replays, the providers taking turns; inputs of
small shapes rotate through buffers that together exceed the L2 cache. "wall" is what a Python
caller pays for one call of a loop of them. Bytes counted: dequantize n · (2 + 1/2 + 1/64), quantize
n · (input + 1/2 + 4/64). bitsandbytes quantizes on the legacy default stream, which no graph can
capture, so quantizers are timed with events around plain calls.
"""

import time
from functools import partial

import torch
from bitsandbytes import functional

from benchmarks import gpu_peers
from benchmarks.records import parser, save, versions
from benchmarks.timing import L2_BYTES, Call, graph, loop, take_turns
from nf4conv.codec import kernels, ops
from nf4conv.codec.quant_state import QuantState, decoding_of

SHAPES = (
    (1024, 1024), (4096, 4096), (4096, 11008), (5120, 13824), (6656, 17920), (8192, 8192),
    (8192, 22016), (8192, 28672), (16384, 53248),
)  # fmt: skip
UNSLOTH_CONFIGURATIONS = (
    (1024, 2, True, True, 2),
    (1024, 2, True, True, 0),
    (2048, 4, True, True, 0),
    (2048, 4, False, False, 0),
)
SEEDS = ("Weitkamp V0", "Weitkamp V1", "Weitkamp V2", "Weitkamp V3", "ghostway0")


def main() -> None:
    options = parser(__doc__)
    arguments = options.parse_args()
    rows: list[dict[str, object]] = []
    for shape in SHAPES:
        rows += dequantize_rows(shape, "nf4")
    rows += dequantize_rows((8192, 28672), "fp4")
    for shape in ((1024, 1024), (4096, 4096)):
        rows += wall_rows(shape)
    rows += quantize_rows((1 << 28,), torch.bfloat16, "nf4", False)
    rows += quantize_rows((1 << 28,), torch.bfloat16, "fp4", False)
    rows += quantize_rows((8192, 28672), torch.bfloat16, "nf4", True)
    rows += quantize_rows((8192, 28672), torch.float32, "nf4", False)
    rows += quantize_rows((8192, 28672), torch.float16, "nf4", False)
    rows += quantize_rows((4096, 4096), torch.bfloat16, "nf4", True)
    for dtype, quant_type in (
        (torch.bfloat16, "nf4"),
        (torch.bfloat16, "fp4"),
        (torch.float32, "nf4"),
    ):
        rows += search_rows(dtype, quant_type)
    rows += error_rows()
    print_table(rows)
    save({"versions": versions(arguments.commit), "rows": rows}, arguments.json)


def dequantize_rows(shape: tuple[int, ...], quant_type: str) -> list[dict[str, object]]:
    elements = shape[0] * shape[1]
    moved = int(elements * (2 + 1 / 2 + 1 / 64))
    sets = [dequantize_calls(shape, quant_type) for _ in range(max(1, -(-4 * L2_BYTES // moved)))]
    timed = {name: graph([calls[name] for calls in sets]) for name in sets[0]}
    copies = [copy_call(moved) for _ in sets]
    # as a node of a graph, a copy of more than a gigabyte runs at two thirds of its speed
    timed["copy"] = graph(copies) if moved < 1 << 30 else loop(copies[0], 10)
    microseconds = {name: value / len(sets) for name, value in take_turns(timed).items()}
    title = f"dequantize nested {quant_type} → bf16"
    rows = [row(title, shape, name, value, moved) for name, value in microseconds.items()]
    torch.cuda.empty_cache()
    return rows


def dequantize_calls(shape: tuple[int, ...], quant_type: str) -> dict[str, Call]:
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02)
    packed, state = functional.quantize_4bit(
        weight, quant_type=quant_type, compress_statistics=True
    )
    out = torch.empty_like(weight)
    calls: dict[str, Call] = {
        "nf4conv": partial(ops.dequantize_4bit, packed, state, out),
        "bitsandbytes": partial(functional.dequantize_4bit, packed, state, out=out),
        "fill of the output": partial(out.fill_, 1.0),
    }
    if quant_type == "nf4":
        for configuration in (None, *UNSLOTH_CONFIGURATIONS):
            call = gpu_peers.unsloth(packed, state, out, configuration)
            if call is not None:
                calls["Unsloth" if configuration is None else f"Unsloth {configuration}"] = call
        calls |= {name: gpu_peers.recreated(name, packed, state, out) for name in SEEDS}
        if shape[0] * shape[1] > 1 << 29:
            calls = {name: call for name, call in calls.items() if name not in SEEDS}
    return calls


def copy_call(moved: int) -> Call:
    size = moved // 2 // 4096 * 4096
    source = torch.ones(size, dtype=torch.uint8, device="cuda")
    return partial(torch.empty_like(source).copy_, source)


def wall_rows(shape: tuple[int, ...]) -> list[dict[str, object]]:
    calls = dequantize_calls(shape, "nf4")
    moved = int(shape[0] * shape[1] * (2 + 1 / 2 + 1 / 64))
    chosen = {name: calls[name] for name in ("nf4conv", "bitsandbytes", "Unsloth") if name in calls}
    timed = take_turns({name: partial(wall, call) for name, call in chosen.items()})
    rows = [
        row("dequantize, wall a call", shape, name, value, moved) for name, value in timed.items()
    ]
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    fresh = {
        "nf4conv": partial(wall, partial(ops.dequantize_4bit, packed, state)),
        "bitsandbytes": partial(wall, partial(functional.dequantize_4bit, packed, state)),
    }
    title = "dequantize without out=, wall a call"
    return rows + [
        row(title, shape, name, value, moved) for name, value in take_turns(fresh).items()
    ]


def quantize_rows(
    shape: tuple[int, ...], dtype: torch.dtype, quant_type: str, double_quant: bool
) -> list[dict[str, object]]:
    weight = torch.randn(shape, device="cuda", dtype=dtype).mul_(0.02)
    moved = int(weight.numel() * (dtype.itemsize + 1 / 2 + 4 / 64))
    packed = torch.empty(weight.numel() // 2, dtype=torch.uint8, device="cuda")
    absmax = torch.empty(weight.numel() // 64, device="cuda")
    if double_quant:
        ours = partial(ops.quantize_4bit, weight, quant_type)
    else:
        ours = partial(kernels.quantize_blocks, weight.view(-1), packed, absmax, quant_type, 64)
    theirs = partial(
        functional.quantize_4bit, weight, quant_type=quant_type, compress_statistics=double_quant
    )
    timed = {
        "nf4conv": loop(ours, 20),
        "bitsandbytes": loop(theirs, 4),
        "copy": loop(copy_call(moved), 20),
    }
    call = "whole nested call" if double_quant else "packed + absmax"
    name = f"quantize {quant_type} from {str(dtype)[6:]}, {call}"
    rows = [
        row(name, shape, provider, value, moved) for provider, value in take_turns(timed).items()
    ]
    torch.cuda.empty_cache()
    return rows


def search_rows(dtype: torch.dtype, quant_type: str) -> list[dict[str, object]]:
    weight = torch.randn(1 << 28, device="cuda", dtype=dtype).mul_(0.02)
    moved = int(weight.numel() * (dtype.itemsize + 1 / 2 + 4 / 64))
    results = (
        torch.empty(weight.numel() // 2, dtype=torch.uint8, device="cuda"),
        torch.empty(1 << 22, device="cuda"),
    )
    timed = {
        "nf4conv": loop(
            partial(kernels.quantize_blocks, weight, *results, quant_type, 64, True), 10
        ),
        "nf4conv, absmax": loop(
            partial(kernels.quantize_blocks, weight, *results, quant_type, 64), 20
        ),
        "copy": loop(copy_call(moved), 20),
    }
    name = f"search {quant_type} from {str(dtype)[6:]}, packed + scales"
    return [
        row(name, tuple(weight.shape), provider, value, moved)
        for provider, value in take_turns(timed).items()
    ]


def error_rows() -> list[dict[str, object]]:
    weight = torch.randn(8192, 28672, device="cuda", dtype=torch.bfloat16)
    packed, state = ops.quantize_4bit(weight)
    moved = int(weight.numel() * (2 + 1 / 2 + 1 / 64))
    timed = {
        "nf4conv": loop(
            partial(kernels.error_sums, weight.view(-1), packed.view(-1), decoding_of(state)), 10
        ),
        "dequantize, then torch": loop(partial(materialised_error, weight, packed, state), 3),
        "copy": loop(copy_call(moved), 10),
    }
    return [
        row("error sums", tuple(weight.shape), name, value, moved)
        for name, value in take_turns(timed).items()
    ]


def materialised_error(
    weight: torch.Tensor, packed: torch.Tensor, state: QuantState
) -> tuple[torch.Tensor, ...]:
    error = weight.float() - ops.dequantize_4bit(packed, state, dtype=torch.float32)
    return error.abs().max(), error.double().square().sum(), weight.double().square().sum()


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


def row(
    kernel: str, shape: tuple[int, ...], provider: str, microseconds: float, moved: int
) -> dict[str, object]:
    return {
        "kernel": kernel,
        "shape": "×".join(map(str, shape)),
        "provider": provider,
        "microseconds": round(microseconds, 2),
        "gigabytes_per_second": round(moved / microseconds / 1e3, 1),
    }


def print_table(rows: list[dict[str, object]]) -> None:
    """Each group of one kernel and shape, fastest first, with its time relative to ours."""
    groups: dict[tuple[object, object], list[dict[str, object]]] = {}
    for one in rows:
        groups.setdefault((one["kernel"], one["shape"]), []).append(one)
    for (kernel, shape), members in groups.items():
        ours = next(m["microseconds"] for m in members if str(m["provider"]).startswith("nf4conv"))
        print(f"\n{kernel}, {shape}")
        for one in sorted(members, key=lambda member: float(str(member["microseconds"]))):
            ratio = float(str(one["microseconds"])) / float(str(ours))
            speed = one["gigabytes_per_second"]
            print(
                f"  {one['provider']:36} {one['microseconds']:>10} µs {speed:>8} GB/s  "
                f"{ratio:6.3f}× our time"
            )


if __name__ == "__main__":
    main()
