"""Says what a card is about."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nf4conv.plan.jobs import CopyJob, Job
from nf4conv.plan.provenance import Provenance
from nf4conv.report.rows.weights import VerificationSummary
from nf4conv.sources.original_card import OriginalCard
from nf4conv.sources.places import is_repo_id
from nf4conv.sources.record import name_of
from nf4conv.sources.source import AdapterFiles, Source

if TYPE_CHECKING:
    from nf4conv.sources.remote.hub import Origin

HUB: Final = "https://huggingface.co"


@dataclass(frozen=True)
class Figures:
    """The figures that are known only when all weights are written.

    Attributes:
        bytes_before: the size of all tensors of the source.
        bytes_after: the size of the output's weight files.
        verified: what `--verify` measured. None without it.
    """

    bytes_before: int
    bytes_after: int
    verified: VerificationSummary | None = None


@dataclass(frozen=True)
class OriginalName:
    """The original as a card names it: never by a path of this machine.

    Attributes:
        origin: where it was downloaded from. None for an original on this disk.
        base_model: its name on the Hub. None if that is unknown.
        short: the last part of its name on the Hub, or of its folder.
    """

    origin: "Origin | None"
    base_model: str | None
    short: str


@dataclass(frozen=True)
class Subject:
    """Everything that a card tells.

    Attributes:
        name: the original.
        original: the original's own card.
        library: the library that loads the result, as the Hub spells it.
        weights: what the weights in 4 bits are, most weights first.
        jobs: the tensors that were written. Empty for a merged model.
        not_packed: the tensors that were written and belong to no weight in 4 bits.
        figures: sizes, and what was verified.
        adapters: the LoRA adapters that were merged into the model.
        pipeline_tag: what the model is for, as the Hub spells it. Empty if that is not certain.
    """

    name: OriginalName
    original: OriginalCard
    library: str
    weights: Sequence[tuple[Provenance, int]]
    jobs: Sequence[Job]
    not_packed: Sequence[CopyJob]
    figures: Figures
    adapters: tuple[AdapterFiles, ...] = ()
    pipeline_tag: str = ""

    @property
    def quant_types(self) -> list[str]:
        """The 4-bit data types, that of most weights first."""
        return list(dict.fromkeys(weight.format.quant_type for weight, _ in self.weights))


def name_original(source: Source, card: OriginalCard, base_model: str | None) -> OriginalName:
    """Finds out how to name the original.

    Args:
        source: the original.
        card: its card. If nf4conv wrote it, it says what the original was made from.
        base_model: what the user calls it. None to take its place on the Hub, what its card says,
            or the name that its config states.
    """
    origin = None if source.fetched is None else source.fetched.origin
    if base_model is None and origin is not None:
        base_model = origin.repo
    elif base_model is None and is_repo_id(card.base_of_ours or ""):
        base_model = card.base_of_ours
    elif base_model is None:
        stated = str((source.config or {}).get("_name_or_path", ""))
        if is_repo_id(stated) and not Path(stated).exists():
            base_model = stated
    name = base_model or name_of(source.folder)
    return OriginalName(origin, base_model, name.rpartition("/")[2])


def repo_link(repo: str) -> str:
    """Returns a Markdown link to a repository on the Hub."""
    return f"[{repo}]({HUB}/{repo})"
