"""What is stored proved right without torch: packed once more, it must come out the same, byte for
byte.

The tasks are those that pack (pack.py). In place of a shard's file they have what compares;
besides, they measure the errors of the weights. Nothing more is to be found out of what comes out
the same. What does not is left to with_torch/check.py, which says how it differs, and whether it is
wrong.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from nf4conv.check.pairing import Pairs
from nf4conv.choose.unchanged import stored_format
from nf4conv.format.layout import QUANT_STATE_PREFIX, Format
from nf4conv.plan.arrange import arrange
from nf4conv.plan.jobs import CopyJob, Job, PackJob, Plan, Shard
from nf4conv.report.measured import ScaleErrors, WeightResult
from nf4conv.run.loop import Pipeline, Task
from nf4conv.run.same_bytes import Comparer, compare_with, is_same
from nf4conv.run.shards import CastError, NonFiniteError, ShardProgress, ShardTask
from nf4conv.run.without_torch.convert import write_converted
from nf4conv.run.without_torch.pack import purposes_of_job, shard_tasks
from nf4conv.run.without_torch.worker import CudaWorker
from nf4conv.sources.encodings.pieces import Piece
from nf4conv.sources.reader import Reader
from nf4conv.sources.stored_weights import StoredWeight
from nf4conv.sources.tensors import TensorInfo


class Proof(ShardProgress):
    """In the place of a shard's progress: the errors of all weights are measured, and what comes
    out the same is known.

    Args:
        jobs: what is packed once more, or kept; placed as in what the comparer knows.
        format: how.
        comparer: in the place of the shard's file.
        weights: those that are stored, by name.

    Attributes:
        unlike: as of the comparer.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        format: Format,
        comparer: Comparer,
        weights: Mapping[str, StoredWeight],
    ) -> None:
        super().__init__(Shard("", tuple(jobs), 0, 0, 0), format, comparer, lambda _: None)
        self.results: dict[str, WeightResult] = {
            job.name: WeightResult(weights[job.name]) for job in jobs if isinstance(job, PackJob)
        }
        self.unlike = comparer.unlike
        self._comparer = comparer
        self._compared: set[str] = set()

    def tasks(self, piece: int) -> list[Task[CudaWorker]]:
        """What compares everything, in pieces of so many bytes."""
        return [partial(_attempt, task) for task in shard_tasks(self, piece)]

    def done(self, blobs: dict[str, bytes] | None = None) -> None:
        for name, blob in (blobs or {}).items():
            stored = self.results[name].weight
            part = stored.components.get(f"{QUANT_STATE_PREFIX}{stored.format.quant_type}")
            is_there = (
                part
                and part.nbytes == len(blob)
                and self._comparer.is_stored(part, memoryview(bytearray(blob)))
            )
            if stored.blob != blob and not is_there:
                self.unlike.add(name)
            self._compared.add(name)

    def proved(self) -> dict[str, WeightResult]:
        """The weights of which everything is the same; with values that the bound allows, there is
        no more to find.
        """
        found = {}
        for name in self._compared - self.unlike:
            errors = self.results[name].errors
            if errors is None or errors.outside == 0:
                self.results[name].scales = ScaleErrors()
                found[name] = self.results[name]
        return found


def _attempt(task: ShardTask[CudaWorker], worker: CudaWorker) -> None:
    """Run a task; weights that are not finite stay unproved."""
    with suppress(NonFiniteError, CastError):
        task(worker)


def plan_of_proof(pairs: Pairs) -> Plan | None:
    """What is to come out the same, without kept tensors that take more than there are kernels for.

    None if weights are in several formats, in 4 bits in the source too, or not stored as
    bitsandbytes would.
    """
    formats = {weight.format for weight, _ in pairs.weights}
    if len(formats) != 1 or any(stored_format(job.source) for _, job in pairs.weights):
        return None
    for weight, job in pairs.weights:
        sizes = [part.nbytes for part in _parts(weight, job)]
        if sizes != [component.nbytes for component in job.components[:-1]]:
            return None
    [format] = formats
    jobs: list[Job] = [job for _, job in pairs.weights]
    kept = (CopyJob(source, stored.dtype, "") for stored, source in pairs.copies)
    jobs += [job for job in kept if purposes_of_job(job, format) is not None]
    return arrange([[job] for job in jobs], format, max_shard_size=2**62)


def _parts(weight: StoredWeight, job: PackJob) -> list[TensorInfo]:
    """The tensors of a weight, but for its quant state, as far as it has them, in the order of a
    job's components.
    """
    parts = weight.parts()
    found = [parts.get(component.suffix or "values") for component in job.components[:-1]]
    return [part._replace(name=job.name) for part in found if part is not None]


def prove(
    pipeline: Pipeline[CudaWorker], plan: Plan, pairs: Pairs, reader: Reader
) -> tuple[dict[str, WeightResult], frozenset[str]]:
    """Carry out a plan from `plan_of_proof`: the weights that are proved, and the names of what is
    stored the same.
    """
    weights = {weight.name: weight for weight, _ in pairs.weights}
    kept = {stored.name: stored for stored, _ in pairs.copies}
    proofs: list[Proof] = []
    for shard in plan.shards:
        stored: dict[int, TensorInfo] = {}
        for job in shard.jobs:
            if isinstance(job, CopyJob):
                stored[job.offset] = kept[job.name]
            else:
                stored |= zip(job.offsets, _parts(weights[job.name], job), strict=True)
        comparer = Comparer(
            reader, {at: part for at, part in stored.items() if part.nbytes}, pipeline.advance
        )
        proofs.append(Proof(shard.jobs, plan.format, comparer, weights))
    pipeline.run((task for proof in proofs for task in proof.tasks(pipeline.piece)), reader)
    found = {name: result for proof in proofs for name, result in proof.proved().items()}
    pipeline.advance(
        sum(found[name].weight.nbytes - found[name].weight.values.nbytes for name in found)
    )
    return found, frozenset(job.name for job in plan.jobs).difference(
        *(proof.unlike for proof in proofs)
    )


def prove_written(
    worker: CudaWorker,
    progress: ShardProgress,
    stored: Mapping[str, StoredWeight],
    jobs: Sequence[PackJob],
    piece: int,
) -> Mapping[str, WeightResult]:
    """Prove weights that have just been written, all but their blobs: those that are proved."""
    proof = Proof(jobs, progress.format, compare_with(worker, *progress.writer.place(0)), stored)
    for task in proof.tasks(piece):
        task(worker)
    return {} if proof.unlike else proof.proved()


def prove_kept(worker: CudaWorker, progress: ShardProgress, job: CopyJob, piece: Piece) -> bool:
    """Whether a kept tensor, or a piece of it, that has just been written comes out the same."""
    if not job.is_changed:
        place = progress.writer.place(job.offset + piece.tensor.start - job.source.start)
        return is_same(worker, piece.tensor.file_range, *place)
    comparer = compare_with(worker, *progress.writer.place(0))
    write_converted(comparer, [(job, piece)], worker)
    return not comparer.unlike
