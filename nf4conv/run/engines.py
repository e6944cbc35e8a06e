"""Which engine a run gets: the one without torch where it can do the work, because importing torch
takes seconds.

For that reason each engine is imported only when it is chosen.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nf4conv.check.pairing import Pairs
from nf4conv.options import RunOptions
from nf4conv.plan.jobs import Plan
from nf4conv.report.measured import TensorDifference, WeightResult
from nf4conv.run.loop import Engine, Pipeline, make_pipeline
from nf4conv.run.same_bytes import HostEngine
from nf4conv.run.shards import ShardProgress, ShardTask
from nf4conv.sources.reader import Reader

ShardTasks = Callable[[ShardProgress, int], Sequence[ShardTask[Any]]]
"""How an engine divides a shard into tasks, given how many bytes a worker reads at a time."""


def writing_engine(output: Plan, run: RunOptions) -> tuple[Engine[Any], ShardTasks]:
    """The engine that quantizes, or dequantizes, and its tasks: that without torch, if there are
    kernels and a GPU.
    """
    from nf4conv.run.without_torch import pack
    from nf4conv.run.without_torch.worker import bare_engine

    returned = pack.returned_by(output)
    engine = bare_engine(
        run.device, partial(pack.purposes_of, output, is_compared=run.verify), returned
    )
    if engine is not None:
        return engine, partial(pack.shard_tasks, returned=returned)
    from nf4conv.run.with_torch.pack import shard_tasks

    return comparing_engine(run), shard_tasks


def host_engine(run: RunOptions) -> HostEngine:
    """The engine that compares bytes, which takes no device; a PlanError if there is no such device
    as is named.
    """
    from nf4conv.run.without_torch.worker import gpu_named

    if run.device not in ("auto", "cpu") and gpu_named(run.device) is None:
        comparing_engine(run)  # says why
    return HostEngine()


def comparing_engine(run: RunOptions) -> Engine[Any]:
    """The engine that verifies, and that compares any values; its tasks are those of with_torch/."""
    from nf4conv.run.with_torch.worker import TorchEngine

    return TorchEngine(run.device)


def compare_values(
    results: Sequence[TensorDifference], run: RunOptions, progress: Callable[[int], None]
) -> str:
    """Compare tensors value by value, with torch only those that take it; the device."""
    from nf4conv.run.without_torch import difference
    from nf4conv.run.without_torch.worker import bare_engine

    needed = [difference.purposes_of(result) for result in results]
    engine = bare_engine(
        run.device, lambda: frozenset[Any]().union(*filter(None, needed)) or None, returned=0
    )
    if engine is not None:
        pipeline: Pipeline[Any] = make_pipeline(engine, run, progress)
        able = [result for result, purposes in zip(results, needed, strict=True) if purposes]
        pipeline.run(difference.value_tasks(able, pipeline.piece))
        results = [result for result, purposes in zip(results, needed, strict=True) if not purposes]
    if results:
        from nf4conv.run.with_torch.difference import value_tasks

        pipeline = make_pipeline(comparing_engine(run), run, progress)
        pipeline.run(value_tasks(results, pipeline.piece))
    return pipeline.engine.device


def prove(
    pairs: Pairs, run: RunOptions, progress: Callable[[int], None]
) -> tuple[str, Mapping[str, WeightResult], frozenset[str]]:
    """What the engine without torch can say of the comparison of a checkpoint with its source.

    Returns:
        The device, empty where there is no such engine; of the weights that are right what was
        measured; the names of tensors that are right. Of all others nothing is known.
    """
    from nf4conv.run.without_torch import pack, proof
    from nf4conv.run.without_torch.worker import bare_engine

    plan = proof.plan_of_proof(pairs)
    if plan is None:
        return "", {}, frozenset()
    engine = bare_engine(
        run.device, partial(pack.purposes_of, plan, is_compared=True), pack.returned_by(plan)
    )
    if engine is None:
        return "", {}, frozenset()
    with Reader() as reader:
        return engine.device, *proof.prove(
            make_pipeline(engine, run, progress), plan, pairs, reader
        )
