"""Proves that what is stored is right: packed or converted once more, it comes out the same.

The tasks are those that write a shard. In place of the shard's file they have what compares with
the stored bytes; besides, they measure the errors of the weights. Nothing more is to be found out
of what comes out the same. Of anything else, diagnose.py says how it differs, and whether that is
wrong.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from nf4conv.check.pairing import Comparison
from nf4conv.format.layout import Format
from nf4conv.plan.arrange import place
from nf4conv.plan.jobs import CopyJob, Job, PackJob
from nf4conv.plan.rows import Errors
from nf4conv.report.measured import (
    ScaleErrors,
    TensorDifference,
    WeightResult,
)
from nf4conv.run.device.protocol import CastError, NonFiniteError
from nf4conv.run.loop import Task
from nf4conv.run.tasks.compare_bytes import StoredBytes, byte_tasks
from nf4conv.run.tasks.shard import shard_tasks
from nf4conv.run.worker import Backend, Worker
from nf4conv.sources.cutting import Piece
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.reader import Reader
from nf4conv.sources.tensors import TensorInfo

_NO_ERRORS: Final = Errors(0.0, 0.0, 0.0, 0)

_ANY_FORMAT: Final = Format("nf4", 64, double_quant=True, dtype="bfloat16")
"""Stands where nothing is packed."""

_PARTS_OF_KEPT: Final = ("values", "absmax", "nested_absmax", "nested_quant_map")
"""What is copied of a weight that stays as it is."""


class Proof:
    """Compares what jobs make with what is stored, where a shard's file would be written.

    What is stored of a weight is named by the weight.
    """

    def __init__(
        self,
        format: Format,
        jobs: Sequence[Job],
        stored: StoredBytes,
        weights: Mapping[str, Bitsandbytes4bit],
    ) -> None:
        self.format = format
        self.jobs = jobs
        self.measured: dict[str, WeightResult] = {}
        for job in jobs:
            if isinstance(job, PackJob):
                self.measured[job.name] = WeightResult(weights[job.name])
        self._stored = stored
        self._finished: set[str] = set()

    @property
    def unlike(self) -> set[str]:
        """The names of what came out otherwise than it is stored."""
        return self._stored.unlike

    def write(self, offset: int, data: memoryview) -> None:
        self._stored.write(offset, data)

    def finish_weights(
        self,
        worker: Worker,  # noqa: ARG002
        jobs: Sequence[PackJob],  # noqa: ARG002
        blobs: Mapping[str, bytes],
    ) -> None:
        for name, blob in blobs.items():
            if not self._is_stored(self.measured[name].weight, blob):
                self.unlike.add(name)
            self._finished.add(name)

    def _is_stored(self, weight: Bitsandbytes4bit, blob: bytes) -> bool:
        """Returns True if a blob is the quant state of a weight, on disk or still in memory."""
        if weight.blob == blob:
            return True
        part = weight.quant_state
        if part is None or part.nbytes != len(blob):
            return False
        return self._stored.is_stored(part, memoryview(bytearray(blob)))

    def finish_copy(self, worker: Worker, job: CopyJob, piece: Piece) -> None:
        """Does nothing: the bytes of a kept tensor have been compared."""

    def tasks(self, backend: Backend, piece: int) -> Iterator[Task]:
        """Yields what compares everything, in pieces of so many bytes."""
        for task in shard_tasks(self, self.jobs, backend, piece):
            yield partial(self._attempt, task.run)

    def _attempt(self, task: Task, worker: Worker) -> None:
        """Runs a task; what is not finite, or not once it is cast, stays unproved."""
        try:
            task(worker)
        except NonFiniteError:
            return  # the weight is never finished
        except CastError as error:
            self.unlike.add(str(error.tensor))  # later pieces of it may not have been compared

    def proved(self) -> dict[str, WeightResult]:
        """Returns the weights all bytes of which are right, and all values within the bound.

        There is no more to find of them.
        """
        found = {}
        for name in self._finished - self.unlike:
            result = self.measured[name]
            errors = result.errors
            if errors is None or errors.outside == 0:
                result.scales = ScaleErrors()
                found[name] = result
        return found


def checkpoint_proof(pairs: Comparison, reader: Reader, advance: Callable[[int], None]) -> Proof:
    """Returns the proof of a checkpoint; `advance` is told how many stored bytes have been read.

    Left out are weights that its source has in the same format, those that are not laid out as
    bitsandbytes would store them, those that are calibrated, as no second rounding gives the same
    bytes without the text, and all that would have to be packed if they are in several formats.
    """
    packed = []
    for weight, job in pairs.weights:
        is_calibrated = weight.format.scales == "calibrated"
        if not (is_kept(weight, job) or is_calibrated) and _is_laid_out_alike(weight, job):
            packed.append((weight, job))
    formats = {weight.format for weight, _ in packed}
    if len(formats) > 1:
        packed = []
    copies = [CopyJob(original, tensor.dtype, "") for original, tensor in pairs.copies]
    jobs: list[Job] = [*(job for _, job in packed), *copies]
    place(jobs)
    stored: dict[int, TensorInfo] = {}
    for weight, job in packed:
        stored.update(placed_parts(weight, job))
    for copy, (_, tensor) in zip(copies, pairs.copies, strict=True):
        if tensor.nbytes:
            stored[copy.offset] = tensor
    format = packed[0][0].format if packed else _ANY_FORMAT
    weights = {job.name: weight for weight, job in packed}
    return Proof(format, jobs, StoredBytes(reader, stored, advance), weights)


def is_kept(weight: Bitsandbytes4bit, job: PackJob) -> bool:
    """Returns True if the source has a weight in the format that it is stored in."""
    encoding = job.source.encoding
    if not isinstance(encoding, Bitsandbytes4bit):
        return False
    return encoding.format.decodes_like(weight.format)


def _is_laid_out_alike(weight: Bitsandbytes4bit, job: PackJob) -> bool:
    """Returns True if a stored weight has all components of a job, but its quant state, in size."""
    found = [part.nbytes for part in _parts(weight, job)]
    return found == [component.nbytes for component in job.components[:-1]]


def _parts(weight: Bitsandbytes4bit, job: PackJob) -> list[TensorInfo]:
    """Returns the tensors of a weight, but for its quant state, in the order of a job's components.

    Those that it lacks are left out; all are named by the weight.
    """
    parts = dict(weight.parts)
    found = []
    for component in job.components[:-1]:
        part = parts.get(component.suffix or "values")
        if part is not None:
            found.append(part._replace(name=job.name))
    return found


def placed_parts(weight: Bitsandbytes4bit, job: PackJob) -> dict[int, TensorInfo]:
    """Returns the tensors of a weight by the places that a job gives them, but for empty ones and
    the quant state.
    """
    placed = zip(job.offsets, _parts(weight, job), strict=True)
    return {offset: part for offset, part in placed if part.nbytes}


def prove_kept_weight(result: WeightResult, job: PackJob, piece: int, worker: Worker) -> None:
    """Compares the bytes of a packed weight with those of its source, which is in the same format.

    Of a weight that is the same, the result has no errors; of any other it stays as it was.
    """
    encoding = job.source.encoding
    assert isinstance(encoding, Bitsandbytes4bit)
    mine = dict(result.weight.parts)
    differences = []
    for role, part in encoding.parts:
        if role in _PARTS_OF_KEPT:
            differences.append(TensorDifference(mine[role], part))
    for task in byte_tasks(differences, piece):
        task(worker)
    if any(difference.is_identical is False for difference in differences):
        return
    if result.weight.nested_offset == encoding.nested_offset:
        result.add_piece(0, _NO_ERRORS)
        result.scales = ScaleErrors()
