"""Chooses the device of each job: the driver where it can do the job, because importing torch takes
seconds; else torch.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from nf4conv.format.layout import Format
from nf4conv.options import MachineOptions
from nf4conv.plan.jobs import CopyJob, Job, PackJob
from nf4conv.run.device.on_driver.backend import DECODED, DriverBackend, gpu_named, open_gpu
from nf4conv.run.device.on_driver.kernels import (
    Purpose,
    measuring_purpose,
    packing_purpose,
    packing_steps,
)
from nf4conv.run.device.on_driver.loading import kernels_for_tensor
from nf4conv.run.device.on_torch.backend import TorchBackend
from nf4conv.run.pieces import ENOUGH, located, pieces_of, whole_weight
from nf4conv.run.worker import Backend
from nf4conv.sources.arranged import Excerpt, Merged, StackedExperts

_log: Final = logging.getLogger(__name__)

_NOTHING: Final = frozenset[Purpose]()

_NOT_COMPILED: Final = "the kernels cannot be compiled here (`nf4conv env` says why)"

_RETURNED: Final = 3 / 8
"""Bytes of a packed weight for each that it had; of 2-byte weights in blocks of 32: 1/4 in codes,
1/16 in absmax, 1/64 in its codes.
"""


class Devices:
    """The devices of a run: torch, which is imported once it is needed, and perhaps a driver.

    `reasons` say why some of the `number` of tensors take torch although there is a driver.
    """

    def __init__(
        self,
        torch: TorchBackend,
        driver: DriverBackend | None = None,
        reasons: Mapping[str, str] | None = None,
        number: int = 0,
    ) -> None:
        self.torch = torch
        self._driver = driver
        self._reasons = reasons or {}
        self._number = number

    @property
    def main(self) -> Backend:
        """The device that most is done on."""
        return self.torch if self._driver is None else self._driver

    @property
    def name(self) -> str:
        """The device as reports name it, such as "cpu" or "cuda:0"."""
        return self.main.name

    @property
    def backends(self) -> tuple[Backend, ...]:
        """All devices that tasks may ask for, the main one first."""
        return (self.torch,) if self._driver is None else (self._driver, self.torch)

    def backend_for(self, name: str) -> Backend:
        """Returns the device that computes a tensor."""
        if self._driver is None or name in self._reasons:
            return self.torch
        return self._driver

    def notes(self) -> tuple[str, ...]:
        """Returns a line for the user if some tensors took torch beside the driver."""
        if self._driver is None or not self._reasons:
            return ()
        counted = Counter(self._reasons.values())
        why = ", ".join(reason for reason, _ in counted.most_common(3))
        return (f"{len(self._reasons):,} of {self._number:,} tensors took torch ({why})",)


def require_device(run: MachineOptions) -> None:
    """Raises a PlanError if there is no such device as the user named, although none is needed."""
    if run.device not in ("auto", "cpu") and gpu_named(run.device) is None:
        _ = TorchBackend(run.device).name


def open_devices(
    jobs: Callable[[], Iterable[Job]], format: Format, run: MachineOptions, *, is_measured: bool
) -> Devices:
    """Opens the devices of a run; torch is not imported.

    The jobs are asked for only if there is a GPU.
    """
    number = gpu_named(run.device)
    if number is None:
        return _torch_alone(run, _no_gpu(run))
    listed = list(jobs())
    purposes: set[Purpose] = set()
    reasons = {}
    for job in listed:
        kernels = _kernels_for_job(job, format, is_measured=is_measured)
        if kernels is None:
            reasons[job.name] = _why_torch(job)
        else:
            purposes |= kernels
    if reasons and not purposes:  # the driver would only copy bytes
        why = Counter(reasons.values()).most_common(1)[0][0]
        return _torch_alone(run, f"there are no kernels for it: {why}")
    driver = open_gpu(number, purposes, format, _returned(listed))
    if driver is None:
        return _torch_alone(run, _NOT_COMPILED)
    _log.info("computes on %s with kernels, by the CUDA driver, without torch", driver.name)
    return Devices(TorchBackend(run.device), driver, reasons, len(listed))


def _torch_alone(run: MachineOptions, why: str) -> Devices:
    _log.info("computes with torch: %s", why)
    return Devices(TorchBackend(run.device))


def _no_gpu(run: MachineOptions) -> str:
    if run.device == "cpu":
        return "the CPU was asked for"
    return f"no NVIDIA GPU with a driver was found (device {run.device})"


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


def _kernels_for_job(job: Job, format: Format, *, is_measured: bool) -> frozenset[Purpose] | None:
    """Tells which kernels a job takes; None if there are none for it, so that it takes torch."""
    if isinstance(job, CopyJob):
        if not job.is_changed:
            return _NOTHING
        # all pieces are as the first one
        first = next(iter(pieces_of(job.source, ENOUGH)), None)
        return _NOTHING if first is None else kernels_for_tensor(first.tensor, job.steps)
    if job.stored is not None:
        return _NOTHING
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


def _why_torch(job: Job) -> str:
    """Says in a few words why there are no kernels for a job."""
    source = job.source
    if isinstance(job, PackJob) and located(job)[1].transpose:
        return "stored transposed"
    if isinstance(source.encoding, Merged | StackedExperts | Excerpt):
        return source.encoding.name
    if isinstance(job, PackJob) and (job.matrix.columns is not None or job.matrix.step > 1):
        return "cut out of a larger tensor"
    if source.encoding is not None:
        return f"stored as {source.encoding.name}"
    return f"stored in {source.dtype}"
