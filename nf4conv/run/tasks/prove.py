"""Proves that what is stored is right: packed or converted once more, it comes out the same.

The tasks are those that write a shard. In place of the shard's file they have what compares with
the stored bytes; besides, they measure the errors of the weights. Nothing more is to be found out
of what comes out the same. Of anything else, diagnose.py says how it differs, and whether that is
wrong.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from nf4conv.check.pairing import PackedPair, Pairs
from nf4conv.format.layout import Format
from nf4conv.plan.arrange import arrange
from nf4conv.plan.jobs import CopyJob, Job, PackJob
from nf4conv.plan.rows import Errors
from nf4conv.report.measured import (
    ScaleErrors,
    TensorDifference,
    WeightResult,
)
from nf4conv.run.device.choice import Devices
from nf4conv.run.device.protocol import CastError, CopyPart, NonFiniteError
from nf4conv.run.loop import Task
from nf4conv.run.tasks.compare_bytes import StoredBytes, byte_tasks, is_same, stored_from
from nf4conv.run.tasks.convert import write_converted
from nf4conv.run.tasks.shard import shard_tasks
from nf4conv.run.worker import Worker
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
    """Compares what tasks make with what is stored, where a shard's file would be written.

    Args:
        format: how weights are packed.
        stored: compares bytes. Components of a weight are named by the weight.
        weights: the stored weights by name.

    Attributes:
        measured: the errors of each weight, as far as tasks have measured them.
    """

    def __init__(
        self, format: Format, stored: StoredBytes, weights: Mapping[str, Bitsandbytes4bit]
    ) -> None:
        self.format = format
        self.measured: dict[str, WeightResult] = {}
        for name, weight in weights.items():
            self.measured[name] = WeightResult(weight)
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

    def count_task(self) -> None:
        """Does nothing: nobody waits for the last task."""

    def tasks(self, jobs: Sequence[Job], devices: Devices, piece: int) -> list[Task]:
        """Returns what compares everything, in pieces of so many bytes."""
        return [partial(self._attempt, task) for task in shard_tasks(self, jobs, devices, piece)]

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


@dataclass(frozen=True)
class ProofShard:
    """Jobs that are placed as in a shard.

    Attributes:
        jobs: what is packed or converted once more.
        stored: what is stored, by the offset that the jobs write it to.
    """

    jobs: tuple[Job, ...]
    stored: Mapping[int, TensorInfo]


@dataclass(frozen=True)
class ProofPlan:
    """Lists what can be proved of a checkpoint.

    Attributes:
        format: how its weights are packed.
        shards: what is packed or converted once more.
        weights: the stored weights that are packed once more, by name.
        kept: weights that the source has in the same format.
    """

    format: Format
    shards: tuple[ProofShard, ...]
    weights: Mapping[str, Bitsandbytes4bit]
    kept: Sequence[PackedPair]

    @property
    def jobs(self) -> list[Job]:
        return [job for shard in self.shards for job in shard.jobs]


def plan_proof(pairs: Pairs) -> ProofPlan:
    """Finds out what can be proved of a checkpoint.

    Left out are weights that are not laid out as bitsandbytes would store them, and all weights
    that would have to be packed if they are in several formats.
    """
    kept = []
    packed = []
    for pair in pairs.weights:
        if is_kept(pair.weight, pair.job):
            kept.append(pair)
        elif pair.weight.format.scales == "calibrated":
            continue  # no second rounding gives the same bytes without the text
        elif _is_laid_out_alike(pair.weight, pair.job):
            packed.append(pair)
    formats = {pair.weight.format for pair in packed}
    if len(formats) == 1:
        [format] = formats
    else:
        format = _ANY_FORMAT
        packed = []
    weights = {pair.weight.values.name: pair.weight for pair in packed}
    copies = {pair.tensor.name: pair.tensor for pair in pairs.copies}
    jobs: list[Job] = [pair.job for pair in packed]
    jobs += [CopyJob(pair.original, pair.tensor.dtype, "") for pair in pairs.copies]
    shards = []
    for shard in arrange([[job] for job in jobs], format, max_shard_size=2**62).shards:
        stored: dict[int, TensorInfo] = {}
        for placed in shard.jobs:
            if isinstance(placed, CopyJob):
                stored[placed.offset] = copies[placed.name]
            else:
                parts = _parts(weights[placed.name], placed)
                stored.update(zip(placed.offsets, parts, strict=True))
        with_bytes = {offset: part for offset, part in stored.items() if part.nbytes}
        shards.append(ProofShard(shard.jobs, with_bytes))
    return ProofPlan(format, tuple(shards), weights, kept)


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


class CheckpointProof:
    """The proof of a whole checkpoint.

    Args:
        plan: what can be proved.
        reader: reads what is stored.
        advance: told how many stored bytes have been read.
    """

    def __init__(self, plan: ProofPlan, reader: Reader, advance: Callable[[int], None]) -> None:
        self._plan = plan
        self._kept = {pair.weight.values.name: WeightResult(pair.weight) for pair in plan.kept}
        self._proofs = []
        for shard in plan.shards:
            weights = {}
            for job in shard.jobs:
                if isinstance(job, PackJob):
                    weights[job.name] = plan.weights[job.name]
            stored = StoredBytes(reader, shard.stored, advance)
            self._proofs.append(Proof(plan.format, stored, weights))

    def tasks(self, devices: Devices, piece: int) -> Iterator[Task]:
        """Yields what compares everything, in pieces of so many bytes."""
        for shard, proof in zip(self._plan.shards, self._proofs, strict=True):
            yield from proof.tasks(shard.jobs, devices, piece)
        for pair in self._plan.kept:
            yield partial(prove_kept_weight, self._kept[pair.weight.values.name], pair.job, piece)

    def proved(self) -> dict[str, WeightResult]:
        """Returns the weights that are right, by name."""
        found = {}
        for proof in self._proofs:
            found.update(proof.proved())
        kept = {name: result for name, result in self._kept.items() if result.scales is not None}
        return found | kept

    def same_copies(self) -> set[str]:
        """Returns the names of kept tensors that came out as they are stored."""
        names = set()
        for shard, proof in zip(self._plan.shards, self._proofs, strict=True):
            for job in shard.jobs:
                if isinstance(job, CopyJob) and job.name not in proof.unlike:
                    names.add(job.name)
        return names


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


def prove_written(
    worker: Worker,
    devices: Devices,
    format: Format,
    stored: Mapping[str, Bitsandbytes4bit],
    jobs: Sequence[PackJob],
    place: tuple[Path, int],
) -> dict[str, WeightResult]:
    """Proves weights that have just been written, but for their quant states.

    Args:
        worker: the worker that has written them.
        devices: of the run.
        format: how they are packed.
        stored: the weights by name, as they lie in the unfinished file.
        jobs: the neighbours that were written by one task.
        place: the file, and where the data begins in it.

    Returns:
        The weights that are right, by name; either all of them or none.
    """
    found = {}
    to_pack = []
    for job in jobs:
        if job.stored is None:
            to_pack.append(job)
        else:
            result = WeightResult(stored[job.name])
            prove_kept_weight(result, job, worker.piece, worker)
            if result.scales is not None:
                found[job.name] = result
    if to_pack:
        proof = Proof(format, stored_from(worker, *place), stored)
        for task in proof.tasks(to_pack, devices, worker.piece):
            task(worker)
        if not proof.unlike:
            found.update(proof.proved())
    return found


def prove_copy(
    worker: Worker, devices: Devices, job: CopyJob, piece: Piece, place: tuple[Path, int]
) -> bool:
    """Proves a kept tensor, or a piece of it, that has just been written.

    Args:
        worker: the worker that has written it.
        devices: of the run.
        job: the tensor.
        piece: what was written of it.
        place: the file, and where the data begins in it.

    Returns:
        True if it comes out the same.
    """
    file, start = place
    if not job.is_changed:
        offset = job.offset + piece.tensor.start - job.source.start
        return is_same(worker, piece.tensor.file_range, file, start + offset)
    stored = stored_from(worker, file, start)
    write_converted(stored, devices.backend_for(job), [CopyPart(job, piece)], worker)
    return not stored.unlike
