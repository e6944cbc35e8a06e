"""Writes the sections of a card below the front matter, in Markdown."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from nf4conv import __version__
from nf4conv.choose.experts.readers import Readers
from nf4conv.format.layout import DTYPE_NAMES
from nf4conv.plan.jobs import CopyJob, Job, PackJob, Plan
from nf4conv.plan.provenance import Provenance
from nf4conv.report.card.subject import HUB, Figures, Subject, repo_link
from nf4conv.report.loading import Loading
from nf4conv.report.text.terminal import printable
from nf4conv.sources.original_card import OriginalCard
from nf4conv.sources.places import is_repo_id
from nf4conv.sources.record import KEPT, PACKED

HERE: Final = "."
"""The path by which code loads the checkpoint when it runs in the checkpoint's own folder."""

_ELSEWHERE: Final = '# runs in the folder of this model; elsewhere, put its path or name for "."'


_SPECIAL: Final = re.compile(r"[\\`*_\[\]<>|~&]")
"""Characters that Markdown, or HTML in it, takes for more than themselves."""


def introduction(subject: Subject) -> str:
    """Returns the title, and a sentence on what the model was made from."""
    title = f"# {escaped(subject.name.short)} in 4 bits\n"
    quant_types = " and ".join(quant_type.upper() for quant_type in subject.quant_types)
    original = f"{_original_link(subject)}{_merged_with(subject)}"
    if all(weight.origin == KEPT for weight, _ in subject.weights):
        made = f"its linear layers in bitsandbytes {quant_types}, kept bit for bit by"
    else:
        made = f"its linear layers packed to bitsandbytes {quant_types} with"
    return f"{title}\n{original}, {made} nf4conv {__version__}.\n"


def merged_introduction(subject: Subject, folder: str) -> str:
    """Returns the title of a merged model that is not packed, and what it was made from.

    Args:
        subject: what the card is about.
        folder: what to call an original that is on this disk.
    """
    origin = subject.name.origin
    base = escaped(folder) if origin is None else repo_link(origin.repo)
    made = f"{base}{_merged_with(subject)}, by nf4conv {__version__}."
    kept = _count(subject, is_kept=True)
    if kept:
        made += f" {kept:,} weights are in bitsandbytes' 4 bits, as they were."
    return f"# A merged model\n\n{made}\n"


def _original_link(subject: Subject) -> str:
    """Returns the name of the original, as a link if it is on the Hub."""
    origin = subject.name.origin
    if origin is not None:
        subfolder = f", {code(origin.subfolder)}," if origin.subfolder else ""
        commit = f"[`{origin.commit[:12]}`]({HUB}/{origin.repo}/tree/{origin.commit})"
        return f"{repo_link(origin.repo)}{subfolder} at commit {commit}"
    if subject.name.base_model is not None:
        return repo_link(subject.name.base_model)
    return escaped(subject.name.short)


def _merged_with(subject: Subject) -> str:
    """Returns the part of an introduction that names the adapters; empty if there are none."""
    names = []
    for adapter in subject.adapters:
        if adapter.origin is None:
            names.append(code(Path(adapter.place).name))
        else:
            names.append(f"[{adapter}]({HUB}/{adapter.origin.repo})")
    if not names:
        return ""
    noun = "adapter" if len(names) == 1 else "adapters"
    return f", merged with the LoRA {noun} {', '.join(names)}"


def settings(subject: Subject, compute_dtype: str | None) -> str:
    """Returns the table of options, sizes and what was verified.

    Args:
        subject: what the card is about.
        compute_dtype: the dtype that layers compute in. None if the config does not say.
    """
    packed = [job for job in subject.jobs if isinstance(job, PackJob)]
    packed_parameters = sum(job.elements for job in packed)
    parameters = sum(job.elements for job in subject.jobs)
    share = 100 * packed_parameters / parameters
    rows = {
        "4-bit data type": _shared(subject, lambda weight: weight.format.quant_type.upper()),
        "block size": _shared(subject, lambda weight: str(weight.format.blocksize)),
        "double quantization": _shared(subject, _double_quantization),
        "scales": _shared(subject, _scales),
    }
    kept_dtypes = _dtypes(subject.not_packed)
    if kept_dtypes:
        rows["what is not packed"] = " and ".join(kept_dtypes)
    if compute_dtype is not None:
        rows["computed in"] = compute_dtype
    rows["packed"] = f"{len(packed):,} weights, {share:.1f} % of {parameters:,} parameters"
    kept = _count(subject, is_kept=True)
    if kept:
        rows["kept bit for bit"] = f"{kept:,} weights, which were in 4 bits before"
    decoded = _count(subject, is_kept=False)
    if decoded:
        rows["packed from 4 bits"] = f"{decoded:,} weights, which were decoded first"
    others = _other_quantizations(subject)
    if others:
        rows["quantized before"] = f"{others}, which were decoded first"
    bases = [base for base in subject.original.bases_of_others if is_repo_id(base)]
    if others and bases:
        links = " and ".join(repo_link(base) for base in bases)
        rows["quantized before from"] = f"{links}, says the card of the original"
    return _two_columns(rows) + measured_rows(subject.figures, parameters)


def _shared(subject: Subject, value_of: Callable[[Provenance], str]) -> str:
    """Returns the value that all packed weights share, or each value with its number of weights."""
    counts: dict[str, int] = {}
    for weight, count in subject.weights:
        value = value_of(weight)
        counts[value] = counts.get(value, 0) + count
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{value} ({count:,} weights)" for value, count in counts.items())


def _double_quantization(weight: Provenance) -> str:
    return "yes" if weight.format.double_quant else "no"


def _scales(weight: Provenance) -> str:
    return "searched" if weight.format.scales == "search" else weight.format.scales


def _count(subject: Subject, *, is_kept: bool) -> int:
    """Counts the weights that the source has in 4 bits, and that were kept, or packed anew."""
    total = 0
    for weight, count in subject.weights:
        if weight.is_from_4_bits and (weight.origin == KEPT) is is_kept:
            total += count
    return total


def _other_quantizations(subject: Subject) -> str:
    """Returns what weights were stored as that another quantization had encoded; may be empty."""
    plain = (*DTYPE_NAMES.values(), "F64")
    named: dict[str, int] = {}
    for weight, count in subject.weights:
        if not weight.is_from_4_bits and not weight.made_from.startswith(plain):
            named[weight.made_from] = named.get(weight.made_from, 0) + count
    return ", ".join(f"{count:,} weights in {escaped(name)}" for name, count in named.items())


def _dtypes(jobs: Sequence[CopyJob]) -> list[str]:
    """Returns the float dtypes that tensors are stored in, that of most bytes first."""
    sizes: dict[str, int] = {}
    for job in jobs:
        if job.dtype in DTYPE_NAMES:
            dtype = DTYPE_NAMES[job.dtype]
            sizes[dtype] = sizes.get(dtype, 0) + job.nbytes
    return sorted(sizes, key=lambda dtype: (-sizes[dtype], dtype))


def measured_rows(figures: Figures, parameters: int) -> str:
    """Returns the rows of the settings that are known only when all weights are written.

    Args:
        figures: sizes, and what was verified.
        parameters: the number of elements of all tensors.
    """
    size = f"{_size(figures.bytes_before)} → {_size(figures.bytes_after)}"
    bits = 8 * figures.bytes_after / parameters
    rows = {"size": f"{size}, {bits:.2f} bits a parameter"}
    verified = figures.verified
    if verified is not None:
        rows["verified"] = (
            f"every value against the original: relative error at most "
            f"{verified.largest_relative_error:.4f}, "
            f"median {verified.median_relative_error:.4f}"
        )
    return _rows(rows)


def submodels_table(submodels: Mapping[str, Plan], figures: Mapping[str, Figures]) -> str:
    """Returns the table of the submodels of a diffusers pipeline.

    Args:
        submodels: what was written of each submodel, by its name.
        figures: the sizes of each submodel, by its name.
    """
    lines = ["## Components\n\n| component | packed weights | size |\n|---|---|---|\n"]
    for name, plan in submodels.items():
        packed = sum(1 for job in plan.jobs if isinstance(job, PackJob))
        before = _size(figures[name].bytes_before)
        after = _size(figures[name].bytes_after)
        lines.append(f"| {escaped(name)} | {packed:,} | {before} → {after} |\n")
    return "".join(lines)


def kept_table(jobs: Sequence[Job]) -> str:
    """Returns the table of why tensors are not packed, most bytes first; empty if all are."""
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for job in jobs:
        if isinstance(job, CopyJob):
            counts[job.reason] = counts.get(job.reason, 0) + 1
            sizes[job.reason] = sizes.get(job.reason, 0) + job.nbytes
    if not counts:
        return ""
    lines = ["## What is not packed\n\n| why | tensors | size |\n|---|---|---|\n"]
    for reason in sorted(sizes, key=lambda reason: (-sizes[reason], reason)):
        cells = (escaped(reason), f"{counts[reason]:,}", _size(sizes[reason]))
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def use(loading: Loading | None, readers: Readers | None = None, repo: str | None = None) -> str:
    """Returns the section with the code that loads the model.

    Args:
        loading: how it is loaded. None if nothing says how.
        readers: who reads its experts, if they are packed.
        repo: the repository that the card is for. None if it is not known.
    """
    experts = "" if readers is None else f"\nIts {readers.text}.\n"
    if readers is not None and readers.in_transformers_4:
        experts += (
            '\nWith transformers 4 (`pip install "transformers>=4.57,<5" accelerate '
            "bitsandbytes`), leave out the first line.\n"
        )
    if loading is None and readers is not None and not readers.has_loader:
        return f"## Use\n{experts}"
    if loading is None:
        return f"## Use\n\nIt loads as the original does, with bitsandbytes installed.\n{experts}"
    imports = "\n".join(loading.imports())
    call = loading.call(HERE if repo is None else repo)
    if repo is None:
        call += f"\n{_ELSEWHERE}"
    return (
        f"## Use\n\n```bash\n{loading.install}\n```\n\n"
        f"```python\n{imports}\n\n{call}\n```\n{experts}"
    )


def with_repository(card: str, loading: Loading, repo: str) -> str:
    """Returns a card whose code loads the model from the Hub, given one that did not know where."""
    here = f"{loading.call(HERE)}\n{_ELSEWHERE}\n"
    return card.replace(here, f"{loading.call(repo)}\n")


def check(subject: Subject) -> str:
    """Returns the section that says what the packed bytes are, and how to verify them."""
    meanings = " ".join(_meanings(subject))
    command = f"nf4conv verify . --source {_source_arguments(subject)}"
    return (
        f"## Check\n\n{meanings} {code(command)} checks "
        f"the files and measures the error of each weight.\n"
    )


def _meanings(subject: Subject) -> Iterator[str]:
    """Yields a sentence for each kind of packed bytes that there is."""
    kept = _count(subject, is_kept=True)
    packed = {weight.format.scales for weight, _ in subject.weights if weight.origin == PACKED}
    if kept:
        which = f"{kept:,} of the weights were in 4 bits before" if packed else "The weights"
        verb = ", and have" if packed else " have"
        yield f"{which}{verb} the codes and scales of the original, bit for bit."
    other = "other " if kept else ""
    if "absmax" in packed:
        yield (
            f"Every {other}packed byte is the one that bitsandbytes' CUDA kernels make of the "
            f"original weight."
        )
    if "calibrated" in packed:
        yield (
            f"Scales and codes of {other}weights were chosen by what a text makes of the "
            f"activations, so that the outputs of each layer change little; bitsandbytes decodes "
            f"them like any others. nf4conv.json names the text."
        )
    if "search" in packed:
        yield (
            f"Every {other}block has the scale, of either sign, that a search found to make its "
            f"squared error small; bitsandbytes decodes it like any other."
        )


def _source_arguments(subject: Subject) -> str:
    """Returns how `verify` is told the original: its name, subfolder, files and adapters."""
    arguments = shlex.quote(subject.name.base_model or "ORIGINAL")
    origin = subject.name.origin
    if origin is not None and origin.subfolder:
        arguments += f" --subfolder {shlex.quote(origin.subfolder)}"
    for adapter in subject.adapters:
        place = Path(adapter.place).name if adapter.origin is None else str(adapter)
        arguments += f" --lora {shlex.quote(place)}"
    return arguments


def original_text(original: OriginalCard) -> str:
    """Returns the text of the original's authors; empty if there is none."""
    return f"---\n\n{original.body}\n" if original.body else ""


def _two_columns(rows: Mapping[str, str]) -> str:
    return f"| | |\n|---|---|\n{_rows(rows)}"


def _rows(rows: Mapping[str, str]) -> str:
    return "".join(f"| {key} | {value} |\n" for key, value in rows.items())


def escaped(text: str) -> str:
    """Returns a text that Markdown shows as it is."""
    return _SPECIAL.sub(_escape, printable(text))


def code(text: str) -> str:
    """Returns a text as Markdown's inline code, whatever characters it has."""
    text = printable(text)
    runs = re.findall("`+", text)
    fence = "`" * (max(map(len, runs), default=0) + 1)
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def _escape(found: re.Match[str]) -> str:
    return f"&#{ord(found[0])};"


def _size(count: int) -> str:
    """Returns a number of bytes in MB or GB, which two sizes of one model mostly share."""
    if count >= 1e8:
        return f"{count / 1e9:,.2f} GB"
    return f"{count / 1e6:,.2f} MB"
