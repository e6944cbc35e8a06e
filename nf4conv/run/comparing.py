"""Compares tensors of two checkpoints: their bytes in host memory, and the values of those whose
bytes differ with torch.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

from nf4conv.check.pairing import TensorPair
from nf4conv.options import MachineOptions
from nf4conv.report.measured import TensorDifference
from nf4conv.run.device.choice import require_device
from nf4conv.run.device.on_torch.backend import TorchBackend
from nf4conv.run.loop import make_pipeline
from nf4conv.run.tasks.compare_bytes import byte_tasks
from nf4conv.sources.reader import Reader

_log: Final = logging.getLogger(__name__)


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
    for original, tensor in pairs:
        is_plain = original.encoding is None and tensor.encoding is None
        # byte_tasks clear this when they find bytes that differ
        is_identical = True if is_plain and original.dtype == tensor.dtype else None
        results[tensor.name] = TensorDifference(original, tensor, is_identical)
    stored_alike = [result for result in results.values() if result.is_identical]
    pipeline = make_pipeline([], run, progress)
    pipeline.run(byte_tasks(stored_alike, pipeline.piece), reader)
    _log.info("compared the bytes of %d tensors in %.1f s", len(stored_alike), pipeline.elapsed)
    unlike = [result for result in results.values() if _needs_values(result)]
    if not unlike:
        return "cpu", results
    from nf4conv.run.tasks.diagnose import value_tasks  # importing torch takes seconds

    torch = TorchBackend(run.device)
    pipeline = make_pipeline([torch], run, progress)
    tasks = [value_tasks(result, torch, pipeline.piece) for result in unlike]
    pipeline.run(chain.from_iterable(tasks), reader)
    _log.info("compared the values of %d tensors in %.1f s", len(unlike), pipeline.elapsed)
    return torch.name, results


def _needs_values(result: TensorDifference) -> bool:
    """Returns True if values must be compared. Of complex numbers only the bytes are compared."""
    if result.is_identical or not result.a.elements:
        return False
    return "C64" not in (result.a.dtype, result.b.dtype)
