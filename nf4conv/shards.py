"""What the tasks that fill one output shard share: its file, the JSON blobs so far, and how many tasks are left."""

import threading
from collections.abc import Callable, Sequence

from nf4conv.checkpoint.plan import Format, PackJob, Shard, component_name
from nf4conv.checkpoint.writer import ShardWriter
from nf4conv.codec.layout import quant_state_json
from nf4conv.errors import SourceError


class NonFiniteError(SourceError):
    """A weight that was to be packed holds NaN or infinity."""

    def __init__(self, job: PackJob) -> None:
        super().__init__(f"{job.source.file}: {job.source.name}: holds NaN or infinity")
        self.job = job


class ShardProgress:
    """A shard being written: its file, the JSON blobs gathered so far, and how many of its tasks are left.

    Args:
        shard: its plan.
        format: how weights are packed.
        writer: its file.
        finished: called with the size of the file once it is complete.
    """

    def __init__(self, shard: Shard, format: Format, writer: ShardWriter, finished: Callable[[int], None]) -> None:
        self.shard = shard
        self.format = format
        self.writer = writer
        self._finished = finished
        self._blobs: dict[str, bytes] = {}
        self._left = 0
        self._lock = threading.Lock()

    def expect(self, tasks: int) -> None:
        """Set how many tasks fill this shard."""
        self._left = tasks

    def done(self, blobs: dict[str, bytes] | None = None) -> None:
        """Count a task as done; the last one completes the file."""
        with self._lock:
            self._blobs |= blobs or {}
            self._left -= 1
            complete = self._left == 0
        if complete:
            self._finish()

    def _finish(self) -> None:
        entries = list(self.shard.entries())
        tail = bytearray()
        for job in self.shard.jobs:
            if isinstance(job, PackJob):
                blob = self._blobs[job.name]
                start = self.shard.fixed_size + len(tail)
                entries.append((component_name(job, job.components[-1]), "U8", (len(blob),), start, start + len(blob)))
                tail += blob
        self._finished(self.writer.finish(entries, bytes(tail)))


def json_blobs(format: Format, jobs: Sequence[PackJob], offsets: Sequence[float | None]) -> dict[str, bytes]:
    """The JSON blobs of packed weights, by name; `offsets` are nested_offsets, None without double quantization."""
    return {
        job.name: quant_state_json(
            quant_type=format.quant_type,
            blocksize=format.blocksize,
            dtype=format.dtype,
            shape=job.matrix.shape,
            nested_offset=offset,
        )
        for job, offset in zip(jobs, offsets, strict=True)
    }
