"""Which engine a run gets: the one without torch where it can do the work, because importing torch takes seconds.

For that reason each engine is imported only when it is chosen.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from nf4conv.checkpoint.plan import Plan
from nf4conv.options import RunOptions
from nf4conv.pipeline.loop import Engine
from nf4conv.pipeline.shards import Audit, ShardProgress, ShardTask

ShardTasks = Callable[[ShardProgress, int], Sequence[ShardTask[Any]]]
"""How an engine divides a shard into tasks, given how many bytes a worker reads at a time."""


def packing_engine(output: Plan, run: RunOptions) -> tuple[Engine[Any], ShardTasks]:
    """The engine that quantizes, and its tasks."""
    from nf4conv.pipeline.without_torch import pack

    return _with_torch(run) if run.verify else _engine(output, run, pack)  # bundles hold no kernels that compare


def unpacking_engine(output: Plan, run: RunOptions, *, is_cast: bool) -> tuple[Engine[Any], ShardTasks]:
    """The engine that dequantizes, and its tasks; `is_cast` says whether to another dtype than before."""
    from nf4conv.pipeline.without_torch import unpack

    return _with_torch(run) if is_cast else _engine(output, run, unpack)


def comparing_engine(run: RunOptions) -> Engine[Any]:
    """The engine that verifies and compares; its tasks are those of with_torch/check.py and difference.py."""
    from nf4conv.pipeline.with_torch.worker import TorchEngine

    return TorchEngine(run.device)


def make_audit(piece: int, tolerance: float | None) -> Audit:
    """What compares everything that `packing_engine` writes, in pieces of so many bytes."""
    from nf4conv.pipeline.with_torch.audit import TorchAudit

    return TorchAudit(piece, tolerance)


def _engine(output: Plan, run: RunOptions, way: ModuleType) -> tuple[Engine[Any], ShardTasks]:
    """The engine without torch and its tasks, if there are kernels and a GPU for it; or else that with torch."""
    from nf4conv.pipeline.without_torch.worker import bare_engine

    engine = bare_engine(run.device, partial(way.purposes_of, output), way.RETURNED)
    return (engine, way.shard_tasks) if engine is not None else _with_torch(run)


def _with_torch(run: RunOptions) -> tuple[Engine[Any], ShardTasks]:
    from nf4conv.pipeline.with_torch.pack import shard_tasks

    return comparing_engine(run), shard_tasks
