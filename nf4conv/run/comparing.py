"""Compares tensors of two checkpoints: their bytes in host memory, and the values of those whose
bytes differ on a device.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

from nf4conv.check.pairing import AlikePair
from nf4conv.options import MachineOptions
from nf4conv.report.measured import TensorDifference
from nf4conv.run.device.choice import open_devices_for_pairs
from nf4conv.run.device.on_driver.backend import gpu_named
from nf4conv.run.device.on_torch.backend import TorchBackend
from nf4conv.run.loop import make_pipeline
from nf4conv.run.tasks.compare_bytes import byte_tasks
from nf4conv.run.tasks.compare_values import value_tasks
from nf4conv.sources.reader import Reader

_log: Final = logging.getLogger(__name__)


def compare(
    pairs: Sequence[AlikePair], run: MachineOptions, progress: Callable[[int], None], reader: Reader
) -> tuple[str, dict[str, TensorDifference]]:
    """Compares tensors by their bytes, and by their values where bytes differ.

    Returns:
        The device that compared values, and what was found of each tensor, by its name.

    Raises:
        PlanError: there is no such device as the user named, although none is needed here.
    """
    if run.device not in ("auto", "cpu") and gpu_named(run.device) is None:
        _ = TorchBackend(run.device).name  # which finds the device, or says that there is none
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
    opened = open_devices_for_pairs(unlike, run)
    devices = opened.devices
    pipeline = make_pipeline(devices.backends, run, progress)
    pipeline.run(
        chain(
            value_tasks(opened.with_kernels, devices.main, pipeline.piece),
            value_tasks(opened.others, devices.torch, pipeline.piece),
        ),
        reader,
    )
    _log.info("compared the values of %d tensors in %.1f s", len(unlike), pipeline.elapsed)
    return devices.name, results


def _needs_values(result: TensorDifference) -> bool:
    """Returns True if values must be compared. Of complex numbers only the bytes are compared."""
    if result.is_identical or not result.a.elements:
        return False
    return "C64" not in (result.a.dtype, result.b.dtype)
