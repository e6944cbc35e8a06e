"""Compares tensors of two checkpoints: their bytes in host memory, and with torch the values of
those whose bytes differ.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from nf4conv.options import MachineOptions
from nf4conv.report.measured import TensorDifference
from nf4conv.run.device.choice import open_torch, require_device
from nf4conv.run.loop import Task, make_pipeline
from nf4conv.run.tasks.compare_bytes import byte_tasks
from nf4conv.run.worker import Worker
from nf4conv.sources.cutting import pieces_alike, share_parts
from nf4conv.sources.reader import Reader
from nf4conv.sources.tensors import TensorInfo

_log: Final = logging.getLogger(__name__)


def compare(
    pairs: Sequence[tuple[TensorInfo, TensorInfo]],
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
    for original, tensor in pairs:
        is_plain = original.encoding is None and tensor.encoding is None
        # byte_tasks clear this when they find bytes that differ
        is_identical = True if is_plain and original.dtype == tensor.dtype else None
        results[tensor.name] = TensorDifference(original, tensor, is_identical)
    stored_alike = [result for result in results.values() if result.is_identical]
    pipeline = make_pipeline(None, run, progress)
    pipeline.run(byte_tasks(stored_alike, pipeline.piece), reader)
    _log.info("compared the bytes of %d tensors in %.1f s", len(stored_alike), pipeline.elapsed)
    unlike = [result for result in results.values() if _needs_values(result)]
    if not unlike:
        return "cpu", results
    torch = open_torch(run)
    pipeline = make_pipeline(torch, run, progress)
    tasks = (task for one in unlike for task in _value_tasks(one, pipeline.piece))
    pipeline.run(tasks, reader)
    _log.info("compared the values of %d tensors in %.1f s", len(unlike), pipeline.elapsed)
    return torch.name, results


def _needs_values(result: TensorDifference) -> bool:
    """Returns True if values must be compared. Of complex numbers only the bytes are compared."""
    if result.is_identical or not result.a.elements:
        return False
    return "C64" not in (result.a.dtype, result.b.dtype)


def _value_tasks(result: TensorDifference, piece: int) -> Iterator[Task]:
    """Yields the tasks that compare a tensor value by value; one, if pieces share what is read."""
    pieces = list(pieces_alike(result.a, result.b, piece // 4))  # decoded, both take more
    if any(share_parts(a) or share_parts(b) for _, a, b in pieces):
        yield partial(_compare, result, pieces)
        return
    for one in pieces:
        yield partial(_compare, result, [one])


def _compare(
    result: TensorDifference,
    pieces: Sequence[tuple[int, TensorInfo, TensorInfo]],
    worker: Worker,
) -> None:
    from nf4conv.run.device.on_torch.device import device_of  # importing torch takes seconds

    for start, a, b in pieces:
        result.add_piece(start, device_of(worker).subtract(a, b))
