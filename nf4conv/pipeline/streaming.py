"""Tasks in the order in which their source files come: each waits for its file, and the last one lets it go."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nf4conv.checkpoint.stream import ShardStream
from nf4conv.pipeline.loop import Task, Worker
from nf4conv.pipeline.shards import ShardTask


@dataclass(frozen=True)
class StreamedTask:
    """A task whose source file may have to be fetched first."""

    task: ShardTask[Any]
    stream: ShardStream

    def run(self, worker: Worker) -> None:
        self.stream.wait_for(self.task.file)
        try:
            self.task.run(worker)
        finally:
            self.stream.done(self.task.file)


def streamed(shards: Iterable[Sequence[ShardTask[Any]]], stream: ShardStream) -> Iterator[Task[Any]]:
    """The tasks of one shard after the other, those of each by source file; shards, too, come in the files' order."""
    for tasks in shards:
        for task in sorted(tasks, key=lambda task: stream.order[task.file]):
            stream.expect(task.file)
            yield StreamedTask(task, stream)
    stream.expect(None)
