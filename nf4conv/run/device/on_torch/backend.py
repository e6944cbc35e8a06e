"""torch on one device, as all threads of a run share it. Imports torch once it is needed."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.plan.jobs import CopyJob, PackJob
from nf4conv.run.pieces import aligned
from nf4conv.run.worker import Worker
from nf4conv.sources.foreign.bitsandbytes import packed_in_order

if TYPE_CHECKING:  # importing torch takes seconds
    import torch

    from nf4conv.run.device.on_torch.buffers import SharedTensors
    from nf4conv.run.device.on_torch.device import TorchDevice

_log: Final = logging.getLogger(__name__)


class TorchBackend:
    """torch on one device: "auto", "cpu", "cuda" or "cuda:N"."""

    def __init__(self, device: str) -> None:
        self._wanted = device
        self._found: torch.device | None = None
        self._finding = threading.Lock()
        self._shared: SharedTensors | None = None

    @property
    def torch_device(self) -> "torch.device":
        """The device; a PlanError if there is none of that name."""
        with self._finding:
            if self._found is None:
                self._found = self._import_and_find()
            return self._found

    def _import_and_find(self) -> "torch.device":
        started = time.perf_counter()
        from nf4conv.run.device.on_torch.device import find_device  # importing torch takes seconds

        imported = time.perf_counter() - started
        found = find_device(self._wanted)
        _log.info("torch computes on %s, imported in %.1f s", found, imported)
        return found

    @property
    def name(self) -> str:
        return str(self.torch_device)

    @contextmanager
    def open(self, worker: Worker) -> "Iterator[TorchDevice]":
        device = self.torch_device
        from nf4conv.run.device.on_torch.buffers import SharedTensors  # importing torch takes long
        from nf4conv.run.device.on_torch.device import opened  # importing torch takes seconds

        with self._finding:
            if self._shared is None:
                self._shared = SharedTensors()
        with opened(device, self._shared, worker) as found:
            yield found

    def device_memory(self) -> int:
        if self._found is None or self._found.type != "cuda":
            return 0
        import torch  # which has been imported

        return torch.cuda.max_memory_reserved(self._found)

    def weight_room(self, job: PackJob) -> int:
        if job.is_cut_out:
            return 2 * job.elements  # a piece holds as many in 16 bits
        return aligned(job.source_bytes)

    def weight_kind(self, job: PackJob) -> object:
        return job.name if job.is_cut_out else None  # what is cut out is read alone

    def copy_elements(self, job: CopyJob, piece: int) -> int:
        source = job.source
        is_unpacked = packed_in_order(source) is not None and job.dtype == source.dtype
        if source.encoding is None or is_unpacked:
            return piece * 8 // DTYPE_BITS[source.dtype]
        return piece // 2
