"""How a result is loaded: the code, the GPU memory that it takes, and why it may be larger than
expected.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nf4conv.models.config import architecture_of
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.rows import PlanRow
from nf4conv.plan.writing import WritingPlan
from nf4conv.report.text import size

_TASKS: Final = (
    *(
        "ForCausalLM",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMaskedLM",
    ),
    "ForImageClassification",
)
_CUDA_ITSELF: Final = (
    5 * 10**8
)  # bytes that CUDA and its libraries take of a GPU, roughly, before a weight is loaded
_MANY_BITS: Final = 6.0  # per parameter: half as much again as a checkpoint of linear layers alone


@dataclass(frozen=True)
class Loading:
    """Python that loads a checkpoint: the library, as the Hub calls it, its class, and what is
    called with what.
    """

    library: str
    class_name: str
    arguments: str = ', device_map="auto"'
    method: str = ".from_pretrained"

    def imports(self) -> str:
        package = self.library.replace("-", "_")
        torch = "import torch\n" if "torch." in self.arguments else ""
        return f"{torch}from {package} import {self.class_name}  # pip install {self.library} bitsandbytes"

    def call(self, place: str) -> str:
        """The call, given a path or a name."""
        return f"{self.class_name}{self.method}({json.dumps(place, ensure_ascii=False)}{self.arguments})"


def loading_of(
    config: Mapping[str, Any] | None, beside: Collection[str], dtype: str
) -> Loading | None:
    """How to load a checkpoint, by its config.json, the files beside the weights, and the dtype of
    what is kept.
    """
    if config is None:
        return None
    trusted = ", trust_remote_code=True" if "auto_map" in config else ""
    if "modules.json" in beside:
        return Loading("sentence-transformers", "SentenceTransformer", trusted, "")
    class_name = config.get("_class_name")
    if isinstance(class_name, str) and class_name.isidentifier():
        return diffusers_loading(class_name, dtype)
    found = _auto_class(architecture_of(config), config)
    return (
        None if found is None else Loading("transformers", found, f', device_map="auto"{trusted}')
    )


def diffusers_loading(class_name: str, dtype: str) -> Loading:
    """How to load a diffusers pipeline, or a part of one."""
    return Loading("diffusers", class_name, f", torch_dtype=torch.{dtype}")


def loading_of_plan(plan: WritingPlan) -> Loading | None:
    """Returns how the result of a plan is loaded; None if nothing says how."""
    beside = [str(name) for name in plan.auxiliary]
    return loading_of(plan.config, beside, plan.output.format.dtype)


def loading_of_pipeline(plan: DiffusersPlan[Any]) -> Loading:
    """Returns how a diffusers pipeline is loaded, in the dtype of what the plan changes in it."""
    for submodel in plan.submodels.values():
        if submodel.changes_weights():
            return diffusers_loading(plan.class_name, submodel.output.format.dtype)
    return diffusers_loading(plan.class_name, "bfloat16")


def _auto_class(architecture: str, config: Mapping[str, Any]) -> str | None:
    if architecture.endswith("ForConditionalGeneration"):
        if "num_mel_bins" in config:
            return "AutoModelForSpeechSeq2Seq"
        if config.get("is_encoder_decoder") is True and "vision_config" not in config:
            return "AutoModelForSeq2SeqLM"
        return "AutoModelForImageTextToText"
    named = architecture.replace("LMHeadModel", "ForCausalLM")
    base = "AutoModel" if named.endswith("Model") else None
    known = next((f"AutoModel{task}" for task in _TASKS if named.endswith(task)), base)
    return known or (
        architecture if architecture.isidentifier() and architecture.isascii() else None
    )


def gpu_bytes(stored: int) -> int:
    """An estimate of the GPU memory that loading so many bytes of tensors takes."""
    return stored + _CUDA_ITSELF


def advice(rows: Iterable[PlanRow]) -> str:
    """Why a result has many bits per parameter, and what would change that; empty if it has not."""
    rows = list(rows)
    parameters = sum(row.parameters for row in rows)
    stored = sum(row.bytes_after for row in rows)
    kept = [row for row in rows if row.action not in ("pack", "stay")]
    kept_bytes = sum(row.bytes_after for row in kept)
    if 8 * stored <= _MANY_BITS * parameters or 2 * kept_bytes <= stored:
        return ""
    largest = max(kept, key=lambda row: row.bytes_after)
    text = (
        f"{_millions(sum(row.parameters for row in kept))} of {_millions(parameters)} parameters "
        f"are not packed "
        f"and take {size(kept_bytes)} of {size(stored)}, "
        f"most of it {largest.name} ({largest.reason})"
    )
    wide = (
        sum(row.bytes_after for row in kept if row.dtype in ("F32", "F64") and row.action == "copy")
        // 2
    )
    if 5 * wide < stored:
        return text
    narrow = 8 * (stored - wide) / parameters
    return f"{text}; --dtype bfloat16 would store them in 16 bits and give {narrow:.2f} bits per parameter"


def _millions(count: int) -> str:
    return f"{count / 10**9:.2f} B" if count >= 10**9 else f"{count / 10**6:.1f} M"
