"""Makes parts in processes of this host, one for each place."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from nf4conv.commands.spread.part import Made, PartWork, make_part

from nf4conv.commands.spread.places import Place
from nf4conv.errors import Nf4convError
from nf4conv.options import RunOptions
from nf4conv.system.machine import keep_to
from nf4conv.system.signals import hold_interrupts_back, ignore_interrupts


class ProcessCrew:
    """Starts a process for each part, at most one at a time for each place."""

    def __init__(self, places: list[Place], run: RunOptions, threads: ThreadPoolExecutor) -> None:
        self.parts = len(places)
        self.run = run
        self._threads = threads
        self._context = get_context("spawn")
        self._places = cycle(places)
        self._lock = threading.Lock()  # held while a process starts
        self._processes: list[SpawnProcess] = []
        self._is_over = False

    def submit(self, work: PartWork) -> "Future[Made]":
        """Has a process make a part once a place is free."""
        return self._threads.submit(self._call, work)

    def _call(self, work: PartWork) -> Made:
        """Starts a process at the next place, and waits for its report or its error."""
        place = next(self._places)
        answer, theirs = self._context.Pipe()
        mine = replace(work, run=replace(work.run, device=place.device))
        # the process has no answer of its own to an interrupt before it runs `_serve`
        hold_interrupts_back()
        # not a daemon, which could start no process to compile kernels
        process = self._context.Process(target=_serve, args=(theirs, place.cores, mine))
        with self._lock:
            if self._is_over:  # an error has ended the run while this part was waiting
                return Nf4convError("the run is over; the same command resumes")
            process.start()
            self._processes.append(process)
        theirs.close()
        try:
            answered: Made = answer.recv()
        except (EOFError, OSError):
            return Nf4convError(
                "a worker process was killed, perhaps for want of memory; the same command resumes"
            )
        return answered

    def kill(self) -> None:
        """Ends all processes; no other one starts."""
        with self._lock:
            self._is_over = True
        for process in self._processes:
            process.kill()


@contextmanager
def open_processes(places: list[Place], run: RunOptions) -> Iterator[ProcessCrew]:
    """Opens a crew of processes, which end with this one, however it ends."""
    with ThreadPoolExecutor(len(places)) as threads:
        crew = ProcessCrew(places, run, threads)
        try:
            yield crew
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            crew.kill()


def _serve(driver: Connection, cores: frozenset[int], work: PartWork) -> None:
    """Makes a part in a process of its own, which ends with the driver."""
    # an interrupt from a terminal reaches all processes; the driver answers it
    ignore_interrupts()
    keep_to(cores)  # before there are threads, and memory of theirs
    threading.Thread(target=_end_with, args=(driver,), daemon=True).start()
    driver.send(make_part(work))


def _end_with(driver: Connection) -> None:
    """Ends this process as soon as the driver sends anything, or is gone."""
    os._exit(int(driver.poll(None)))
