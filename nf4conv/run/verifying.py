"""Verifies the values of a checkpoint: proves what is right, and diagnoses the rest."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final

from nf4conv.check.pairing import Comparison
from nf4conv.options import MachineOptions
from nf4conv.plan.jobs import PackJob
from nf4conv.report.measured import Measured, TensorDifference, WeightResult
from nf4conv.run.comparing import compare
from nf4conv.run.device.choice import open_device, open_torch, require_device
from nf4conv.run.loop import make_pipeline
from nf4conv.run.tasks.prove import Proof, checkpoint_proof, is_kept, prove_kept_weight
from nf4conv.run.tasks.scan import count_improper_scales, count_not_finite
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.reader import Reader

_log: Final = logging.getLogger(__name__)


def verify_values(
    pairs: Comparison, run: MachineOptions, progress: Callable[[int], None]
) -> Measured:
    """Looks at the values of a checkpoint: of its packed weights, and as the pairs say.

    What comes out the same when it is made once more is right. Of all other tensors torch says how
    they differ. `progress` is told how many more bytes have been read, from any thread.
    """
    if pairs.alone:
        device, not_finite = count_not_finite(pairs.alone, run, progress)
        return Measured(device, {}, {}, not_finite)
    with Reader(pairs.source.absent if pairs.source else None) as reader:
        if pairs.alike:
            device, copies = compare(pairs.alike, run, progress, reader)
            return Measured(device, {}, copies)
        return _prove(pairs, run, progress, reader)


def _prove(
    pairs: Comparison, run: MachineOptions, progress: Callable[[int], None], reader: Reader
) -> Measured:
    """Makes once more what the pairs say, and diagnoses what does not come out the same. Of weights
    without a source, only scales are looked at.
    """
    results = {name: WeightResult(one) for name, one in pairs.structure.weights.items()}
    copies = {tensor.name: TensorDifference(original, tensor) for original, tensor in pairs.copies}
    unlike = dict(copies)
    device = "cpu"
    if pairs.weights or pairs.copies:
        device, proof = _made_anew(results, pairs, run, progress, reader)
        unlike = {name: copy for name, copy in copies.items() if name in proof.unlike}
    else:
        require_device(run)
    unproved = {name: result for name, result in results.items() if result.scales is None}
    started = time.perf_counter()
    pipeline = make_pipeline(None, run, progress)
    scale_tasks = [
        partial(count_improper_scales, result, pipeline.piece) for result in unproved.values()
    ]
    pipeline.run(scale_tasks, reader)
    compared = [pair for pair in pairs.weights if pair[1].name in unproved]
    if compared or unlike:
        device = _diagnose(unproved, compared, unlike, run, progress, reader)
    seconds = time.perf_counter() - started
    _log.info("looked at the values of %d tensors in %.1f s", len(unproved) + len(unlike), seconds)
    return Measured(device, results, copies)


def _made_anew(
    results: dict[str, WeightResult],
    pairs: Comparison,
    run: MachineOptions,
    progress: Callable[[int], None],
    reader: Reader,
) -> tuple[str, Proof]:
    """Makes weights and other tensors once more; puts those that are right among the results.

    Returns the device that did it, and the proof.
    """
    started = time.perf_counter()
    proof = checkpoint_proof(pairs, reader, progress)
    kept = [(results[job.name], job) for weight, job in pairs.weights if is_kept(weight, job)]
    backend = open_device(lambda: proof.jobs, proof.format, run, is_measured=True)
    pipeline = make_pipeline(backend, run, progress)
    piece = pipeline.piece
    of_kept = [partial(prove_kept_weight, result, job, piece) for result, job in kept]
    pipeline.run(chain(proof.tasks(backend, piece), of_kept), reader)
    results.update(proof.proved())
    proved = [result for result in results.values() if result.scales is not None]
    for result in proved:  # whose scales need not be looked at on their own
        progress(result.weight.nbytes - result.weight.values.nbytes)
    _log.info(
        "made anew in %.1f s: %d of %d weights, and %d of %d other tensors, are the same",
        time.perf_counter() - started,
        len(proved),
        len(results),
        sum(tensor.name not in proof.unlike for _, tensor in pairs.copies),
        len(pairs.copies),
    )
    return backend.name, proof


def _diagnose(
    results: Mapping[str, WeightResult],
    weights: Sequence[tuple[Bitsandbytes4bit, PackJob]],
    copies: Mapping[str, TensorDifference],
    run: MachineOptions,
    progress: Callable[[int], None],
    reader: Reader,
) -> str:
    """Finds out how weights and other tensors differ from what their sources give.

    Returns the device that did it.
    """
    from nf4conv.run.tasks import diagnose  # importing torch takes seconds

    torch = open_torch(run)
    pipeline = make_pipeline(torch, run, progress)
    piece = pipeline.piece
    tasks = []
    for _, job in weights:
        tasks.append(diagnose.weight_tasks(results[job.name], job, piece))
    tasks += [diagnose.copy_tasks(copy, piece) for copy in copies.values()]
    pipeline.run(chain.from_iterable(tasks), reader)
    return torch.name
