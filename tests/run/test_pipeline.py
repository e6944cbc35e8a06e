"""The loop itself: every task once, the first error raised, nothing left running."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import pytest

from nf4conv.errors import PlanError
from nf4conv.format.codebook import BLOCKSIZES
from nf4conv.options import RunOptions
from nf4conv.run.loop import LARGEST_PIECE, Pipeline, make_pipeline, piece_size
from nf4conv.run.pieces import aligned, interleave
from nf4conv.run.worker import Activity, Worker
from nf4conv.sources.reader import Reader


class PlainBackend:
    """A device that computes nothing; as small as one gets."""

    name = "cpu"

    def __init__(self) -> None:
        self.opened = 0
        self.threads: set[int] = set()
        self._lock = threading.Lock()

    @contextmanager
    def open(self, worker: Worker) -> Iterator[Worker]:
        with self._lock:
            self.opened += 1
            self.threads.add(threading.get_ident())
        try:
            worker.buffer = memoryview(bytearray(worker.piece))
            yield worker
        finally:
            with self._lock:
                self.opened -= 1

    def device_memory(self) -> int:
        return 0


@dataclass(frozen=True)
class Call:
    function: Callable[[], object]

    def __call__(self, worker: Worker) -> None:
        with worker.timed(Activity.COMPUTE):
            self.function()


def pipeline(workers: int = 4, backend: PlainBackend | None = None) -> Pipeline:
    return Pipeline(
        backend or PlainBackend(), workers=workers, buffer_size=2**20, advance=lambda _: None
    )


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("nf4conv")]


@pytest.mark.parametrize("workers", [1, 3, 16])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_every_task_runs_once(workers, count):
    done: list[int] = []  # append is atomic
    backend = PlainBackend()
    running = pipeline(workers, backend)
    running.run(Call(lambda number=number: done.append(number)) for number in range(count))
    assert sorted(done) == list(range(count))
    assert (backend.opened, alive()) == (0, [])
    assert running.seconds["encode"] >= 0


def test_workers_work_at_the_same_time():
    together = threading.Barrier(4, timeout=30)  # breaks unless four tasks wait at once
    pipeline(4).run([Call(together.wait) for _ in range(8)])


def test_tasks_are_made_only_as_they_are_taken():
    ahead = 0
    made = taken = 0

    def tasks() -> Iterator[Call]:
        nonlocal made, ahead
        for _ in range(500):
            made += 1
            ahead = max(ahead, made - taken)
            yield Call(take)

    def take() -> None:
        nonlocal taken
        taken += 1

    pipeline(1).run(tasks())
    assert (made, taken, ahead) == (500, 500, 1)


@pytest.mark.parametrize("place", ["task", "list of tasks", "worker"])
def test_the_first_error_stops_the_rest_and_is_raised(place):
    done: list[int] = []
    backend = PlainBackend()
    fails, is_told = threading.Event(), threading.Event()

    class Told(Reader):
        def interrupt(self) -> None:
            is_told.set()

    def fail() -> None:
        fails.set()
        raise RuntimeError("first")

    def work() -> None:
        time.sleep(0.001)
        if fails.is_set():  # however long it takes the machine to say so
            assert is_told.wait(60)
        done.append(1)

    def tasks() -> Iterator[Call]:
        for number in range(10_000):
            if number == 20 and place == "list of tasks":
                fail()
            yield Call(fail if number == 20 and place == "task" else work)

    if place == "worker":
        backend.open = lambda *_: fail()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"^first$"), Told() as reader:
        pipeline(4, backend).run(tasks(), reader)
    assert len(done) < 100
    assert (backend.opened, alive()) == (0, [])


def test_an_interrupt_stops_after_the_piece_in_hand():
    started = threading.Event()
    finished: list[bool] = []

    def work() -> None:
        if not started.is_set():
            started.set()
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        finished.append(True)

    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pipeline(2).run(Call(work) for _ in range(1000))
    assert time.monotonic() - before < 20
    assert 1 <= len(finished) <= 6  # pieces in hand are finished, no more are begun
    assert alive() == []  # nobody writes once the caller has been told


def test_an_interrupt_while_threads_start_waits_for_those_that_have(monkeypatch):
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise KeyboardInterrupt
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipeline(4).run(Call(lambda: time.sleep(0.01)) for _ in range(1000))
    assert len(started) == 2
    assert alive() == []


def test_progress_counts_the_bytes_read(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 64)
    seen: list[int] = []

    class Read:
        def __init__(self, start: int) -> None:
            self.start = start

        def __call__(self, worker: Worker) -> None:
            host = memoryview(bytearray(128))
            ranges = [(file, self.start, self.start + 30), (file, 0, 6)]
            worker.fill(host, ranges, [0, 64])
            assert host[:30] == file.read_bytes()[self.start : self.start + 30]
            assert host[64:70] == bytes(range(6))

    reading = Pipeline(PlainBackend(), workers=3, buffer_size=2**20, advance=seen.append)
    reading.run([Read(at) for at in range(50)])
    assert sum(seen) == 50 * 36


def test_pieces_end_at_block_boundaries_and_keep_to_the_buffer():
    for buffer_size, workers in product([1, 10**5, 10**6, 10**7, 2**27, 10**12], [1, 2, 7, 64]):
        piece = piece_size(buffer_size, workers)
        for itemsize in (1, 2, 4, 8):
            for blocksize in BLOCKSIZES:
                assert piece % (itemsize * blocksize) == 0
        assert 2**16 <= piece <= LARGEST_PIECE
        assert piece == 2**16 or piece * workers <= buffer_size
        assert aligned(piece) == piece


def test_interleave():
    assert list(interleave([], 3)) == []
    assert list(interleave(["abc", "de", "fg"], 2)) == list("adbecfg")
    assert "".join(interleave(["abc", "de"], 1)) == "abcde"
    assert sorted(interleave((range(n) for n in range(30)), 7)) == sorted(
        x for n in range(30) for x in range(n)
    )


@pytest.mark.parametrize("run", [{"workers": -1}, {"buffer_size": 0}, {"buffer_size": -5}])
def test_numbers_that_make_no_sense(run):
    with pytest.raises(PlanError, match="expected a whole number from"):
        make_pipeline(PlainBackend(), RunOptions(**run), lambda _: None)
