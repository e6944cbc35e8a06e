"""Says how a result is loaded."""

import json
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from nf4conv.models.config import architecture_of
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.writing import WritingPlan

_TASKS: Final = (
    "ForCausalLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMaskedLM",
    "ForImageClassification",
)
"""Ends of architectures for which transformers has an auto class of the same end."""

_AUTOMATIC: Final = ', dtype="auto", device_map="auto"'
"""Arguments for transformers. Without the first, transformers 4 computes in float16."""

_PACKAGES: Final = {
    "transformers": ('"transformers>=4.57"', "accelerate"),
    "sentence-transformers": ("sentence-transformers", "accelerate"),
    "diffusers": ("diffusers", "transformers", "accelerate"),
}
"""What a library needs to be installed with, as a shell reads it. Releases of transformers before
4.57 do not know `dtype`, or want all tensors of a weight in one shard.
"""

_WITH_EXPERTS: Final = '"transformers>=5.8"'
"""The releases of transformers into which nf4conv brings 4-bit experts."""


@dataclass(frozen=True)
class Loading:
    """Python code that loads a checkpoint.

    Attributes:
        library: the library, as the Hub spells it.
        class_name: the class of the library.
        arguments: what follows the path in the call, with its comma.
        method: the method that is called, with its dot. Empty to call the class.
        variable: the variable that gets the result.
        needs_nf4conv: True if the library loads the checkpoint only with nf4conv installed.
        is_packed: True if weights are in 4 bits.
    """

    library: str
    class_name: str
    arguments: str = _AUTOMATIC
    method: str = ".from_pretrained"
    variable: str = "model"
    needs_nf4conv: bool = False
    is_packed: bool = True

    @property
    def install(self) -> str:
        """Returns the command that installs what the code needs."""
        packages = list(_PACKAGES[self.library])
        if self.needs_nf4conv:
            packages = ["nf4conv", _WITH_EXPERTS, "accelerate"]
        if self.is_packed:
            packages.append("bitsandbytes")
        return f"pip install {' '.join(packages)}"

    def imports(self) -> list[str]:
        """Returns the lines that import what the call needs.

        Without nf4conv, some releases of transformers load 4-bit experts as random ones and only
        warn. The import fails there.
        """
        lines = []
        if self.needs_nf4conv:
            lines.append("import nf4conv.inference.moe")
        if "torch." in self.arguments:
            lines.append("import torch")
        lines.append(f"from {self.library.replace('-', '_')} import {self.class_name}")
        return lines

    def call(self, place: str) -> str:
        """Returns the call, given a path or a name on the Hub."""
        quoted = json.dumps(place, ensure_ascii=False)
        return f"{self.variable} = {self.class_name}{self.method}({quoted}{self.arguments})"

    def code(self, place: str) -> str:
        """Returns all lines, given a path or a name on the Hub."""
        return "\n".join([*self.imports(), self.call(place)])


def loading_of(
    config: Mapping[str, Any] | None, beside: Collection[str], dtype: str
) -> Loading | None:
    """Finds out how to load a checkpoint, given the names beside its weights; None if nothing says.

    `dtype` is that of the tensors that are not packed, such as "bfloat16".
    """
    if config is None:
        return None
    trusted = ", trust_remote_code=True" if "auto_map" in config else ""
    if "modules.json" in beside:
        arguments = f', model_kwargs={{"dtype": "auto"}}{trusted}'
        return Loading("sentence-transformers", "SentenceTransformer", arguments, "")
    class_name = config.get("_class_name")
    if isinstance(class_name, str) and class_name.isidentifier():
        return diffusers_loading(class_name, dtype)
    auto_class = _auto_class(architecture_of(config), config)
    if auto_class is None:
        return None
    return Loading("transformers", auto_class, f"{_AUTOMATIC}{trusted}")


def diffusers_loading(class_name: str, dtype: str) -> Loading:
    """Returns how to load a diffusers pipeline, or one of its submodels."""
    variable = "pipeline" if class_name.endswith("Pipeline") else "model"
    arguments = f", torch_dtype=torch.{dtype}"
    return Loading("diffusers", class_name, arguments, variable=variable)


def loading_of_plan(plan: WritingPlan | DiffusersPlan) -> Loading | None:
    """Returns how the result of a plan is loaded; None if nothing says how, or nothing loads it.

    A diffusers pipeline is loaded in the dtype of what the plan changes in it.
    """
    if isinstance(plan, DiffusersPlan):
        dtypes = []
        for part in plan.parts:
            totals = part.totals
            if totals.packed or totals.decoded:
                dtypes.append(part.output.format.dtype)
        return diffusers_loading(plan.class_name, dtypes[0] if dtypes else "bfloat16")
    beside = [str(name) for name in plan.source.auxiliary]
    loading = loading_of(plan.config, beside, plan.output.format.dtype)
    if loading is None:
        return None
    loading = replace(loading, is_packed=bool(plan.weights))
    if plan.readers is None:
        return loading
    return replace(loading, needs_nf4conv=True)


def _auto_class(architecture: str, config: Mapping[str, Any]) -> str | None:
    """Finds the class of transformers that loads an architecture; None if its name is no name."""
    if architecture.endswith("ForConditionalGeneration"):
        if "num_mel_bins" in config:
            return "AutoModelForSpeechSeq2Seq"
        if config.get("is_encoder_decoder") is True and "vision_config" not in config:
            return "AutoModelForSeq2SeqLM"
        return "AutoModelForImageTextToText"
    named = architecture.replace("LMHeadModel", "ForCausalLM")
    for task in _TASKS:
        if named.endswith(task):
            return f"AutoModel{task}"
    if named.endswith("Model"):
        return "AutoModel"
    if architecture.isidentifier() and architecture.isascii():
        return architecture
    return None


def push_command(out: Path) -> str:
    """Returns the command that pushes a result, for the user to complete."""
    name = re.sub(r"[^A-Za-z0-9_.]+|\.{2,}", "-", out.resolve().name).strip("-.") or "model"
    words = ["hf", "upload", f"YOUR_NAME/{name}", str(out), "."]
    return " ".join(map(shlex.quote, words))
