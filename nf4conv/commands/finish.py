"""`nf4conv finish`: of the shards that parts have left in a folder a checkpoint; the source is not
needed.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nf4conv.commands.output import complete, index_of, verification_of
from nf4conv.errors import Nf4convError, OutputError
from nf4conv.output.shared_folder import SharedFolder
from nf4conv.report.results import FinishReport
from nf4conv.report.rows import VerificationSummary
from nf4conv.sources.header import read_header
from nf4conv.sources.record import MAKING, read_record
from nf4conv.sources.unfinished import is_unfinished


def finish_checkpoint(out: str | Path, *, reread: bool = True) -> FinishReport:
    """Make a checkpoint of a folder that runs with `RunOptions.part` have filled, and of which no
    shard is missing.

    It may be repeated. Every shard is read and held against what its part noted when it wrote it.

    Args:
        out: the folder.
        reread: whether to; whoever has just seen all parts succeed need not.

    Raises:
        OutputError: a shard is missing or damaged, and which parts are to be run again; or nothing
            is there to finish.
    """
    started, out = time.perf_counter(), Path(out)
    if is_unfinished(out):
        try:
            return _finish(out, started, reread)
        except Nf4convError:
            if is_unfinished(out):  # or else it has been finished by another process meanwhile
                raise
    if read_record(out) is None:
        raise OutputError(f"{out}: holds nothing that was made in parts")
    SharedFolder(out).remove_work_folder()
    sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
    return FinishReport(str(out), True, len(sizes), sum(sizes), None, time.perf_counter() - started)


def _finish(out: Path, started: float, reread: bool) -> FinishReport:
    with SharedFolder(out) as folder:
        plan = folder.read_plan()
        folder.collect(plan, reread)
        tensors = [tensor for name in folder.finished for tensor in read_header(out / name)]
        files = {tensor.name: tensor.file.name for tensor in tensors}
        index = index_of(plan["stem"], sum(tensor.nbytes for tensor in tensors), files)
        size = sum(shard.size for shard in folder.finished.values())
        verified = verification_of(folder) if plan["--verify"] else None
        config = None if plan["config.json"] is None else plan["config.json"].encode()
        complete(folder, index, _card(plan, size, verified), plan[MAKING], verified, config)
    return FinishReport(
        str(out), False, len(folder.finished), size, verified, time.perf_counter() - started
    )


def _card(plan: Mapping[str, Any], size: int, verified: VerificationSummary | None) -> str | None:
    """The card that a part has prepared, with the figures of all of them."""
    from nf4conv.report.card import (  # importing a reader of YAML takes a moment
        Figures,
        measured_rows,
    )

    before, count, card = plan["bytes"], plan["parameters"], plan["model card"]
    prepared, found = (
        measured_rows(figures, count)
        for figures in (Figures(before, 0), Figures(before, size, verified))
    )
    return None if card is None else str(card).replace(prepared, found, 1)
