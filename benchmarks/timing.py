"""Times calls on a GPU: captured as graphs or in loops, by events, the providers in turns.

Without a GPU, where scripts are only tried, each call runs once, timed on the host.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Final

import torch

Call = Callable[[], object]
Timer = Callable[[], float]

L2_BYTES: Final = 60 << 20
HAS_GPU: Final = torch.cuda.is_available()
ROUNDS: Final = 9 if HAS_GPU else 1


def copies_beyond_l2(size: int) -> int:
    """Returns how many inputs of so many bytes are twice as large as the L2 cache; at least two."""
    return max(2, -(-2 * L2_BYTES // size)) if HAS_GPU else 1


def graph(calls: list[Call], least: int = 10) -> Timer:
    """Returns a timer, in µs, of one pass over the calls, captured as a graph of at least so many
    calls.
    """
    repeats = -(-least // len(calls)) if HAS_GPU else 1

    def repeat() -> None:
        for _ in range(repeats):
            for call in calls:
                call()

    replay = captured(repeat) if HAS_GPU else repeat

    def time_once() -> float:
        replay()
        return between_events(replay) / repeats

    return time_once


def captured(step: Call) -> Call:
    """Returns what replays a step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    found = torch.cuda.CUDAGraph()
    with torch.cuda.graph(found):
        out = step()

    def replay(_: tuple[object, ...] = (step, out)) -> None:  # which the graph reads and writes
        found.replay()

    return replay


def loop(call: Call, repeats: int) -> Timer:
    repeats = repeats if HAS_GPU else 1

    def repeat() -> None:
        for _ in range(repeats):
            call()

    def time_once() -> float:
        call()
        return between_events(repeat) / repeats

    return time_once


def between_events(call: Call) -> float:
    """Returns the µs of a call on the device."""
    if not HAS_GPU:
        return 1e6 * seconds(call)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


def seconds(call: Call) -> float:
    """Returns the seconds until a call has come back and the device has ended."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def take_turns(timers: Mapping[str, Timer], rounds: int = ROUNDS) -> dict[str, float]:
    """Returns the median of each timer, one measurement of every one in each round."""
    measured: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            measured[name].append(timer())
    return {name: statistics.median(values) for name, values in measured.items()}
