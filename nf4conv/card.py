"""The model card of a 4-bit checkpoint, its README.md, as the Hub shows it. Two runs of one job write the same one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from nf4conv import __version__
from nf4conv.checkpoint.config import architecture_of
from nf4conv.checkpoint.plan import CopyJob, PackJob, Plan
from nf4conv.checkpoint.source import Source

_INHERITED: Final = (
    *("license", "license_name", "license_link", "language", "library_name", "pipeline_tag", "datasets"),
)
"""What holds for the quantized model as for the original."""

_FRONT_MATTER: Final = re.compile(r"\A---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_HUB: Final = "https://huggingface.co"
_LOADERS: Final = {
    "ForCausalLM": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForImageTextToText",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForMaskedLM": "AutoModelForMaskedLM",
}


@dataclass(frozen=True)
class Figures:
    """What a run measured.

    Attributes:
        bytes_before: of all tensors of the source.
        bytes_after: of the output's weight files.
        verified: an audit's summary; None if nothing was verified.
    """

    bytes_before: int
    bytes_after: int
    verified: Mapping[str, Any] | None = None


def model_card(source: Source, plan: Plan, config: Mapping[str, Any] | None, figures: Figures) -> str:
    """The card: front matter by which the Hub files the model under its original, and what was done to it.

    Args:
        source: the original; what its own card says of license and language is taken over.
        plan: what was written.
        config: the content of the output's config.json.
        figures: sizes.
    """
    front = yaml.safe_dump(_front_matter(source, plan), sort_keys=False, allow_unicode=True)
    parts = [f"---\n{front}---\n", _introduction(source, plan), _settings(plan, config, figures), _kept(plan)]
    return "\n".join([*parts, _loading(config), _checking(source)])


def _front_matter(source: Source, plan: Plan) -> dict[str, Any]:
    before = _card_of(source.folder / "README.md")
    front: dict[str, Any] = {}
    if source.fetched is not None:
        front |= {"base_model": source.fetched.origin.repo, "base_model_relation": "quantized"}
    front |= {key: before[key] for key in _INHERITED if before.get(key)}
    if "library_name" not in front:
        front["library_name"] = "transformers" if source.stem == "model" else "diffusers"
    tags = before.get("tags", [])
    own = ["bitsandbytes", "4-bit", plan.format.quant_type, "nf4conv"]
    front["tags"] = list(dict.fromkeys([*(tags if isinstance(tags, list) else [tags]), *own]))
    return front


def _card_of(path: Path) -> dict[str, Any]:
    """The front matter of a card; nothing where there is none that can be read."""
    try:
        block = _FRONT_MATTER.match(path.read_text(encoding="utf-8"))
        front = yaml.safe_load(block[1]) if block is not None else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return {key: value for key, value in front.items() if _is_plain(value)} if isinstance(front, dict) else {}


def _is_plain(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _introduction(source: Source, plan: Plan) -> str:
    name = plan.format.quant_type.upper()
    if source.fetched is None:
        return f"# A 4-bit {name} checkpoint\n\nMade with nf4conv {__version__}.\n"
    origin = source.fetched.origin
    link = f"[{origin.repo}]({_HUB}/{origin.repo})" + (f", `{origin.subfolder}`," if origin.subfolder else "")
    return (
        f"# {origin.repo.partition('/')[2]} in 4 bits\n\n"
        f"{link} at commit [`{origin.commit[:12]}`]({_HUB}/{origin.repo}/tree/{origin.commit}), its linear layers "
        f"packed to bitsandbytes {name} with nf4conv {__version__}.\n"
    )


def _settings(plan: Plan, config: Mapping[str, Any] | None, figures: Figures) -> str:
    format = plan.format
    jobs = list(plan.jobs)
    packed = [job for job in jobs if isinstance(job, PackJob)]
    parameters = sum(job.elements for job in jobs)
    share = sum(job.elements for job in packed) / parameters
    compute = ((config or {}).get("quantization_config") or {}).get("bnb_4bit_compute_dtype")
    rows = {
        "4-bit data type": format.quant_type.upper(),
        "block size": str(format.blocksize),
        "double quantization": "yes" if format.double_quant else "no",
        "what is not packed": format.dtype,
        **({} if compute is None else {"computed in": str(compute)}),
        "packed": f"{len(packed):,} weights, {100 * share:.1f} % of {parameters:,} parameters",
        "size": f"{_bytes(figures.bytes_before)} → {_bytes(figures.bytes_after)}, "
        f"{8 * figures.bytes_after / parameters:.2f} bits a parameter",
        **({} if figures.verified is None else {"verified": _verified(figures.verified)}),
    }
    return "| | |\n|---|---|\n" + "".join(f"| {key} | {value} |\n" for key, value in rows.items())


def _verified(summary: Mapping[str, Any]) -> str:
    return (
        f"every value against the original: relative error at most {summary['largest_relative_error']:.4f}, "
        f"median {summary['median_relative_error']:.4f}"
    )


def _kept(plan: Plan) -> str:
    sizes: dict[str, tuple[int, int]] = {}
    for job in plan.jobs:
        if isinstance(job, CopyJob):
            count, size = sizes.get(job.reason, (0, 0))
            sizes[job.reason] = (count + 1, size + job.nbytes)
    rows = sorted(sizes.items(), key=lambda entry: (-entry[1][1], entry[0]))
    table = "".join(f"| {_cell(reason)} | {count:,} | {_bytes(size)} |\n" for reason, (count, size) in rows)
    return f"## What is not packed\n\n| why | tensors | size |\n|---|---|---|\n{table}" if table else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _loading(config: Mapping[str, Any] | None) -> str:
    architecture = architecture_of(config or {})
    loader = next((loader for end, loader in _LOADERS.items() if architecture.endswith(end)), None)
    if loader is None:
        return "## Use\n\nIt loads as the original does, with bitsandbytes installed.\n"
    return (
        f"## Use\n\n```python\nfrom transformers import {loader}  # pip install bitsandbytes\n\n"
        f'model = {loader}.from_pretrained("path or name of this model", device_map="auto")\n```\n'
    )


def _checking(source: Source) -> str:
    original = source.fetched.origin.repo if source.fetched is not None else "ORIGINAL"
    return (
        "## Check\n\nEvery packed byte is the one that bitsandbytes' CUDA kernels make of the original weight. "
        f"`nf4conv verify . --source {original}` checks the files and measures the error of each weight.\n"
    )


def _bytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"
