"""Calibrates a checkpoint block by block, and hands the result to the run that writes it.

    embed all windows ▸ for each block: fill it, round its weights stage by stage, run it once more

Finished blocks stand in the output's work folder. They are not computed again: a run that resumes
fills them with their weights in 4 bits, and runs them. So it ends in the same bytes. The run that
writes them copies their components, as it does with those of a source in 4 bits.
"""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

from nf4conv.calibrate.block import calibrate_block, restore_block
from nf4conv.calibrate.gradients import find_output_moments, output_moments
from nf4conv.calibrate.hidden import HiddenStates
from nf4conv.calibrate.kept import KeptFiles
from nf4conv.calibrate.model.flow import Call
from nf4conv.calibrate.moments import BlockAtWork
from nf4conv.calibrate.session import PreparedCalibration, Session
from nf4conv.choose.decisions import PackedMatrix
from nf4conv.errors import Nf4convError
from nf4conv.format.dtypes import TAGS
from nf4conv.format.layout import parts_of
from nf4conv.options import RunOptions
from nf4conv.output.workspace import Workspace
from nf4conv.plan.fingerprint import fingerprint, require_unchanged
from nf4conv.plan.jobs import Job, PackJob
from nf4conv.plan.writing import WritingPlan
from nf4conv.run.device.on_torch.buffers import SharedTensors, TorchBuffers
from nf4conv.run.device.on_torch.device import find_device
from nf4conv.run.worker import Worker
from nf4conv.sources.foreign.bitsandbytes import as_written_anew, read_weight
from nf4conv.sources.header import read_header
from nf4conv.sources.reader import Reader, read_bytes
from nf4conv.sources.tensors import TensorInfo
from nf4conv.sources.unfinished import CALIBRATED, WORK_FOLDER
from nf4conv.version import __version__

_BUFFER: Final = 2**25  # bytes of host memory to read into


def calibrate(
    plan: WritingPlan, out: Path, run: RunOptions, progress: Callable[[int], None]
) -> WritingPlan:
    """Calibrates what a plan says, or goes on with it, and returns the plan that writes it.

    `progress` is called with the source bytes that have been worked through since the last call.
    """
    device = find_device(run.device)
    require_unchanged(plan.source, "since it was planned; run again")
    assert isinstance(plan.calibration, PreparedCalibration)
    made_by = _made_by(device, plan.calibration.transformers)
    asked = fingerprint(plan, str(device))
    kept = KeptFiles(out / WORK_FOLDER / CALIBRATED, made_by)
    with (
        Reader() as reader,
        Workspace(out, asked, overwrite=run.overwrite) as folder,
        _computing(device),
        torch.no_grad(),
    ):
        worker = Worker(reader, _BUFFER, lambda _: None)  # progress is told by blocks
        buffers = TorchBuffers(device, SharedTensors(), None, worker)
        session = Session(plan, device, buffers, kept, progress)
        folder.check_space(plan.space_needed(folder.finished))
        finished = _calibrate_all(session)
        headers = [read_header(session.kept.file(_name(number))) for number in finished]
        components = {tensor.name: tensor for header in headers for tensor in header}
    blocks = [finished[number] for number in sorted(finished)]
    calibrated = {"made_by": made_by, "blocks": blocks}
    return replace(with_calibrated_weights(plan, components), calibrated=calibrated)


def _calibrate_all(session: Session) -> dict[int, Any]:
    """Calibrates the blocks that are not finished, and returns what nf4conv.json says of all, by
    number.
    """
    calibration = session.calibration
    finished = {}
    left = []
    for number in calibration.targets:
        kept = session.kept.read(_name(number))
        if kept is None:
            left.append(number)
        else:
            finished[number] = kept[1]
    if left:
        if calibration.outputs is not None:
            find_output_moments(session, left)
        hidden, calls = session.embed(session.memory)
        # blocks behind the last of them need not be run
        for number in range(max(left) + 1):
            made = _work_on(session, number, hidden, calls)
            if made is not None:
                finished[number] = made
        hidden.remove()
    session.tell(calibration.bytes_to_read - session.told)  # what had been done before counts
    return finished


def _work_on(
    session: Session, number: int, hidden: HiddenStates, calls: Sequence[Sequence[Call]]
) -> dict[str, Any] | None:
    """Fills a block, calibrates it unless that has been done or cannot be, and runs it.

    Returns what came of calibrating it now.
    """
    calibration = session.calibration
    made = None
    with session.filled(number) as contents:
        block = BlockAtWork(
            module=session.blocks[number],
            contents=contents,
            targets=calibration.targets.get(number, ()),
            calls=calls[number],
            hidden=hidden,
            calibrating=session.calibrating_batches,
            format=session.plan.output.format,
        )
        kept = session.kept.read(_name(number)) if block.targets else None
        if kept is not None:
            restore_block(block, kept[0])
        elif block.targets:
            tensors, made = calibrate_block(block, output_moments(session, number))
            session.kept.write(_name(number), tensors, made)
        block.run()
    return made


def _name(number: int) -> str:
    """Returns the name that a finished block is kept under."""
    return f"block-{number:05d}"


def with_calibrated_weights(plan: WritingPlan, components: Mapping[str, TensorInfo]) -> WritingPlan:
    """Returns a plan whose calibrated weights are copied from finished blocks.

    `components` says where the components of all these weights are, by their names.
    """

    def finished_job(job: Job) -> Job:
        if not isinstance(job, PackJob) or job.original is None:
            return job
        values = components[job.name]
        weight, _ = read_weight(values, parts_of(job.name, components), read_bytes, "calibrated")
        assert weight is not None
        tag = TAGS[weight.format.dtype]
        source = values._replace(dtype=tag, shape=job.matrix.shape, encoding=weight)
        matrix = PackedMatrix(job.name, job.matrix.shape)
        return replace(job, source=source, matrix=matrix, stored=as_written_anew(weight))

    return replace(plan, output=plan.output.with_jobs(finished_job))


def _made_by(device: torch.device, transformers: str) -> dict[str, str]:
    """Returns what decides the bytes beside the plan: device and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    made_by = {
        "device": f"{device.type} ({name})",
        "nf4conv": __version__,
        "torch": version("torch"),
        "transformers": transformers,
    }
    if device.type == "cuda":
        made_by["triton"] = version("triton")
    return made_by


@contextmanager
def _computing(device: torch.device) -> Iterator[None]:
    """Computes products in float32's precision, without TF32; lack of memory becomes one line."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise Nf4convError(
            f"{device}: out of memory while calibrating; finished blocks are kept, and the same "
            f"command goes on with them when more is free. Fewer --calibration-tokens take less, "
            f"and so does another --device; both start anew, with --overwrite"
        ) from error
    finally:
        torch.set_float32_matmul_precision(before)
