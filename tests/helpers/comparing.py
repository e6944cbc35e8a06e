"""Compares all tensors of two checkpoints in any formats, value by value, whatever they say of
their making: by the engine of `verify`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nf4conv.check.pairing import pair_alike
from nf4conv.check.structure import Structure
from nf4conv.options import MachineOptions, SourceOptions
from nf4conv.plan.rows import Errors
from nf4conv.report.measured import TensorDifference
from nf4conv.run.comparing import compare
from nf4conv.sources.opening import open_source
from nf4conv.sources.reader import Reader


@dataclass
class Compared:
    """Tells how the tensors of two checkpoints compare.

    Attributes:
        device: that compared values.
        statuses: "identical" bytes, "equal in value" or "different", by name; "alone" for a tensor
            that cannot be compared.
        differences: between the values, by name, where values were compared.
    """

    device: str
    statuses: dict[str, str] = field(default_factory=dict)
    differences: dict[str, Errors] = field(default_factory=dict)

    @property
    def unlike(self) -> dict[str, str]:
        """The statuses of the tensors whose bytes are not identical."""
        return {name: status for name, status in self.statuses.items() if status != "identical"}

    def error(self, name: str) -> float:
        return self.differences[name].relative_error

    def within(self, tolerance: float) -> bool:
        if "alone" in self.statuses.values():
            return False
        return all(self.error(name) <= tolerance for name in self.differences)


def compared(
    a: str | Path, b: str | Path, where: SourceOptions | None = None, **run: Any
) -> Compared:
    """Compares b with a; `run` are fields of MachineOptions."""
    machine = MachineOptions(**{"device": "cpu", "workers": 2, **run})
    source, out = open_source(a, where), open_source(b, where)
    structure = Structure(out.folder)
    pairs = pair_alike(structure, out, source)
    with Reader(source.absent) as reader:
        device, results = compare(pairs.alike, machine, lambda _: None, reader)
    found = Compared(device)
    for name, result in results.items():
        found.statuses[name] = status_of(result)
        if not result.is_identical and result.errors.squared_weight:
            found.differences[name] = result.errors
    for finding in structure.findings:
        found.statuses[finding.tensor] = "alone"
    return found


def status_of(result: TensorDifference) -> str:
    if result.is_identical:
        return "identical"
    return "different" if result.errors.differing else "equal in value"
