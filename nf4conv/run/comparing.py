"""Compares tensors of two checkpoints: their bytes in host memory, and the values of those whose
bytes differ on a device.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from nf4conv.check.pairing import TensorPair
from nf4conv.options import MachineOptions
from nf4conv.report.measured import TensorDifference
from nf4conv.run.device.choice import open_devices_for_pairs, require_device
from nf4conv.run.device.protocol import PairOfPieces
from nf4conv.run.loop import Task, make_pipeline
from nf4conv.run.pieces import LARGEST_BATCH, PAIR_SLACK, batches
from nf4conv.run.tasks.compare_bytes import byte_tasks
from nf4conv.run.worker import Backend, Worker
from nf4conv.sources.cutting import pieces_alike, share_parts
from nf4conv.sources.reader import Reader

_log: Final = logging.getLogger(__name__)


class _Pair(NamedTuple):
    """A piece of two tensors that are compared."""

    result: TensorDifference  # where what is found goes
    start: int  # elements of the tensors before it
    pieces: PairOfPieces


def compare(
    pairs: Sequence[TensorPair],
    run: MachineOptions,
    progress: Callable[[int], None],
    reader: Reader,
) -> tuple[str, dict[str, TensorDifference]]:
    """Compares tensors by their bytes, and by their values where bytes differ.

    Returns the device that compared values, and what was found of each tensor, by its name. Raises
    a PlanError if there is no such device as the user named, although none is needed here.
    """
    require_device(run)
    results = {}
    for original, tensor, are_stored_alike in pairs:
        # byte_tasks clear this when they find bytes that differ
        is_identical = True if are_stored_alike else None
        results[tensor.name] = TensorDifference(original, tensor, is_identical)
    stored_alike = [result for result in results.values() if result.is_identical]
    pipeline = make_pipeline([], run, progress)
    pipeline.run(byte_tasks(stored_alike, pipeline.piece), reader)
    _log.info("compared the bytes of %d tensors in %.1f s", len(stored_alike), pipeline.elapsed)
    unlike = [result for result in results.values() if _needs_values(result)]
    if not unlike:
        return "cpu", results
    devices = open_devices_for_pairs(unlike, run)
    pipeline = make_pipeline(devices.backends, run, progress)
    tasks: list[Task] = []
    for backend in devices.backends:
        on_backend = [one for one in unlike if devices.backend_for(one.b.name) is backend]
        tasks += _value_tasks(on_backend, backend, pipeline.piece)
    pipeline.run(tasks, reader)
    _log.info("compared the values of %d tensors in %.1f s", len(unlike), pipeline.elapsed)
    return devices.name, results


def _needs_values(result: TensorDifference) -> bool:
    """Returns True if values must be compared. Of complex numbers only the bytes are compared."""
    if result.is_identical or not result.a.elements:
        return False
    return "C64" not in (result.a.dtype, result.b.dtype)


def _value_tasks(
    results: Iterable[TensorDifference], backend: Backend, piece: int
) -> Iterator[Task]:
    """Yields the tasks that compare tensors value by value on a device."""
    nbytes = backend.pair_bytes(piece)
    others = []
    for result in results:
        if _has_shared_parts(result, nbytes):
            yield partial(_compare_in_turn, backend, list(_pairs([result], nbytes)))
        else:
            others.append(result)
    for pairs in batches(_pairs(others, nbytes), _room, piece, _dtypes, LARGEST_BATCH):
        yield partial(_compare, backend, pairs)


def _has_shared_parts(result: TensorDifference, nbytes: int) -> bool:
    """Returns True if pieces of one of the tensors are decoded from the same bytes."""
    for _, a, b in pieces_alike(result.a, result.b, nbytes):
        return share_parts(a) or share_parts(b)
    return False


def _pairs(results: Iterable[TensorDifference], nbytes: int) -> Iterator[_Pair]:
    for result in results:
        for start, a, b in pieces_alike(result.a, result.b, nbytes):
            yield _Pair(result, start, PairOfPieces(a, b))


def _room(pair: _Pair) -> int:
    return pair.pieces.a.nbytes + pair.pieces.b.nbytes + PAIR_SLACK


def _dtypes(pair: _Pair) -> tuple[str, str]:
    return pair.pieces.a.dtype, pair.pieces.b.dtype


def _compare(backend: Backend, pairs: Sequence[_Pair], worker: Worker) -> None:
    differences = worker.device(backend).subtract([pair.pieces for pair in pairs])
    for pair, difference in zip(pairs, differences, strict=True):
        pair.result.add_piece(pair.start, difference)


def _compare_in_turn(backend: Backend, pairs: Sequence[_Pair], worker: Worker) -> None:
    for pair in pairs:
        _compare(backend, [pair], worker)
