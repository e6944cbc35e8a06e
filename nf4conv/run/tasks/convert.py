"""The task of kept tensors that are decoded or cast."""

from collections.abc import Sequence

from nf4conv.run.device.protocol import CopyPart
from nf4conv.run.shards import Destination
from nf4conv.run.worker import Activity, Backend, Worker, Writable


def convert(
    destination: Destination, backend: Backend, parts: Sequence[CopyPart], worker: Worker
) -> None:
    """Converts tensors, or parts of them, that go through the same dtypes.

    Raises:
        CastError: finite values become infinite.
    """
    write_converted(destination, backend, parts, worker)
    for job, piece in parts:
        destination.finish_copy(worker, job, piece)
    destination.count_task()


def convert_pieces(
    destination: Destination, backend: Backend, pieces: Sequence[CopyPart], worker: Worker
) -> None:
    """Converts the pieces of a tensor, one after the other.

    Raises:
        CastError: finite values become infinite.
    """
    for part in pieces:
        write_converted(destination, backend, [part], worker)
        destination.finish_copy(worker, part.job, part.piece)
    destination.count_task()


def write_converted(
    destination: Writable, backend: Backend, parts: Sequence[CopyPart], worker: Worker
) -> None:
    """Converts tensors, or parts of them, and writes them to their places.

    Args:
        destination: takes the converted bytes.
        backend: the device that converts.
        parts: tensors, or parts of them, that go through the same dtypes.
        worker: the thread's.

    Raises:
        CastError: finite values become infinite; raised once all values are written.
    """
    for job, start, values in worker.device(backend).convert(parts):
        with worker.timed(Activity.WRITE):
            destination.write(job.offset + start, values)
