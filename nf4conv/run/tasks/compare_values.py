"""Tasks that compare tensors value by value."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from nf4conv.report.measured import TensorDifference
from nf4conv.run.device.protocol import PairOfPieces
from nf4conv.run.loop import Task
from nf4conv.run.pieces import batches
from nf4conv.run.worker import Backend, Worker
from nf4conv.sources.cutting import pieces_alike, share_parts

_SLACK = 2**12  # bytes that two pieces take beside those that grow with them


class _Pair(NamedTuple):
    """A piece of two tensors that are compared."""

    result: TensorDifference  # where what is found goes
    start: int  # elements of the tensors before it
    pieces: PairOfPieces


def value_tasks(
    results: Iterable[TensorDifference], backend: Backend, piece: int
) -> Iterator[Task]:
    """Yields the tasks that compare tensors on a device, given how many bytes a worker reads."""
    nbytes = backend.pair_bytes(piece)
    others = []
    for result in results:
        if _has_shared_parts(result, nbytes):
            yield partial(_compare_in_turn, backend, list(_pairs([result], nbytes)))
        else:
            others.append(result)
    found = batches(
        _pairs(others, nbytes),
        _room,
        piece,
        _dtypes,
        backend.pairs_at_a_time,
    )
    for pairs in found:
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
    return pair.pieces.a.nbytes + pair.pieces.b.nbytes + _SLACK


def _dtypes(pair: _Pair) -> tuple[str, str]:
    return pair.pieces.a.dtype, pair.pieces.b.dtype


def _compare(backend: Backend, pairs: Sequence[_Pair], worker: Worker) -> None:
    differences = worker.device(backend).subtract([pair.pieces for pair in pairs])
    for pair, difference in zip(pairs, differences, strict=True):
        pair.result.add_piece(pair.start, difference)


def _compare_in_turn(backend: Backend, pairs: Sequence[_Pair], worker: Worker) -> None:
    for pair in pairs:
        _compare(backend, [pair], worker)
