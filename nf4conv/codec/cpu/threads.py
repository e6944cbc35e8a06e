"""Several threads on one weight."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from nf4conv.codec.reference.blocks import CHUNK

_MAX_THREADS: Final = 8  # more would mostly wait for the interpreter lock


def share(elements: int, unit: int, work: Callable[[int, int], None]) -> None:
    """Calls `work(start, stop)` so that the ranges cover all elements, in as many threads as torch
    uses.

    Every range begins at a multiple of `unit`. In the threads that are started torch starts none of
    its own.
    """
    torch_threads = torch.get_num_threads()
    if torch_threads == 1 or elements <= CHUNK:
        work(0, elements)
        return
    units = -(-elements // unit)
    threads = min(torch_threads, units, _MAX_THREADS)
    step = -(-units // threads) * unit
    started = []
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for start in range(0, elements, step):
                stop = min(start + step, elements)
                started.append(pool.submit(work, start, stop))
    finally:
        # the initializer changed what threads yet to come will use
        torch.set_num_threads(torch_threads)
    for done in started:
        done.result()  # raises what the thread raised
