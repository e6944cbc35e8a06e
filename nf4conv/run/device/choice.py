"""Chooses what a run computes with: the driver of a GPU where it can do every job, because
importing torch takes seconds; else torch.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from nf4conv.format.layout import Format
from nf4conv.options import MachineOptions
from nf4conv.plan.jobs import CopyJob, Job, PackJob
from nf4conv.run.device.on_driver.device import DECODED, gpu_named, open_gpu
from nf4conv.run.device.on_driver.kernels import (
    Purpose,
    measuring_purpose,
    packing_purpose,
    packing_steps,
)
from nf4conv.run.device.on_driver.loading import kernels_for_tensor
from nf4conv.run.pieces import ENOUGH, whole_weight
from nf4conv.run.worker import Backend
from nf4conv.sources.cutting import pieces_of

if TYPE_CHECKING:
    from nf4conv.run.device.on_torch.device import TorchBackend

_log: Final = logging.getLogger(__name__)

_NOTHING: Final = frozenset[Purpose]()

_RETURNED: Final = 3 / 8
"""Bytes of a packed weight for each that it had; of 2-byte weights in blocks of 32: 1/4 in codes,
1/16 in absmax, 1/64 in its codes.
"""


def require_device(run: MachineOptions) -> None:
    """Raises a PlanError if there is no such device as the user named, although none is needed."""
    if run.device not in ("auto", "cpu") and gpu_named(run.device) is None:
        open_torch(run)


def open_device(
    jobs: Callable[[], Iterable[Job]], format: Format, run: MachineOptions, *, is_measured: bool
) -> Backend:
    """Opens the device of a run, whose weights are packed in a format, and measured if asked.

    The jobs are asked for only if there is a GPU. Raises a PlanError if there is no such device as
    the user named.
    """
    number = gpu_named(run.device)
    if number is None:
        _log.info("computes with torch: no NVIDIA GPU is to be used, or has a driver")
        return open_torch(run)
    listed = list(jobs())
    purposes: set[Purpose] = set()
    for job in listed:
        found = _kernels_for(job, format, is_measured=is_measured)
        if found is None:
            _log.info("computes with torch: there are no kernels for %s", job.name)
            return open_torch(run)
        purposes |= found
    driver = open_gpu(number, purposes, format, _returned(listed))
    if driver is None:
        _log.info("computes with torch: `nf4conv env` says why kernels cannot be compiled")
        return open_torch(run)
    _log.info("computes on %s with kernels, by the CUDA driver, without torch", driver.name)
    return driver


def open_torch(run: MachineOptions) -> "TorchBackend":
    """Opens the user's device with torch; a PlanError if there is none."""
    started = time.perf_counter()
    from nf4conv.run.device.on_torch.device import TorchBackend  # importing torch takes seconds

    backend = TorchBackend(run.device)
    seconds = time.perf_counter() - started
    _log.info("torch computes on %s, ready after %.1f s", backend.name, seconds)
    return backend


def _returned(jobs: Iterable[Job]) -> float:
    """Returns how many bytes come back from the GPU for each that goes there, at most.

    More come back of weights that are decoded there.
    """
    weights = [job for job in jobs if isinstance(job, PackJob)]
    if not weights:
        return 1.0
    if any(job.source.encoding is not None for job in weights):
        return _RETURNED * DECODED
    return _RETURNED


def _kernels_for(job: Job, format: Format, *, is_measured: bool) -> frozenset[Purpose] | None:
    """Tells which kernels a job takes; None if there are none for it."""
    if isinstance(job, CopyJob):
        if not job.is_changed:
            return _NOTHING
        # all pieces are as the first one
        first = next(iter(pieces_of(job.source, ENOUGH)), None)
        return _NOTHING if first is None else kernels_for_tensor(first.tensor, job.steps)
    if job.stored is not None:
        # torch compares a calibrated weight with what it was made from
        return None if is_measured and job.original is not None else _NOTHING
    if job.source.encoding is not None and len(job.matrix.shape) > 2:
        return None  # a stack is decoded matrix by matrix, and packed as a whole
    whole = whole_weight(job)
    if whole.tensor is None:
        return None
    found = kernels_for_tensor(whole.tensor, packing_steps(job.source, format))
    if found is None:
        return None
    purposes = {packing_purpose(format)}
    if is_measured:
        purposes.add(measuring_purpose(format))
    return found | purposes
