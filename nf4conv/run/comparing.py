"""Compares tensors: their bytes in host memory, or their values on a device."""

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

from nf4conv.options import MachineOptions
from nf4conv.report.measured import TensorDifference
from nf4conv.run.device.choice import open_devices_for_pairs
from nf4conv.run.device.on_driver.backend import gpu_named
from nf4conv.run.device.on_torch.backend import TorchBackend
from nf4conv.run.loop import make_pipeline
from nf4conv.run.tasks.compare_bytes import byte_tasks
from nf4conv.run.tasks.compare_values import value_tasks

_log: Final = logging.getLogger(__name__)


def compare_bytes(
    results: Sequence[TensorDifference], run: MachineOptions, progress: Callable[[int], None]
) -> None:
    """Compares tensors that are stored alike, byte by byte, in host memory.

    Raises:
        PlanError: there is no such device as the user named, although none is needed here.
    """
    if run.device not in ("auto", "cpu") and gpu_named(run.device) is None:
        _ = TorchBackend(run.device).name  # which finds the device, or says that there is none
    pipeline = make_pipeline([], run, progress)
    pipeline.run(byte_tasks(results, pipeline.piece))
    _log.info("compared the bytes of %d tensors in %.1f s", len(results), pipeline.elapsed)


def compare_values(
    results: Sequence[TensorDifference], run: MachineOptions, progress: Callable[[int], None]
) -> str:
    """Compares tensors value by value; returns the device that most was done on."""
    opened = open_devices_for_pairs(results, run)
    devices = opened.devices
    pipeline = make_pipeline(devices.backends, run, progress)
    pipeline.run(
        chain(
            value_tasks(opened.with_kernels, devices.main, pipeline.piece),
            value_tasks(opened.others, devices.torch, pipeline.piece),
        )
    )
    _log.info("compared the values of %d tensors in %.1f s", len(results), pipeline.elapsed)
    return devices.name
