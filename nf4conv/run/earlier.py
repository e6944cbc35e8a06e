"""Recognises a folder that already holds a plan's result, so that nothing is computed again."""

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from nf4conv.check.structure import read_structure
from nf4conv.errors import Nf4convError, OutputError, VerificationError
from nf4conv.options import RunOptions
from nf4conv.output.folder import shortened
from nf4conv.output.workspace import tidy
from nf4conv.plan.jobs import Shard
from nf4conv.plan.writing import WritingPlan
from nf4conv.report.results import RunReport, VerificationSummary
from nf4conv.sources.record import MAKING, read_record
from nf4conv.sources.unfinished import is_unfinished

_log: Final = logging.getLogger(__name__)

_OF_WEIGHTS: Final = (
    "quant_type",
    "blocksize",
    "double_quant",
    "quant_storage",
    "scales",
    "dtype",
)
"""Options of `quantize` that each group of weights in nf4conv.json answers: if all groups are the
same, it makes no difference whether these were asked for or left open.
"""

_READ_ALWAYS: Final = ("index", "components", "quant state", "layout", "code maps")
"""Checks of small tensors and of the index, which take no time beside those of headers."""


def found_or_written(
    plan: WritingPlan,
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    write: Callable[[], RunReport],
) -> RunReport:
    """Returns what an earlier run has made of the plan, or else what `write` makes of it.

    Raises what `find_earlier` and `write` raise.
    """
    found = find_earlier(plan, out, run, progress)
    if found is not None:
        return found
    try:
        return write()
    except (Nf4convError, OSError):
        if plan.part is None:
            raise
        # other processes may have made the same part, finished the whole meanwhile, and removed
        # the folder in which this one was writing
        found = find_earlier(plan, out, run, progress)
        if found is None:
            raise
        return found


def find_earlier(
    plan: WritingPlan, out: Path, run: RunOptions, progress: Callable[[int], None]
) -> RunReport | None:
    """Returns what an earlier run has made, if the folder holds the plan's result already.

    Raises an OutputError if it holds the result of another job, lacks what this run asks for, or is
    damaged, and a VerificationError if it is farther off than this run allows.
    """
    if run.overwrite or is_unfinished(out):
        return None
    record = read_record(out)
    if record is None:
        return None
    verification = VerificationSummary.from_record(record.pop("verified", None))
    record.pop("calibrated", None)  # what came of it was not known before
    _require_same(record, plan.record, out)
    if not _is_whole(plan, out):
        return None
    _require_undamaged(out, plan.output.shards)
    _require_enough(run, verification, out)
    tidy(out)
    progress(plan.output.bytes_to_read)
    _log.info("%s is complete already: nothing to compute", out)
    size = sum((out / shard.name).stat().st_size for shard in plan.output.shards)
    return RunReport(
        command=plan.options.command,
        out=str(out),
        totals=replace(plan.totals, bytes_after=size),
        already_complete=True,
        notes=plan.notes,
        verification=verification if run.verify else None,
    )


def _require_same(before: Mapping[str, Any], now: Mapping[str, Any], out: Path) -> None:
    """Checks that two contents of nf4conv.json describe one job."""
    old, new = _flat(before), _flat(now)
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if now.get("command") == "quantize" and "weights" not in differing:
        differing = [key for key in differing if key not in _OF_WEIGHTS]
    if not differing:
        return
    key = differing[0]
    was, now_is = shortened(old.get(key)), shortened(new.get(key))
    what = f"{key.replace('_', '-')} was {was} and is {now_is} now"
    if key.endswith("sha256"):
        what = "the source has changed since"
    elif key == "schema_version":
        what = "another release of nf4conv wrote it"
    elif key in ("weights", "not_packed"):
        what = "tensors of it were made otherwise"
    raise OutputError(
        f"{out}: holds the result of another job ({MAKING}: {what}); "
        f"choose another folder, or --overwrite",
        path=out,
    )


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of nf4conv.json with those of its options and its source among them."""
    first = {"schema_version": record.get("schema_version")}
    flat = {**first, **record["options"], **record["source"], **record}
    del flat["options"], flat["source"]
    return flat


def _is_whole(plan: WritingPlan, out: Path) -> bool:
    """Returns True if all files beside the weights are there, by their names and sizes."""
    with plan.source.whole_folder() as originals:
        for name in plan.source.auxiliary:
            copy, original = out / name, originals / name
            if not copy.is_file() or copy.stat().st_size != original.stat().st_size:
                return False
    if plan.config_bytes is None:
        return True
    config = out / "config.json"
    if not config.is_file() or config.stat().st_size != len(plan.config_bytes):
        return False
    return config.read_bytes() == plan.config_bytes


def _require_undamaged(out: Path, shards: Sequence[Shard]) -> None:
    """Checks the weight files of a finished result against its plan: headers and small tensors.

    `shards` may be those of a part.
    """
    names = {shard.name for shard in shards}
    structure = read_structure(out)
    for finding in structure.findings:
        is_read = finding.is_fault and finding.check in _READ_ALWAYS
        if is_read or (finding.check == "files" and finding.file in names):
            _refuse_damaged(out, finding.line())
    for shard in shards:
        for entry in shard.entries():
            found = structure.tensors.get(entry.name)
            wanted = (shard.name, entry.dtype, tuple(entry.shape))
            if found is None or (found.file.name, found.dtype, found.shape) != wanted:
                _refuse_damaged(out, f"{shard.name}: {entry.name} is not there as it was written")


def _refuse_damaged(path: Path, fault: str) -> None:
    raise OutputError(f"{path}: is damaged: {fault}; --overwrite makes the result anew", path=path)


def _require_enough(run: RunOptions, verified: VerificationSummary | None, out: Path) -> None:
    """Refuses a run that asks for what the earlier one has not done beside the weights."""
    if run.verify and verified is None:
        raise OutputError(
            f"{out}: is complete, but was not verified when it was made: "
            f"`nf4conv verify {shlex.quote(str(out))} --source SRC` does that, and --overwrite "
            f"makes it anew",
            path=out,
        )
    if run.tolerance is None or verified is None:
        return
    error = verified.largest_relative_error
    if not error <= run.tolerance:
        raise VerificationError(
            f"{out}: largest relative error {error:.4f}, more than {run.tolerance:g}", path=out
        )
