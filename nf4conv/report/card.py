"""Writes model cards: what the Hub and people read of a result in OUT/README.md.

card.md.jinja is the text. This module finds out what stands in it.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jinja2
import yaml

from nf4conv.format.dtypes import DTYPE_NAMES
from nf4conv.format.layout import Format
from nf4conv.options import QuantizeOptions
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.jobs import CopyJob, Job, PackJob
from nf4conv.plan.provenance import Provenance, not_packed
from nf4conv.plan.writing import WritingPlan
from nf4conv.report.loading import Loading, loading_of_plan
from nf4conv.report.results import VerificationSummary
from nf4conv.report.text.terminal import printable
from nf4conv.sources.original_card import OWN_TAGS, OriginalCard
from nf4conv.sources.places import is_repo_id
from nf4conv.sources.record import KEPT, PACKED, name_of
from nf4conv.version import __version__

if TYPE_CHECKING:
    from nf4conv.sources.adapters.adapter import Adapter
    from nf4conv.sources.remote.hub import Origin

HUB: Final = "https://huggingface.co"

_INHERITED: Final = (
    "license",
    "license_name",
    "license_link",
    "language",
    "library_name",
    "pipeline_tag",
    "datasets",
)
"""Fields of the front matter that hold for the result as for the original."""

_TASKS: Final = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
    "SentenceTransformer": "sentence-similarity",
}
"""The Hub's task for each class that loads models of one task."""

_HERE: Final = "."
"""The path by which code loads the checkpoint when it runs in the checkpoint's own folder."""

_ELSEWHERE: Final = '# runs in the folder of this model; elsewhere, put its path or name for "."'

_PLAIN: Final = (*DTYPE_NAMES.values(), "F64")
"""How descriptions of weights begin that are not quantized."""

_SPECIAL: Final = re.compile(r"[\\`*_\[\]<>|~&]")
"""Characters that Markdown, or HTML in it, takes for more than themselves."""

_MEANINGS: Final = {
    "absmax": (
        "Every {other}packed byte is the one that bitsandbytes' CUDA kernels make of the original "
        "weight."
    ),
    "calibrated": (
        "Scales and codes of {other}weights were chosen by what a text makes of the activations, "
        "so that the outputs of each layer change little; bitsandbytes decodes them like any "
        "others. nf4conv.json names the text."
    ),
    "search": (
        "Every {other}block has the scale, of either sign, that a search found to make its squared "
        "error small; bitsandbytes decodes it like any other."
    ),
}
"""A sentence for each kind of scales."""

_OF_FORMATS: Final[Mapping[str, Callable[[Format], str]]] = {
    "4-bit data type": lambda format: format.quant_type.upper(),
    "block size": lambda format: str(format.blocksize),
    "double quantization": lambda format: "yes" if format.double_quant else "no",
    "scales": lambda format: format.scales.replace("search", "searched"),
}
"""The settings that are read off the format of a weight, by the names of their rows."""


@dataclass(frozen=True)
class _Original:
    """The original as a card names it: never by a path of this machine."""

    card: OriginalCard
    origin: "Origin | None"  # where it was downloaded from
    base_model: str | None  # its name on the Hub, as far as that is known
    folder: str  # the name of its folder
    adapters: "tuple[Adapter, ...]"  # that were merged into it

    @property
    def short(self) -> str:
        """Returns the last part of its name on the Hub, or the name of its folder."""
        return (self.base_model or self.folder).rpartition("/")[2]

    @property
    def link(self) -> str:
        """Returns its name, as a link if it is on the Hub."""
        if self.origin is not None:
            origin = self.origin
            subfolder = f", {code(origin.subfolder)}," if origin.subfolder else ""
            commit = f"[`{origin.commit[:12]}`]({HUB}/{origin.repo}/tree/{origin.commit})"
            return f"{_repo_link(origin.repo)}{subfolder} at commit {commit}"
        if self.base_model is not None:
            return _repo_link(self.base_model)
        return _escaped(self.short)


def model_card(
    plan: WritingPlan | DiffusersPlan,
    bytes_after: int,
    verified: VerificationSummary | None,
) -> str:
    """Returns the card of a checkpoint or pipeline that is quantized, or that adapters are merged
    into, given the size of its weights.
    """
    first = plan.parts[0]
    is_pipeline = isinstance(plan, DiffusersPlan)
    original = _name_original(plan)
    loading = loading_of_plan(plan)
    library = "diffusers" if is_pipeline or first.source.stem != "model" else "transformers"
    if first.options.command == "quantize":
        facts = _facts_of_packed(plan, original, bytes_after, verified)
        facts["readers"] = None if is_pipeline else first.readers
    else:
        base = _escaped(original.folder)
        if original.origin is not None:
            base = _repo_link(original.origin.repo)
        facts = {
            "title": "A merged model",
            "introduction": f"{base}{_merged_with(original)}, by nf4conv {__version__}.",
            "tags": [tag for tag in original.card.tags if tag not in OWN_TAGS],
            "kept": None,
        }
    return _template().render(
        front=_front_matter(original, library, loading, facts.pop("tags")),
        loading=loading,
        original=original.card,
        here=_HERE,
        elsewhere=_ELSEWHERE,
        **facts,
    )


def _facts_of_packed(
    plan: WritingPlan | DiffusersPlan,
    original: _Original,
    bytes_after: int,
    verified: VerificationSummary | None,
) -> dict[str, Any]:
    """Returns what the template says of a quantized result alone."""
    counts: Counter[Provenance] = Counter()
    jobs: list[Job] = []
    others: list[CopyJob] = []
    for part in plan.parts:
        counts.update(part.weights.values())
        jobs += part.whole.jobs
        others += not_packed(part.whole, part.weights)
    weights = dict(counts.most_common())
    quant_types = list(dict.fromkeys(weight.format.quant_type for weight in weights))
    names = " and ".join(quant_type.upper() for quant_type in quant_types)
    made = f"its linear layers packed to bitsandbytes {names} with"
    if all(weight.origin == KEPT for weight in weights):
        made = f"its linear layers in bitsandbytes {names}, kept bit for bit by"
    before = sum(tensor.nbytes for part in plan.parts for tensor in part.source.tensors)
    config = (plan.config or {}).get("quantization_config") or {}
    return {
        "tags": [*original.card.tags, "bitsandbytes", "4-bit", *quant_types],
        "title": f"{_escaped(original.short)} in 4 bits",
        "introduction": f"{original.link}{_merged_with(original)}, {made} nf4conv {__version__}.",
        "settings": _settings(weights, jobs, others, config.get("bnb_4bit_compute_dtype")),
        "measured": measured_rows(before, bytes_after, verified, _parameters(jobs)),
        "kept": _kept(jobs),
        "meanings": list(_meanings(weights)),
        "check": f"nf4conv verify . --source {_source_arguments(original)}",
    }


def with_repository(card: str, loading: Loading, repo: str) -> str:
    """Returns a card whose code loads the model from the Hub."""
    here = f"{loading.call(_HERE)}\n{_ELSEWHERE}\n"
    return card.replace(here, f"{loading.call(repo)}\n")


@cache
def _template() -> jinja2.Template:
    # no autoescape: the result is Markdown, and the filters below escape what comes from outside
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.ChainableUndefined
    )
    environment.filters |= {"markdown": _escaped, "code": code, "size": _size}
    return environment.from_string(Path(__file__).with_name("card.md.jinja").read_text("utf-8"))


def _front_matter(
    original: _Original, library: str, loading: Loading | None, tags: Sequence[str]
) -> str:
    """Returns YAML for the Hub, which files the result under its `base_model`."""
    front: dict[str, Any] = {}
    if original.base_model is not None and original.adapters:
        merged = [adapter.origin for adapter in original.adapters]
        repos = [origin.repo for origin in merged if origin is not None]
        front["base_model"] = [original.base_model, *repos]
        front["base_model_relation"] = "merge"
    elif original.base_model is not None:
        front["base_model"] = original.base_model
        front["base_model_relation"] = "quantized"
    for key in _INHERITED:
        value = original.card.fields.get(key)
        if value:
            front[key] = value
    front.setdefault("library_name", library if loading is None else loading.library)
    if loading is not None and loading.class_name in _TASKS:
        front.setdefault("pipeline_tag", _TASKS[loading.class_name])
    front["tags"] = list(dict.fromkeys([*tags, "nf4conv"]))
    return str(yaml.safe_dump(front, sort_keys=False, allow_unicode=True))


def _name_original(plan: WritingPlan | DiffusersPlan) -> _Original:
    """Names the original by the user's word, its place on the Hub, its card or its config.

    That of a pipeline is named by one of its submodels.
    """
    source = plan.parts[0].source
    origin = None if source.fetched is None else source.fetched.origin
    folder = source.folder
    stated = str((source.config or {}).get("_name_or_path", ""))
    if isinstance(plan, DiffusersPlan):
        folder = folder.parent
        stated = ""
        if origin is not None:
            origin = replace(origin, subfolder=origin.subfolder.rpartition("/")[0])
    options = plan.parts[0].options
    base_model = options.base_model if isinstance(options, QuantizeOptions) else None
    if base_model is None and origin is not None:
        base_model = origin.repo
    elif base_model is None and is_repo_id(plan.front.base_of_ours or ""):
        base_model = plan.front.base_of_ours
    elif base_model is None and is_repo_id(stated) and not Path(stated).exists():
        base_model = stated
    return _Original(plan.front, origin, base_model, name_of(folder), source.adapters)


def _merged_with(original: _Original) -> str:
    """Returns the part of an introduction that names the adapters; empty if there are none."""
    names = []
    for adapter in original.adapters:
        if adapter.origin is None:
            names.append(code(Path(adapter.place).name))
        else:
            names.append(f"[{adapter}]({HUB}/{adapter.origin.repo})")
    if not names:
        return ""
    noun = "adapter" if len(names) == 1 else "adapters"
    return f", merged with the LoRA {noun} {', '.join(names)}"


def _settings(
    weights: Mapping[Provenance, int],
    jobs: Sequence[Job],
    others: Sequence[CopyJob],
    compute_dtype: object,
) -> dict[str, str]:
    """Returns what is known of a result before its weights are written, by names of rows.

    `weights` says how many are alike, `others` are the jobs that belong to no weight in 4 bits.
    """
    packed = [job for job in jobs if isinstance(job, PackJob)]
    parameters = _parameters(jobs)
    share = 100 * _parameters(packed) / parameters
    rows = {}
    for name, value_of in _OF_FORMATS.items():
        values: Counter[str] = Counter()
        for weight, count in weights.items():
            values[value_of(weight.format)] += count
        rows[name] = next(iter(values), "")
        if len(values) > 1:
            rows[name] = ", ".join(f"{value} ({n:,} weights)" for value, n in values.items())
    dtypes = _dtypes(others)
    if dtypes:
        rows["what is not packed"] = " and ".join(dtypes)
    if compute_dtype is not None:
        rows["computed in"] = str(compute_dtype)
    rows["packed"] = f"{len(packed):,} weights, {share:.1f} % of {parameters:,} parameters"
    kept = decoded = 0
    encoded: Counter[str] = Counter()  # by another quantization
    for weight, count in weights.items():
        if weight.origin == KEPT:
            kept += count
        elif weight.is_from_4_bits:
            decoded += count
        elif not weight.made_from.startswith(_PLAIN):
            encoded[weight.made_from] += count
    if kept:
        rows["kept bit for bit"] = f"{kept:,} weights, which were in 4 bits before"
    if decoded:
        rows["packed from 4 bits"] = f"{decoded:,} weights, which were decoded first"
    if encoded:
        named = [f"{n:,} weights in {_escaped(name)}" for name, n in encoded.items()]
        rows["quantized before"] = f"{', '.join(named)}, which were decoded first"
    return rows


def measured_rows(
    bytes_before: int, bytes_after: int, verified: VerificationSummary | None, parameters: int
) -> str:
    """Returns the rows of the settings that are known only when all weights are written."""
    bits = 8 * bytes_after / parameters
    row = f"| size | {_size(bytes_before)} → {_size(bytes_after)}, {bits:.2f} bits a parameter |"
    if verified is None:
        return row
    return (
        f"{row}\n| verified | every value against the original: relative error at most "
        f"{verified.largest_relative_error:.4f} |"
    )


def _parameters(jobs: Sequence[Job]) -> int:
    return sum(job.elements for job in jobs)


def _dtypes(jobs: Sequence[CopyJob]) -> list[str]:
    """Returns the float dtypes that tensors are stored in, that of most bytes first."""
    sizes: Counter[str] = Counter()
    for job in jobs:
        if job.dtype in DTYPE_NAMES:
            sizes[DTYPE_NAMES[job.dtype]] += job.nbytes
    return sorted(sizes, key=lambda dtype: (-sizes[dtype], dtype))


def _kept(jobs: Sequence[Job]) -> list[tuple[str, str, int]]:
    """Returns why tensors are not packed: reason, number and bytes, most bytes first."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for job in jobs:
        if isinstance(job, CopyJob):
            counts[job.reason] += 1
            sizes[job.reason] += job.nbytes
    reasons = sorted(sizes, key=lambda reason: (-sizes[reason], reason))
    return [(reason, f"{counts[reason]:,}", sizes[reason]) for reason in reasons]


def _meanings(weights: Mapping[Provenance, int]) -> Iterator[str]:
    """Yields a sentence for each kind of packed bytes that there is."""
    kept = sum(count for weight, count in weights.items() if weight.origin == KEPT)
    scales = {weight.format.scales for weight in weights if weight.origin == PACKED}
    if kept:
        which = f"{kept:,} of the weights were in 4 bits before" if scales else "The weights"
        verb = ", and have" if scales else " have"
        yield f"{which}{verb} the codes and scales of the original, bit for bit."
    for kind, sentence in _MEANINGS.items():
        if kind in scales:
            yield sentence.format(other="other " if kept else "")


def _source_arguments(original: _Original) -> str:
    """Returns how `verify` is told the original: its name, subfolder, files and adapters."""
    arguments = shlex.quote(original.base_model or "ORIGINAL")
    origin = original.origin
    if origin is not None and origin.subfolder:
        arguments += f" --subfolder {shlex.quote(origin.subfolder)}"
    for adapter in original.adapters:
        place = Path(adapter.place).name if adapter.origin is None else str(adapter)
        arguments += f" --lora {shlex.quote(place)}"
    return arguments


def _repo_link(repo: str) -> str:
    return f"[{repo}]({HUB}/{repo})"


def _escaped(text: str) -> str:
    """Returns a text that Markdown shows as it is."""
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", printable(text))


def code(text: str) -> str:
    """Returns a text as Markdown's inline code, whatever characters it has."""
    text = printable(text)
    runs = re.findall("`+", text)
    fence = "`" * (max(map(len, runs), default=0) + 1)
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def _size(count: int) -> str:
    """Returns a number of bytes in MB or GB, which two sizes of one model mostly share."""
    if count >= 1e8:
        return f"{count / 1e9:,.2f} GB"
    return f"{count / 1e6:,.2f} MB"
