"""Rerunning a job that is finished: its output says so, and nothing is computed again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nf4conv.commands.output import WritingPlan
from nf4conv.errors import Nf4convError, OutputError, VerificationError
from nf4conv.options import RunOptions
from nf4conv.output.workspace import CHECKSUMS, tidy
from nf4conv.report.rows import VerificationSummary
from nf4conv.sources.record import MAKING, read_record
from nf4conv.sources.unfinished import is_unfinished

_ZEROS = (
    *("seconds", "pipeline_seconds", "host_baseline_bytes", "host_peak_bytes", "device_peak_bytes"),
    "shards_resumed",
)


def written(
    plan: WritingPlan,
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    write: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """The figures of an earlier run that has made the plan's result, or of `write`, as
    `write_checkpoint` gives them.

    Errors are those of `write`, and as `finished_earlier`.
    """
    figures = finished_earlier(plan, out, run, progress)
    if figures is None:
        try:
            return write()
        except (
            Nf4convError
        ):  # other processes may have made the same part, and finished the whole meanwhile
            figures = None if plan.part is None else finished_earlier(plan, out, run, progress)
            if figures is None:
                raise
    return figures


def finished_earlier(
    plan: WritingPlan, out: Path, run: RunOptions, progress: Callable[[int], None]
) -> dict[str, Any] | None:
    """The fields of a RunReport, as `write_checkpoint` gives them, if the folder holds the plan's
    result already.

    Raises:
        OutputError: it holds the result of another job, or lacks what this run asks for beside the
            weights.
        VerificationError: it was verified, and is farther off than this run allows.
    """
    record = None if run.overwrite or is_unfinished(out) else read_record(out)
    if record is None:
        return None
    verified = VerificationSummary.from_measured(record.pop("verified", None))
    _compare(record, plan.record, out)
    if not _is_whole(plan, out):
        return None
    _require(run, verified, out)
    tidy(out)
    progress(sum(job.source_bytes for job in plan.output.jobs))
    size = sum((out / shard.name).stat().st_size for shard in plan.output.shards)
    figures: dict[str, Any] = {
        "out": str(out),
        "already_complete": True,
        "part": None,
        "device": "none",
        "bytes_after": size,
    }
    figures |= {**dict.fromkeys(_ZEROS, 0), "seconds_by_activity": {}, "notes": plan.notes}
    return figures | ({"verification": verified} if run.verify else {})


def _compare(before: dict[str, Any], now: dict[str, Any], out: Path) -> None:
    old, new = ({**record, **record["options"], **record["source"]} for record in (before, now))
    for key in {**old, **new}:
        if key not in ("options", "source") and old.get(key) != new.get(key):
            what = f"{key.replace('_', '-')} was {json.dumps(old.get(key))} and is {json.dumps(new.get(key))} now"
            what = "the source has changed since" if key.endswith("sha256") else what
            advice = "choose another folder, or --overwrite"
            raise OutputError(
                f"{out}: holds the result of another job ({MAKING}: {what}); {advice}"
            )


def _is_whole(plan: WritingPlan, out: Path) -> bool:
    beside = [(out / name, plan.source.folder / name) for name in plan.auxiliary]
    config = out / "config.json"
    return (
        all((out / shard.name).is_file() for shard in plan.output.shards)
        and all(
            copy.is_file() and copy.stat().st_size == original.stat().st_size
            for copy, original in beside
        )
        and (
            plan.config_bytes is None
            or (config.is_file() and config.read_bytes() == plan.config_bytes)
        )
    )


def _require(run: RunOptions, verified: VerificationSummary | None, out: Path) -> None:
    """Refuse what a run asks for beside the weights, and an earlier one has not done."""
    anew = "--overwrite makes it anew"
    if run.checksum and not (out / CHECKSUMS).is_file():
        raise OutputError(f"{out}: is complete, but has no {CHECKSUMS}; {anew}, with one")
    if run.verify and verified is None:
        how = f"`nf4conv verify {out} --source SRC` does that, and {anew}"
        raise OutputError(f"{out}: is complete, but was not verified when it was made: {how}")
    if (
        run.tolerance is not None
        and verified is not None
        and not verified.largest_relative_error <= run.tolerance
    ):
        error = f"largest relative error {verified.largest_relative_error:.4f}, more than {run.tolerance:g}"
        raise VerificationError(f"{out}: {error}")
