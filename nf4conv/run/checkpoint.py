"""Carries out the plan of one checkpoint: opens devices and the folder, has it filled, reports."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from nf4conv.errors import OutputError
from nf4conv.options import RunOptions
from nf4conv.output.digest import prepare_digests
from nf4conv.output.shared_folder import SharedFolder
from nf4conv.output.workspace import Workspace
from nf4conv.plan.fingerprint import fingerprint, require_unchanged, shared_fingerprint
from nf4conv.plan.writing import WritingPlan
from nf4conv.report.results import RunReport, VerificationSummary
from nf4conv.run.device.choice import open_device
from nf4conv.run.filling import Card, Filling
from nf4conv.run.loop import Pipeline, make_pipeline
from nf4conv.run.parts import finish_if_whole, verification_of
from nf4conv.system.folders import is_link
from nf4conv.system.machine import peak_resident

_log: Final = logging.getLogger(__name__)


def write_checkpoint(
    plan: WritingPlan,
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    card: Card,
    announce: Callable[[str, Path], None],
) -> RunReport:
    """Carries out the plan of one checkpoint, or of a part of it.

    With `run.verify` everything that is written is read back and compared; no shard of an earlier
    run then counts as finished. From any thread, `progress` is told how many more source bytes have
    been read, and `announce` name and path of every shard once it is complete.

    Raises a SourceError if the source cannot be read or has changed, an OutputError if the folder
    cannot be written, and a VerificationError if what has been written is not what was to be; the
    folder then does not look finished.
    """
    started = time.perf_counter()
    require_apart(plan.source.folder, out)
    output = plan.output
    prepare_digests()  # while a GPU gets ready
    backend = open_device(lambda: output.jobs, output.format, run, is_measured=run.verify)
    device = backend.name
    pipeline = make_pipeline(backend, run, progress)
    host_baseline = peak_resident()
    with _open_folder(plan, out, run, device) as folder:
        _prepare_folder(plan, folder, run, device, card)
        resumed = len(folder.finished)
        if resumed:
            _log.info("%d of %d shards are kept from an earlier run", resumed, len(output.shards))
        filling = Filling(plan, folder, backend, pipeline, announce, run)
        filling.write_shards()
        verification = verification_of(folder) if run.verify else None
        _log_times(pipeline, verification)
        begun = time.perf_counter()
        missing = 0
        if isinstance(folder, Workspace):
            filling.write_last_files(card, verification)
        elif plan.part is not None:
            missing = finish_if_whole(folder, reread=not plan.part.is_watched)
        if not missing:
            _log.info("finalized %s in %.1f s", out, time.perf_counter() - begun)
        return RunReport(
            command=plan.options.command,
            out=str(out),
            totals=replace(plan.totals, bytes_after=folder.size),
            part=None if plan.part is None else plan.part.name,
            device=device,
            seconds=time.perf_counter() - started,
            pipeline_seconds=pipeline.elapsed,
            seconds_by_activity={what.value: spent for what, spent in pipeline.seconds.items()},
            host_baseline_bytes=host_baseline,
            host_peak_bytes=peak_resident(),
            device_peak_bytes=backend.device_memory(),
            shards_resumed=resumed,
            shards_missing=missing,
            notes=plan.notes,
            verification=verification,
        )


def _log_times(pipeline: Pipeline, verification: VerificationSummary | None) -> None:
    times = ", ".join(f"{what.value} {spent:.1f} s" for what, spent in pipeline.seconds.items())
    _log.info("all shards written after %.1f s (all threads: %s)", pipeline.elapsed, times)
    if verification is not None:
        largest = verification.largest_relative_error
        _log.info("verified as written: largest relative error %.4f", largest)


def ignore(*_: object) -> None:
    """Stands for progress that nobody watches, shards that nobody waits for, a card for nobody."""


def require_apart(source: Path, out: Path) -> None:
    """Refuses an output folder that is the source, lies in it, holds it, or is a dead link."""
    if is_link(out) and not out.exists():
        raise OutputError(f"{out}: is a link that leads nowhere; remove it", path=out)
    source, out = source.resolve(), out.resolve()
    if out == source:
        what = "is the source folder"
    elif source in out.parents:
        what = "is inside the source folder"
    elif out in source.parents:
        what = "holds the source folder"
    else:
        return
    raise OutputError(f"{out}: {what}; choose another output folder", path=out)


def _open_folder(
    plan: WritingPlan, out: Path, run: RunOptions, device: str
) -> Workspace | SharedFolder:
    if plan.part is not None:
        return SharedFolder(out)
    require_unchanged(plan.source, "since it was planned; run again")
    return Workspace(out, fingerprint(plan, device), overwrite=run.overwrite)


def _prepare_folder(
    plan: WritingPlan,
    folder: Workspace | SharedFolder,
    run: RunOptions,
    device: str,
    card: Card,
) -> None:
    if isinstance(folder, SharedFolder):
        described = shared_fingerprint(plan, run, device, card(0, None))
        with plan.source.whole_folder() as originals:
            folder.join(described, originals, plan.output)
    elif run.verify:
        folder.forget()  # shards of an earlier run, which nobody has looked at
