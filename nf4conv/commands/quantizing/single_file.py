"""Writes one file by way of a folder beside it, for --single-file."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nf4conv.commands.quantizing.writing import report_of, verify_again, write_one
from nf4conv.errors import OutputError, PlanError
from nf4conv.options import PushOptions, RunOptions
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.report.loading import push_command
from nf4conv.report.results.runs import QuantizeReport
from nf4conv.run.earlier import find_earlier_file
from nf4conv.sources.unfinished import is_unfinished
from nf4conv.system.removal import remove


def write_one_file(
    plan: QuantizationPlan,
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    push: PushOptions | None,
) -> QuantizeReport:
    """Carries out a plan by way of a folder beside the file.

    An interrupted run leaves the folder to be resumed.
    """
    if run.checksum or (push is not None and push.push_to_hub is not None):
        raise PlanError("--single-file: --push-to-hub and --checksum are for folders")
    if out.suffix != ".safetensors":
        raise PlanError(f"{out}: --single-file writes one file, such as OUT.safetensors", path=out)
    folder = out.with_name(f"{out.name}.unfinished")
    if out.exists() and not run.overwrite:
        found = find_earlier_file(plan, out, run)
        if found is None:
            raise OutputError(f"{out}: exists; choose another file, or --overwrite", path=out)
        if run.verify:
            verify_again(plan, out, run, progress)
        else:
            progress(plan.bytes_to_read)
        if folder.is_dir() and not is_unfinished(folder):
            remove(folder.parent, folder.name)  # left by a run that ended at its last step
        return report_of(plan, found)
    report = write_one(plan, folder, run, progress)
    (folder / plan.output.shards[0].name).replace(out)
    remove(folder.parent, folder.name)
    return replace(report, out=str(out), push=push_command(out))
