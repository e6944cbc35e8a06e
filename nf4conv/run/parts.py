"""Makes a checkpoint of the shards that parts have made, from what the output folder holds.

Whoever finds all shards there does it: the part that made the last one, or the same command without
--part, which needs no source then.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from nf4conv.errors import Nf4convError, OutputError
from nf4conv.options import WritingOptions
from nf4conv.output.folder import OutputFolder, as_json
from nf4conv.output.shared_folder import SharedFolder
from nf4conv.output.workspace import tidy
from nf4conv.plan.fingerprint import named_options
from nf4conv.plan.rows import PlanTotals
from nf4conv.report.results import RunReport, VerificationSummary
from nf4conv.sources.record import MAKING
from nf4conv.sources.unfinished import LAST_FILES, RECORD, is_filled_in_parts


def finish_if_whole(folder: SharedFolder, *, reread: bool) -> int:
    """Writes the last files of a folder if all its shards are there; returns how many are missing.

    With `reread`, every shard that others made is read and compared with its checksum. Raises an
    OutputError if one is not what was written, or a file cannot be written.
    """
    try:
        plan = folder.read_run()
        if LAST_FILES not in plan:
            raise OutputError(f"{folder.out}: another run has begun here", path=folder.out)
        return _finish(folder, plan, reread=reread)
    except (Nf4convError, OSError):
        if is_filled_in_parts(folder.out) or not (folder.out / MAKING).is_file():
            raise
        # another process has finished it meanwhile, and could not remove the records that this one
        # was still making
        tidy(folder.out)
        return 0


def _finish(folder: SharedFolder, plan: Mapping[str, Any], *, reread: bool) -> int:
    last = plan[LAST_FILES]
    missing = folder.take_all(last["shards"], reread=reread)
    if missing:
        return missing
    verification = verification_of(folder) if plan["--verify"] else None
    config = last["config.json"]
    folder.finish(
        stem=last["stem"],
        card=_card(last, folder.size, verification),
        record=last[MAKING],
        config=None if config is None else config.encode(),
        verified=None if verification is None else asdict(verification),
    )
    return 0


def _card(last: Mapping[str, Any], size: int, verified: VerificationSummary | None) -> str | None:
    """Puts the figures of all parts into the card that the first part has prepared."""
    if last["model card"] is None:
        return None
    from nf4conv.report.card import measured_rows  # importing YAML takes a moment

    parameters = last["totals"]["parameters"]
    prepared = measured_rows(last["bytes"], 0, None, parameters)
    measured = measured_rows(last["bytes"], size, verified, parameters)
    return str(last["model card"]).replace(prepared, measured, 1)


def verification_of(folder: OutputFolder) -> VerificationSummary:
    """Sums up the audits of all finished shards."""
    parts = []
    for file in folder.finished.values():
        part = VerificationSummary.from_record(file.verified)
        if part is None:
            raise OutputError(
                f"{folder.out}: what verification noted of its files is damaged; run again with "
                f"--overwrite, or all parts again in another folder",
                path=folder.out,
            )
        parts.append(part)
    return VerificationSummary.sum_up(parts)


def finish_without_source(out: Path, options: WritingOptions) -> RunReport | None:
    """Writes the last files of a folder if parts have made all its shards, with these options.

    Returns None if something is missing, or if parts make something else. Raises an OutputError if
    a shard is not what was written.
    """
    if not is_filled_in_parts(out):
        return None
    with SharedFolder(out) as folder:
        folder.check_links()
        plan = folder.read_run()
        asked = {**as_json(named_options(options)), "command": options.command, "--lora": None}
        if any(plan.get(key) != value for key, value in asked.items()):
            return None
        try:
            last = plan[LAST_FILES]
            if finish_if_whole(folder, reread=True):
                return None
            names = [one.name for one in fields(PlanTotals) if one.init]
            totals = PlanTotals(**{name: last["totals"][name] for name in names})
            return RunReport(
                command=options.command,
                out=str(out),
                totals=replace(totals, bytes_after=folder.size),
                already_complete=True,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise OutputError(
                f"{out}: its {RECORD} is damaged; remove OUT and run the parts again", path=out
            ) from error
