"""Several threads on one weight."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from nf4conv.codec.reference.dequantize import CHUNK

_MAX_THREADS: Final = 8  # more would mostly wait for the interpreter lock

THREAD_CHUNK: Final = 1 << 20
"""Elements a thread quantizes at a time: 10 MB of temporaries. Smaller chunks make two threads wait
for each other: with 2^18 they reach 420 million elements a second, with 2^20 550, where one alone
reaches 390.
"""


def share(elements: int, unit: int, work: Callable[[int, int], None]) -> None:
    """Calls `work(start, stop)` so that the ranges cover all elements, in as many threads as torch
    uses.

    Every range begins at a multiple of `unit`. In the threads that are started torch starts none of
    its own, and is in inference mode or records gradients if it does so in the calling thread.
    Autocast and the default device of the caller do not reach them: nothing here depends on either.
    """
    torch_threads = torch.get_num_threads()
    if torch_threads == 1 or elements <= CHUNK:
        work(0, elements)
        return
    units = -(-elements // unit)
    threads = min(torch_threads, units, _MAX_THREADS)
    step = -(-units // threads) * unit
    inference = torch.is_inference_mode_enabled()
    gradients = torch.is_grad_enabled()

    def work_as_caller(start: int, stop: int) -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            work(start, stop)

    started = []
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for start in range(0, elements, step):
                stop = min(start + step, elements)
                started.append(pool.submit(work_as_caller, start, stop))
    finally:
        # the initializer changed what threads yet to come will use
        torch.set_num_threads(torch_threads)
    for done in started:
        done.result()  # raises what the thread raised
