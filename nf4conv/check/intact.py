"""Looks whether the files of a finished result still are what was written.

Headers and sizes are always looked at, and every byte where SHA256SUMS has its checksum.
"""

from collections.abc import Iterable
from pathlib import Path

from nf4conv.check.checksums import check_checksums
from nf4conv.errors import OutputError, SourceError
from nf4conv.plan.jobs import Shard
from nf4conv.sources.header import read_header
from nf4conv.sources.stored_weights import Structure
from nf4conv.system.cores import usable_cores

_HOW_TO_MEND = "--overwrite makes the result anew"


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


def require_checksums(out: Path, shards: Iterable[Shard]) -> None:
    """Checks every file that SHA256SUMS lists, if a result has one.

    Args:
        out: the folder of the result.
        shards: the files that a plan makes, which must be listed.

    Raises:
        OutputError: a file is not the one that was listed, or a shard is not listed; the error
            names it.
    """
    structure = Structure(out)
    weights = [out / shard.name for shard in shards]
    check_checksums(structure, len(usable_cores()), weights)
    _raise_first(out, structure)


def _raise_first(out: Path, structure: Structure) -> None:
    for finding in structure.findings:
        if finding.is_fault:
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
