"""Measures calibrated rounding on a GPU: time and memory for real shapes.

    python -m benchmarks.calibration_gpu [--json FILE] [--only NAME]

Times are of whole calls with a synchronised device, after one call of each kernel on a small
weight. Weights are normal; inputs are correlated and differ in energy.
"""

import json
import time
from collections.abc import Callable

import torch

from benchmarks.records import parser, save
from nf4conv.calibrate import rounding
from nf4conv.calibrate.moments import SecondMoments
from nf4conv.calibrate.rounding import calibrated
from nf4conv.calibrate.rounding.draft import Draft

SHAPES = {
    "8B qkv": ((4096, 1024, 1024), 4096),
    "8B o": ((4096,), 4096),
    "8B gate, up": ((14336, 14336), 4096),
    "8B down": ((4096,), 14336),
    "70B qkv": ((8192, 1024, 1024), 8192),
    "70B gate, up": ((28672, 28672), 8192),
    "70B down": ((8192,), 28672),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", default="", help="shapes whose name has this")
    chosen = options.parse_args()
    seconds = compile_kernels()
    shapes = []
    for name, (outputs, inputs) in SHAPES.items():
        if chosen.only in name:
            shapes.append({"name": name} | times(outputs, inputs))
            print(json.dumps(shapes[-1]), flush=True)
            save(chosen, shapes=shapes, compiling=seconds)


def timed(call: Callable[[], object]) -> tuple[float, object]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def compile_kernels() -> float:
    """Seconds until the kernels of one format have compiled."""
    weight = torch.randn(64, 128, device="cuda")
    factor = rounding.factor(torch.eye(128, device="cuda"), 64)
    searched = rounding.search(weight)
    seconds, _ = timed(lambda: rounding.round_calibrated([weight], [searched], factor, sweeps=1))
    return round(seconds, 2)


def tokens_of(inputs: int, count: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    scale = torch.rand(inputs, device="cuda", generator=generator) + 0.2
    shared = torch.randn(count, 64, device="cuda", generator=generator)
    mixing = torch.randn(64, inputs, device="cuda", generator=generator) / 8
    own = torch.randn(count, inputs, device="cuda", generator=generator)
    return (own + shared @ mixing) * scale


def factor_of(inputs: int, row: dict[str, object]) -> rounding.Factor:
    """Makes the factor of some inputs, and notes what it took."""
    tokens = tokens_of(inputs, 8192)
    moments = SecondMoments.zeros(inputs, torch.device("cuda"))
    row["moments of 8192 tokens"], _ = timed(lambda: moments.add(tokens))
    moments.add(tokens_of(inputs, 2 * inputs))
    mean = moments.mean()
    moments.sums = mean[:0]
    tokens = mean[:0]
    torch.cuda.reset_peak_memory_stats()
    row["factor"], factor = timed(lambda: rounding.factor(mean, 64))
    row["factor, peak GiB"] = peak()
    assert isinstance(factor, rounding.Factor)
    return factor


def times(outputs: tuple[int, ...], inputs: int) -> dict[str, object]:
    """Times the steps of one group of matrices that share their inputs."""
    torch.cuda.empty_cache()
    row: dict[str, object] = {"outputs": outputs, "inputs": inputs}
    factor = factor_of(inputs, row)
    weights = [torch.randn(n, inputs, device="cuda").mul_(0.02).bfloat16() for n in outputs]
    torch.cuda.reset_peak_memory_stats()
    steps(row, weights, factor)
    searched = [rounding.search(weight) for weight in weights]
    seconds, _ = timed(lambda: rounding.round_calibrated(weights, searched, factor))
    row["whole"] = seconds
    row["whole, peak GiB"] = peak()
    seconds, _ = timed(lambda: rounding.layer_cost(weights[0], searched[0], factor.moments))
    row["one judgement"] = seconds
    if weights[0].shape[0] * inputs < 1 << 27:
        two_sided(row, weights[0], factor)
    return row


def two_sided(row: dict[str, object], weight: torch.Tensor, factor: rounding.Factor) -> None:
    """Times rounding that knows the outputs, of the first of the matrices."""
    outputs = weight.shape[0]
    gradients = SecondMoments.zeros(outputs, torch.device("cuda"))
    gradients.add(tokens_of(outputs, 2 * outputs))
    mean = gradients.mean()
    torch.cuda.reset_peak_memory_stats()
    searched = rounding.search(weight)
    seconds, _ = timed(lambda: rounding.round_two_sided(weight, searched, factor, mean))
    row["two-sided"] = seconds
    row["two-sided, peak GiB"] = peak()


def steps(row: dict[str, object], weights: list[torch.Tensor], factor: rounding.Factor) -> None:
    seconds, found = timed(lambda: [rounding.search(weight) for weight in weights])
    row["search"] = seconds
    draft = Draft.beside([one.state for one in found], factor)
    target = calibrated.ordered(weights, factor)
    seconds, _ = timed(lambda: calibrated.choose(draft, target, factor))
    row["first choice"] = seconds
    gradient = factor.moments @ (calibrated.ordered(weights, factor) - draft.values())
    for number in range(2):
        seconds, _ = timed(lambda: calibrated.sweep(draft, gradient, factor))
        row[f"sweep {number + 1}"] = seconds


def peak() -> float:
    return round(torch.cuda.max_memory_allocated() / 2**30, 2)


if __name__ == "__main__":
    main()
