"""Times calls on a GPU: captured as graphs or in loops, by events, the providers in turns."""

import statistics
from collections.abc import Callable, Mapping
from typing import Final

import torch

Call = Callable[[], object]
Timer = Callable[[], float]

L2_BYTES: Final = 60 << 20
ROUNDS: Final = 9


def copies_beyond_l2(size: int) -> int:
    """Returns how many inputs of so many bytes are twice as large as the L2 cache; at least two."""
    return max(2, -(-2 * L2_BYTES // size))


def graph(calls: list[Call], least: int = 10) -> Timer:
    """A timer, in µs, of one pass over the calls, captured as a graph of at least so many calls."""
    repeats = -(-least // len(calls))
    for call in calls:
        call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(repeats):
            for call in calls:
                call()

    def time_once() -> float:
        captured.replay()
        return between_events(captured.replay) / repeats

    return time_once


def loop(call: Call, repeats: int) -> Timer:
    def repeat() -> None:
        for _ in range(repeats):
            call()

    def time_once() -> float:
        call()
        return between_events(repeat) / repeats

    return time_once


def between_events(call: Call) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


def take_turns(timers: Mapping[str, Timer], rounds: int = ROUNDS) -> dict[str, float]:
    """Median µs of each timer, one measurement of every one in each round."""
    measured: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            measured[name].append(timer())
    return {name: statistics.median(values) for name, values in measured.items()}
