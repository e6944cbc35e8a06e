"""`nf4conv finish`: makes a checkpoint of the shards that parts have left in a folder.

The source is not needed.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nf4conv.check.intact import require_sound
from nf4conv.errors import Nf4convError, OutputError
from nf4conv.output.finishing import LastFiles, finish, index_of
from nf4conv.output.shared_folder import SharedFolder
from nf4conv.report.results.runs import FinishReport
from nf4conv.report.rows.weights import VerificationSummary
from nf4conv.run.filling import verification_of
from nf4conv.sources.header import read_header
from nf4conv.sources.record import MAKING, read_record
from nf4conv.sources.unfinished import is_unfinished


def finish_checkpoint(out: str | Path, *, reread: bool = True) -> FinishReport:
    """Makes a checkpoint of a folder that runs with `RunOptions.part` have filled.

    It may be called again. Every shard is read and compared with what its part noted when it wrote
    the shard.

    Args:
        out: the folder.
        reread: False skips that, for a caller who has just seen all parts succeed.

    Returns:
        Number and size of the weight files, and what the parts verified.

    Raises:
        OutputError: a shard is missing or damaged; the error names the parts to run again, or the
            file if all was finished before. Or the folder holds nothing to finish.

    Example:
        >>> nf4conv.finish_checkpoint("./shared/out")
    """
    started = time.perf_counter()
    out = Path(out)
    SharedFolder(out).check_links()
    if is_unfinished(out):
        try:
            return _finish(out, started, reread)
        except (Nf4convError, OSError):
            if is_unfinished(out):
                raise
            # another process has finished it meanwhile
    if read_record(out) is None:
        raise OutputError(f"{out}: holds nothing that was made in parts", path=out)
    require_sound(out)
    SharedFolder(out).remove_work_folder()
    sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
    return FinishReport(
        out=str(out),
        already_complete=True,
        shards=len(sizes),
        bytes_after=sum(sizes),
        verification=None,
        seconds=time.perf_counter() - started,
    )


def _finish(out: Path, started: float, reread: bool) -> FinishReport:
    """Finishes a folder that parts have filled, and reports it."""
    with SharedFolder(out) as folder:
        plan = folder.read_plan()
        folder.collect(plan, reread)
        size = sum(shard.size for shard in folder.finished.values())
        verification = verification_of(folder) if plan["--verify"] else None
        config = plan["config.json"]
        last = LastFiles(
            index=_index(folder, plan["stem"]),
            card=_card(plan, size, verification),
            record=plan[MAKING],
            config=None if config is None else config.encode(),
        )
        if verification is not None:
            last = replace(last, verified=verification.to_record())
        finish(folder, last)
    return FinishReport(
        out=str(out),
        already_complete=False,
        shards=len(folder.finished),
        bytes_after=size,
        verification=verification,
        seconds=time.perf_counter() - started,
    )


def _index(folder: SharedFolder, stem: str) -> dict[str, bytes]:
    """Returns the index of the shards by its name; nothing if there is only one shard."""
    total = 0
    files = {}
    for name in folder.finished:
        for tensor in read_header(folder.out / name):
            total += tensor.nbytes
            files[tensor.name] = name
    return index_of(stem, total, files)


def _card(plan: Mapping[str, Any], size: int, verified: VerificationSummary | None) -> str | None:
    """Puts the figures of all parts into the card that a part has prepared."""
    if plan["model card"] is None:
        return None
    from nf4conv.report.card import (
        Figures,  # importing YAML takes a moment
        measured_rows,  # importing YAML takes a moment
    )

    before = plan["bytes"]
    parameters = plan["parameters"]
    prepared = measured_rows(Figures(before, 0), parameters)
    measured = measured_rows(Figures(before, size, verified), parameters)
    return str(plan["model card"]).replace(prepared, measured, 1)
