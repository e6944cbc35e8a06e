"""The model card of a 4-bit checkpoint, its README.md, as the Hub shows it. Two runs of one job
write the same one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from nf4conv import __version__
from nf4conv.errors import SourceError
from nf4conv.format.layout import Format
from nf4conv.plan.jobs import CopyJob, Job, PackJob, Plan
from nf4conv.report.loading import Loading
from nf4conv.report.results import Evaluation
from nf4conv.report.rows import VerificationSummary
from nf4conv.report.text import printable
from nf4conv.sources.own_files import require_own
from nf4conv.sources.record import name_of
from nf4conv.sources.source import AdapterFiles, Source, is_repo_id

if TYPE_CHECKING:
    from nf4conv.sources.remote.hub import Origin

_INHERITED: Final = (
    "license",
    "license_name",
    "license_link",
    "language",
    "library_name",
    "pipeline_tag",
    "datasets",
)
"""What holds for the quantized model as for the original."""

_FRONT_MATTER: Final = re.compile(rb"\A---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_LONGEST_FRONT_MATTER: Final = 2**17
_LONGEST_CARD: Final = 2**20
_BODY: Final = "what is below the front matter"
_SPECIAL: Final = re.compile(
    r"[\\`*_\[\]<>|~&]"
)  # what Markdown takes for more than a character, HTML in it included
_OWN_TAGS: Final = ("bitsandbytes", "4-bit", "nf4", "fp4", "nf4conv")
_HUB: Final = "https://huggingface.co"
_EVALUATED: Final = "## Against the original"


@dataclass(frozen=True)
class Figures:
    """What a run measured."""

    bytes_before: int  # of all tensors of the source
    bytes_after: int  # of the output's weight files
    verified: VerificationSummary | None = None  # an audit's summary; None if nothing was verified


@dataclass(frozen=True)
class _Subject:
    """What a card is about."""

    origin: "Origin | None"  # where the original came from; None for one on this disk
    base: str | None  # the name of the original on the Hub; None if unknown
    name: str  # what the original is called: the last part of that name, or of its folder
    front: Mapping[str, Any]  # what the original's own card says at its top
    library: str  # that loads it
    format: Format  # of the packed weights
    jobs: Sequence[Job]  # what was written
    figures: Figures  # sizes
    adapters: tuple[AdapterFiles, ...] = ()  # what has been merged into it


def model_card(
    source: Source,
    plan: Plan,
    config: Mapping[str, Any] | None,
    front: Mapping[str, Any],
    figures: Figures,
    loading: Loading | None,
    base_model: str | None = None,
) -> str:
    """The card: front matter by which the Hub files the model under its original, and what was done
    to it.

    `config` is the content of the output's config.json, `front` that of the original's card, of
    which license and language are taken over (`read_front_matter`), and `base_model` what the user
    calls the original.
    """
    library = (
        ("transformers" if source.stem == "model" else "diffusers")
        if loading is None
        else loading.library
    )
    origin, base, name = _named(source, base_model)
    subject = _Subject(
        origin, base, name, front, library, plan.format, list(plan.jobs), figures, source.adapters
    )
    compute = ((config or {}).get("quantization_config") or {}).get("bnb_4bit_compute_dtype")
    return _document(subject, [_settings(subject, compute), _kept(subject.jobs), _loading(loading)])


def _named(source: Source, base_model: str | None) -> tuple["Origin | None", str | None, str]:
    """Where a source came from, its name on the Hub, and what it is called, never by a path of this
    machine.
    """
    origin = None if source.fetched is None else source.fetched.origin
    stated = str((source.config or {}).get("_name_or_path", ""))
    known = stated if is_repo_id(stated) and not Path(stated).exists() else None
    base = base_model or (known if origin is None else origin.repo)
    return origin, base, (base or name_of(source.folder)).rpartition("/")[2]


def merged_card(
    source: Source, plan: Plan, loading: Loading | None, original: Mapping[str, Any]
) -> str:
    """The card of a model that adapters are merged into, and that is not in 4 bits; arguments as
    `model_card`.
    """
    origin, base_model, name = _named(source, None)
    subject = _Subject(
        origin,
        base_model,
        name,
        original,
        "transformers",
        plan.format,
        [],
        Figures(0, 0),
        source.adapters,
    )
    front = _front_matter(subject)
    front |= {"tags": [tag for tag in front["tags"] if tag not in _OWN_TAGS] + ["nf4conv"]}
    base = source.folder.name if origin is None else f"[{origin.repo}]({_HUB}/{origin.repo})"
    text = f"# A merged model\n\n{base}{_merged_with(subject)}, by nf4conv {__version__}.\n"
    return "\n".join([_yaml(front), text, _loading(loading), _original(subject)])


def diffusers_card(
    front: Mapping[str, Any],
    loading: Loading,
    submodels: Mapping[str, tuple[Source, Plan]],
    figures: Mapping[str, Figures],
    verified: VerificationSummary | None,
    base_model: str | None = None,
) -> str:
    """The card of a diffusers pipeline, as `model_card`.

    `submodels` has (original, what was written) of each by name, and `verified` an audit's summary
    of all of them.
    """
    # what is not packed keeps dtypes of its own
    source, plan = next(
        (source, plan)
        for source, plan in submodels.values()
        if any(isinstance(job, PackJob) for job in plan.jobs)
    )
    part = None if source.fetched is None else source.fetched.origin
    origin = None if part is None else replace(part, subfolder=part.subfolder.rpartition("/")[0])
    jobs = [job for _, plan in submodels.values() for job in plan.jobs]
    before = sum(part.bytes_before for part in figures.values())
    whole = Figures(before, sum(part.bytes_after for part in figures.values()), verified)
    base = base_model or (None if origin is None else origin.repo)
    name = (base or name_of(source.folder.parent)).rpartition("/")[2]
    subject = _Subject(origin, base, name, front, "diffusers", plan.format, jobs, whole)
    parts = _submodels(submodels, figures)
    return _document(subject, [_settings(subject, None), parts, _kept(jobs), _loading(loading)])


def _document(subject: _Subject, sections: Sequence[str]) -> str:
    return "\n".join(
        [
            _yaml(_front_matter(subject)),
            _introduction(subject),
            *sections,
            _checking(subject),
            _original(subject),
        ]
    )


def _original(subject: _Subject) -> str:
    """What the authors of the original wrote about it."""
    text = subject.front.get(_BODY)
    return f"---\n\n{text}\n" if text else ""


def _yaml(front: Mapping[str, Any]) -> str:
    return f"---\n{yaml.safe_dump(dict(front), sort_keys=False, allow_unicode=True)}---\n"


def _front_matter(subject: _Subject) -> dict[str, Any]:
    before = subject.front
    front: dict[str, Any] = {}
    if subject.base is not None:
        front |= {"base_model": subject.base, "base_model_relation": "quantized"}
        repos = [adapter.origin.repo for adapter in subject.adapters if adapter.origin is not None]
        if subject.adapters:
            front |= {"base_model": [subject.base, *repos], "base_model_relation": "merge"}
    front |= {key: before[key] for key in _INHERITED if before.get(key)}
    front.setdefault("library_name", subject.library)
    tags = before.get("tags", [])
    own = [*_OWN_TAGS[:2], subject.format.quant_type, "nf4conv"]
    front["tags"] = list(dict.fromkeys([*(tags if isinstance(tags, list) else [tags]), *own]))
    return front


def read_front_matter(path: Path, root: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What a card says at its top, and a line for the user about why it cannot be read.

    Links may not lead out of the `root`.
    """
    if not path.is_file():
        return {}, ()
    try:
        require_own(path, root)
        with path.open("rb") as file:
            raw = file.read(_LONGEST_FRONT_MATTER)
            rest = file.read(_LONGEST_CARD)
        block = _FRONT_MATTER.match(raw)
        if block is None and len(raw) == _LONGEST_FRONT_MATTER and raw.startswith(b"---"):
            raise ValueError(f"it does not end within {_LONGEST_FRONT_MATTER:,} bytes")
        front = yaml.load(block[1].decode(), _PlainLoader) if block is not None else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError, SourceError) as error:
        reason = " ".join(str(error).removeprefix(f"{path}: ").split())
        return {}, (
            f"README.md: the new card takes over nothing of it, for its front matter cannot be "
            f"read: {reason}",
        )
    text = (raw[0 if block is None else block.end() :] + rest).decode(errors="replace").strip()
    plain = (
        {key: value for key, value in front.items() if _is_plain(value)}
        if isinstance(front, dict)
        else {}
    )
    return plain | {_BODY: text}, ()


class _PlainLoader(yaml.BaseLoader):  # type: ignore[misc]  # yaml has no types
    """Strings, lists and mappings, and no aliases, by which a few lines stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases")
        return super().compose_node(parent, index)


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return value not in ("", "null", "~")
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _introduction(subject: _Subject) -> str:
    origin = subject.origin
    if origin is None:
        of = (
            _cell(subject.name)
            if subject.base is None
            else f"[{subject.base}]({_HUB}/{subject.base})"
        )
    else:
        subfolder = f", `{origin.subfolder}`," if origin.subfolder else ""
        commit = f"[`{origin.commit[:12]}`]({_HUB}/{origin.repo}/tree/{origin.commit})"
        of = f"[{origin.repo}]({_HUB}/{origin.repo}){subfolder} at commit {commit}"
    made = f"its linear layers packed to bitsandbytes {subject.format.quant_type.upper()} with nf4conv {__version__}"
    return f"# {_cell(subject.name)} in 4 bits\n\n{of}{_merged_with(subject)}, {made}.\n"


def _merged_with(subject: _Subject) -> str:
    """What an introduction says of adapters."""
    names = [
        f"`{Path(adapter.place).name}`"
        if adapter.origin is None
        else f"[{adapter}]({_HUB}/{adapter.origin.repo})"
        for adapter in subject.adapters
    ]
    return (
        f", merged with the LoRA adapter{'s'[: len(names) - 1]} {', '.join(names)}" if names else ""
    )


def _settings(subject: _Subject, compute: str | None) -> str:
    format, figures = subject.format, subject.figures
    packed = [job for job in subject.jobs if isinstance(job, PackJob)]
    parameters = sum(job.elements for job in subject.jobs)
    share = sum(job.elements for job in packed) / parameters
    rows = {
        "4-bit data type": format.quant_type.upper(),
        "block size": str(format.blocksize),
        "double quantization": "yes" if format.double_quant else "no",
        "scales": "absmax" if format.scales == "absmax" else "searched",
        "what is not packed": format.dtype,
        **({} if compute is None else {"computed in": str(compute)}),
        "packed": f"{len(packed):,} weights, {100 * share:.1f} % of {parameters:,} parameters",
    }
    return f"| | |\n|---|---|\n{_rows(rows)}{measured_rows(figures, parameters)}"


def measured_rows(figures: Figures, parameters: int) -> str:
    """What a card says that is known only when all weights are written."""
    size = f"{_bytes(figures.bytes_before)} → {_bytes(figures.bytes_after)}"
    rows = {"size": f"{size}, {8 * figures.bytes_after / parameters:.2f} bits a parameter"}
    if figures.verified is not None:
        rows["verified"] = (
            f"every value against the original: relative error at most "
            f"{figures.verified.largest_relative_error:.4f}, "
            f"median {figures.verified.median_relative_error:.4f}"
        )
    return _rows(rows)


def _rows(rows: Mapping[str, str]) -> str:
    return "".join(f"| {key} | {value} |\n" for key, value in rows.items())


def _submodels(submodels: Mapping[str, tuple[Source, Plan]], figures: Mapping[str, Figures]) -> str:
    rows = (
        f"| {_cell(name)} | {sum(isinstance(job, PackJob) for job in plan.jobs):,} "
        f"| {_bytes(figures[name].bytes_before)} → {_bytes(figures[name].bytes_after)} |\n"
        for name, (_, plan) in submodels.items()
    )
    return "## Components\n\n| component | packed weights | size |\n|---|---|---|\n" + "".join(rows)


def _kept(jobs: Sequence[Job]) -> str:
    sizes: dict[str, tuple[int, int]] = {}
    for job in jobs:
        if isinstance(job, CopyJob):
            count, size = sizes.get(job.reason, (0, 0))
            sizes[job.reason] = (count + 1, size + job.nbytes)
    rows = sorted(sizes.items(), key=lambda entry: (-entry[1][1], entry[0]))
    cells = ((_cell(reason), f"{count:,}", _bytes(size)) for reason, (count, size) in rows)
    table = "".join(f"| {' | '.join(row)} |\n" for row in cells)
    return (
        f"## What is not packed\n\n| why | tensors | size |\n|---|---|---|\n{table}"
        if table
        else ""
    )


def _cell(text: str) -> str:
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};", printable(text))


def _loading(loading: Loading | None) -> str:
    if loading is None:
        return "## Use\n\nIt loads as the original does, with bitsandbytes installed.\n"
    call = loading.call("path or name of this model")
    return f"## Use\n\n```python\n{loading.imports()}\n\nmodel = {call}\n```\n"


def _checking(subject: _Subject) -> str:
    origin = subject.origin
    original = subject.base or "ORIGINAL"
    if origin is not None and origin.subfolder:
        original += f" --subfolder {origin.subfolder}"
    original += "".join(
        f" --lora {Path(part.place).name if part.origin is None else part}"
        for part in subject.adapters
    )
    meaning = {
        "absmax": "Every packed byte is the one that bitsandbytes' CUDA kernels make of the "
        "original weight.",
        "search": "Every block has the scale, of either sign, that was found to make its squared "
        "error small; "
        "bitsandbytes decodes it as any other.",
    }
    return (
        f"## Check\n\n{meaning[subject.format.scales]} "
        f"`nf4conv verify . --source {original}` checks the files and measures the error of each "
        f"weight.\n"
    )


def _bytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"


def with_evaluation(card: str, evaluation: Evaluation) -> str:
    """A card with what `evaluate` found, in the place of what it found before, and above the text
    of the author.
    """
    rows = "".join(f"| {name} | {value} |\n" for name, value in evaluation.rows().items())
    rest = re.sub(rf"\n*{_EVALUATED}\n.*?(?=\n## |\Z)", "", card, flags=re.DOTALL)
    above, check, below = rest.partition("\n## Check\n")
    return f"{above.rstrip()}\n\n{_EVALUATED}\n\n| | |\n|---|---|\n{rows}{check}{below}".lstrip(
        "\n"
    )
