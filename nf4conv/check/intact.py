"""Looks whether the weight files of a finished result still are what was planned, by headers, sizes
and small tensors.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

from nf4conv.check.structure import read_structure
from nf4conv.errors import OutputError
from nf4conv.plan.jobs import Shard

_Described: TypeAlias = tuple[str, tuple[int, ...]]  # dtype and shape

_HOW_TO_MEND: Final = "--overwrite makes the result anew"

_READ_ALWAYS: Final = ("index", "components", "quant state", "layout", "code maps")
"""Checks of small tensors and of the index, which take no time beside those of headers."""


def require_planned(out: Path, shards: Sequence[Shard]) -> None:
    """Checks the weight files of a finished result against its plan.

    `shards` may be those of a part.
    """
    for shard in shards:
        if not (out / shard.name).is_file():
            _refuse(out / shard.name, "is missing")
    structure = read_structure(out)
    found: defaultdict[str, dict[str, _Described]] = defaultdict(dict)
    for tensor in structure.tensors.values():
        found[tensor.file.name][tensor.name] = (tensor.dtype, tensor.shape)
    damaged = {one.file: one.text for one in structure.findings if one.check == "files"}
    for shard in shards:
        path = out / shard.name
        if shard.name in damaged:
            _refuse(path, f"is damaged: {damaged[shard.name]}")
        tensors = found[shard.name]
        if tensors.keys() != set(shard.tensor_names()):
            _refuse(path, "holds other tensors than were written")
        for entry in shard.entries():
            if tensors[entry.name] != (entry.dtype, tuple(entry.shape)):
                _refuse(path, f"{entry.name}: has another dtype or shape than was written")
    for finding in structure.findings:
        if finding.is_fault and finding.check in _READ_ALWAYS:
            _refuse(out, finding.line())


def _refuse(path: Path, fault: str) -> None:
    raise OutputError(f"{path}: {fault}; {_HOW_TO_MEND}", path=path)
