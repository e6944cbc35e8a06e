"""Says how a result is loaded: the code, and the GPU memory that it takes."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
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

_CUDA_ITSELF: Final = 5 * 10**8
"""Bytes of GPU memory that CUDA and its libraries take, roughly, before a weight is loaded."""


@dataclass(frozen=True)
class Loading:
    """Python code that loads a checkpoint.

    Attributes:
        library: the library, as the Hub spells it.
        class_name: the class of the library.
        arguments: what follows the path in the call, with its comma.
        method: the method that is called, with its dot. Empty to call the class.
        needs_nf4conv: True if the library loads the checkpoint only with nf4conv installed.
    """

    library: str
    class_name: str
    arguments: str = ', device_map="auto"'
    method: str = ".from_pretrained"
    needs_nf4conv: bool = False

    @property
    def install(self) -> str:
        """Returns the command that installs what the code needs."""
        if self.needs_nf4conv:
            return f"pip install nf4conv {self.library} accelerate bitsandbytes"
        return f"pip install {self.library} bitsandbytes"

    def imports(self) -> str:
        """Returns the lines that import what the call needs."""
        package = self.library.replace("-", "_")
        if self.needs_nf4conv:
            return f"# {self.install}\nfrom {package} import {self.class_name}"
        line = f"from {package} import {self.class_name}  # {self.install}"
        if "torch." in self.arguments:
            return f"import torch\n{line}"
        return line

    def code(self, place: str) -> str:
        """Returns the call, below a comment that says what to install if that is not usual.

        Args:
            place: a path or a name on the Hub.
        """
        if self.needs_nf4conv:
            return f"# {self.install}\n{self.call(place)}"
        return self.call(place)

    def call(self, place: str) -> str:
        """Returns the call, given a path or a name on the Hub."""
        quoted = json.dumps(place, ensure_ascii=False)
        return f"{self.class_name}{self.method}({quoted}{self.arguments})"


def loading_of(
    config: Mapping[str, Any] | None, beside: Collection[str], dtype: str
) -> Loading | None:
    """Finds out how to load a checkpoint.

    Args:
        config: the content of its config.json. None if it has none.
        beside: the names of the files beside the weights.
        dtype: the dtype of the tensors that are not packed, such as "bfloat16".

    Returns:
        The code; None if nothing says which class loads it.
    """
    if config is None:
        return None
    trusted = ", trust_remote_code=True" if "auto_map" in config else ""
    if "modules.json" in beside:
        return Loading("sentence-transformers", "SentenceTransformer", trusted, "")
    class_name = config.get("_class_name")
    if isinstance(class_name, str) and class_name.isidentifier():
        return diffusers_loading(class_name, dtype)
    auto_class = _auto_class(architecture_of(config), config)
    if auto_class is None:
        return None
    return Loading("transformers", auto_class, f', device_map="auto"{trusted}')


def diffusers_loading(class_name: str, dtype: str) -> Loading:
    """Returns how to load a diffusers pipeline, or one of its submodels.

    Args:
        class_name: its class, such as "FluxPipeline".
        dtype: the dtype of the tensors that are not packed, such as "bfloat16".
    """
    return Loading("diffusers", class_name, f", torch_dtype=torch.{dtype}")


def loading_of_plan(plan: WritingPlan) -> Loading | None:
    """Returns how the result of a plan is loaded; None if nothing says how, or nothing loads it."""
    beside = [str(name) for name in plan.auxiliary]
    loading = loading_of(plan.config, beside, plan.output.format.dtype)
    if loading is None or plan.readers is None:
        return loading
    return replace(loading, needs_nf4conv=True) if plan.readers.has_loader else None


def loading_of_pipeline(plan: DiffusersPlan[Any]) -> Loading:
    """Returns how a diffusers pipeline is loaded, in the dtype of what the plan changes in it."""
    for submodel in plan.submodels.values():
        if submodel.changes_weights():
            return diffusers_loading(plan.class_name, submodel.output.format.dtype)
    return diffusers_loading(plan.class_name, "bfloat16")


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


def gpu_bytes(stored: int) -> int:
    """Estimates the GPU memory, in bytes, that loading `stored` bytes of tensors takes."""
    return stored + _CUDA_ITSELF
