"""How far the values of two tensors are apart, by workers without torch: the figures are those of
with_torch/.

Some pieces of tensors go up in one copy; a launch decodes each that is encoded, another compares
each pair; their sums come down in one copy.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import fsum
from typing import Final

from nf4conv.format.layout import DTYPE_NAMES
from nf4conv.report.measured import PieceDifference, TensorDifference
from nf4conv.run.loop import Activity, Task, aligned, batches
from nf4conv.run.shards import LARGEST_BATCH
from nf4conv.run.without_torch.bundle import Action, Purpose
from nf4conv.run.without_torch.reading import (
    Reading,
    add_tensor,
    bring,
    bytes_of,
    purposes_of_tensor,
    starts,
)
from nf4conv.run.without_torch.worker import HEAD, CudaWorker, Launch
from nf4conv.sources.encodings.pieces import pieces_alike
from nf4conv.sources.tensors import TensorInfo

Piece = tuple[
    TensorDifference, int, TensorInfo, TensorInfo
]  # where what is found goes, first element, A, B

_ENOUGH: Final = 2**62  # more bytes than there are
_SLACK: Final = (
    2**12
)  # bytes that two tensors, or pieces of them, take beside those that grow with them
_SUMS: Final = 32  # bytes of a program's sums, see kernels/difference.py: four float64


def purposes_of(result: TensorDifference) -> frozenset[Purpose] | None:
    """What kernels compare two tensors; None if that needs more than is here: other dtypes, and
    other encodings.
    """
    tags = result.a.dtype, result.b.dtype
    _, *pieces = next(pieces_alike(result.a, result.b, _ENOUGH))
    needed = [purposes_of_tensor(piece, (piece.dtype,)) for piece in pieces]
    if None in needed or not {*tags} <= {*DTYPE_NAMES}:
        return None
    return frozenset({Purpose(Action.SUBTRACT, tags)}).union(*filter(None, needed))


def value_tasks(results: Iterable[TensorDifference], piece: int) -> Iterator[Task[CudaWorker]]:
    """The comparison of tensors value by value."""
    found = (
        (result, *pair)
        for result in results
        for pair in pieces_alike(result.a, result.b, piece - _SLACK)
    )
    for pieces in batches(
        found, lambda of: of[2].nbytes + of[3].nbytes + _SLACK, piece, _dtypes, LARGEST_BATCH
    ):
        yield partial(_compare, pieces)


def _dtypes(piece: Piece) -> tuple[str, str]:
    return piece[2].dtype, piece[3].dtype


def _compare(pieces: Sequence[Piece], worker: CudaWorker) -> None:
    """Pieces that fit into a worker's buffer together, and have the same dtypes."""
    reading, launches = Reading(worker), list[Launch]()
    tensors = [tensor for piece in pieces for tensor in piece[2:]]
    placed = [add_tensor(reading, tensor) for tensor in tensors]
    reading.read()
    with worker.timed(Activity.COMPUTE):
        addresses = [reading.address(parts["values"]) for parts in placed]
        decoded = [at for at, tensor in enumerate(tensors) if tensor.encoding is not None]
        targets = starts(
            aligned(bytes_of(tensors[at].dtype, tensors[at].elements)) for at in decoded
        )
        base = worker.scratch(targets[-1])
        for at, target in zip(decoded, targets, strict=False):
            addresses[at] = base + target
            launches.append(
                bring(reading, tensors[at], placed[at], tensors[at].dtype, addresses[at])
            )
        kernels = worker.engine.kernels[Purpose(Action.SUBTRACT, _dtypes(pieces[0]))]
        programs = [-(-a.elements // kernels.numbers["tile"]) for _, _, a, _ in pieces]
        places = [HEAD + _SUMS * place for place in starts(programs)]
        worker.reserve(result=places[-1])
        for at, (_, _, a, _) in enumerate(pieces):
            arguments = (
                *addresses[2 * at :][:2],
                worker.output.address + places[at],
                a.elements,
                programs[at],
            )
            launches.append((kernels.functions["subtract"], programs[at], arguments))
        worker.execute(reading.stop, launches, places[-1])
    for (result, start, _, _), place, stop in zip(pieces, places, places[1:], strict=False):
        sums = worker.result.view[place:stop].cast("d").tolist()
        squares, values, largest, differing = (
            sums[row * len(sums) // 4 :][: len(sums) // 4] for row in range(4)
        )
        result.add_piece(
            start, PieceDifference(fsum(squares), fsum(values), max(largest), round(sum(differing)))
        )
