"""Looks whether the weight files of a finished result still are what was planned, by headers, sizes
and small tensors.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from nf4conv.check.structure import read_structure
from nf4conv.errors import OutputError, SourceError
from nf4conv.plan.jobs import Shard
from nf4conv.sources.header import read_header

_HOW_TO_MEND: Final = "--overwrite makes the result anew"

_READ_ALWAYS: Final = ("index", "components", "quant state", "layout", "code maps")
"""Checks of small tensors and of the index, which take no time beside those of headers."""


def require_planned(out: Path, shards: Iterable[Shard]) -> None:
    """Checks the weight files of a finished result against its plan.

    Args:
        out: the folder of the result.
        shards: the files that a plan makes.

    Raises:
        OutputError: a file is missing or damaged, or holds other tensors; the error names it.
    """
    for shard in shards:
        fault = _fault_of(out / shard.name, shard)
        if fault is not None:
            file = out / shard.name
            raise OutputError(f"{file}: {fault}; {_HOW_TO_MEND}", path=file)
    for finding in read_structure(out).findings:
        if finding.is_fault and finding.check in _READ_ALWAYS:
            raise OutputError(f"{out}: {finding.line()}; {_HOW_TO_MEND}", path=out)


def _fault_of(path: Path, shard: Shard) -> str | None:
    """Returns what is wrong with a weight file; None if its header is the one that was planned."""
    if not path.is_file():
        return "is missing"
    try:
        found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in read_header(path)}
    except SourceError as error:
        return f"is damaged: {str(error).removeprefix(f'{path}: ')}"
    if found.keys() != set(shard.tensor_names()):
        return "holds other tensors than were written"
    for entry in shard.entries():
        if found[entry.name] != (entry.dtype, tuple(entry.shape)):
            return f"{entry.name}: has another dtype or shape than was written"
    return None
