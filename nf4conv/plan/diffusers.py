"""Plans a diffusers pipeline: one plan for each submodel."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain
from typing import Any

from nf4conv.options import QuantizeOptions
from nf4conv.plan.jobs import Job
from nf4conv.plan.rows import PlanTotals, TensorRow, add_totals
from nf4conv.plan.writing import WritingPlan
from nf4conv.sources.diffusers import DiffusersFolder
from nf4conv.sources.original_card import OriginalCard
from nf4conv.sources.reader import read_json


@dataclass(frozen=True)
class DiffusersPlan:
    """Plans what becomes of a diffusers pipeline.

    Attributes:
        source: the pipeline that is read.
        submodels: the plan of each submodel, by its name.
        front: the front matter of the pipeline's model card.
        complaints: lines that the user should read, about what belongs to no submodel.
    """

    source: DiffusersFolder
    submodels: Mapping[str, WritingPlan]
    front: OriginalCard = field(default_factory=OriginalCard)
    complaints: tuple[str, ...] = ()

    @property
    def parts(self) -> list[WritingPlan]:
        """Returns the plans of all submodels."""
        return list(self.submodels.values())

    @property
    def jobs(self) -> Iterator[Job]:
        """Returns the jobs of all submodels."""
        return chain.from_iterable(plan.jobs for plan in self.parts)

    def rows(self) -> list[TensorRow]:
        """Returns the rows of all submodels, with the submodel before names and files."""
        rows: list[TensorRow] = []
        for name, plan in self.submodels.items():
            rows += [row.inside(name) for row in plan.rows()]
        return rows

    @cached_property
    def totals(self) -> PlanTotals:
        """Adds up the totals of all submodels."""
        return add_totals([plan.totals for plan in self.parts])

    @property
    def config(self) -> dict[str, Any]:
        """Returns the config of each submodel, by its name."""
        return {name: plan.config for name, plan in self.submodels.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns the notes of all submodels, then those of the whole."""
        notes = []
        for name, plan in self.submodels.items():
            notes += [f"{name}: {note}" for note in plan.notes]
        return (*notes, *self.complaints)

    @property
    def class_name(self) -> str:
        """Returns the name of the pipeline's class, by its model_index.json."""
        found = read_json(self.source.index).get("_class_name")
        if isinstance(found, str) and found.isidentifier():
            return found
        return "DiffusionPipeline"


def for_submodel(name: str, options: QuantizeOptions) -> QuantizeOptions:
    """Returns the options that concern a submodel.

    Globs may begin with the submodel's name and a slash; all others apply to every submodel.
    """

    def applying(patterns: Sequence[str]) -> tuple[str, ...]:
        # names of tensors have no slash, so a slash always ends the name of a submodel
        parts = [pattern.rpartition("/") for pattern in patterns]
        return tuple(rest for owner, _, rest in parts if not owner or fnmatchcase(name, owner))

    return replace(options, include=applying(options.include), exclude=applying(options.exclude))
