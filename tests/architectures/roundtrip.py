"""Shows for an architecture that our checkpoint is the model that transformers quantizes itself."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import bitsandbytes
import torch
import transformers
from skeleton import Skeleton, read_skeleton
from tiny import save_tiny, tiny_config
from transformers import BitsAndBytesConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

import nf4conv
from nf4conv.choose.decisions import Keep, Pack, Selection
from nf4conv.choose.loader_rules import transformers_4, transformers_5, transformers_5_0
from nf4conv.choose.selection import select
from nf4conv.options import QuantizeOptions
from nf4conv.sources.opening import open_source

UNKNOWN = "unknown to it"
UNREADABLE = "cannot read the source either"


@dataclass(frozen=True)
class Roundtrip:
    """Two 4-bit models of one source.

    Attributes:
        ours: read from our output.
        theirs: quantized by transformers on the fly, with our skip list.
        original: of the source, not quantized.
    """

    ours: "transformers.PreTrainedModel"
    theirs: "transformers.PreTrainedModel"
    original: "transformers.PreTrainedModel"


@dataclass(frozen=True)
class Modules:
    """The modules that are packed, by their paths in memory.

    Attributes:
        ours: by us.
        theirs: by transformers, left to its own list.
        linear: all that transformers could pack.
        reasons: of those that we keep, why.
    """

    ours: frozenset[str]
    theirs: frozenset[str]
    linear: frozenset[str]
    reasons: dict[str, str]

    @property
    def differences(self) -> dict[str, str]:
        """Returns the modules that transformers packs and we keep, with our reasons."""
        return {
            path: self.reasons.get(path, "not on disk under its own name")
            for path in self.theirs - self.ours
        }


def quantize_both_ways(architecture: str, folder: Path) -> Roundtrip:
    source, out = save_tiny(architecture, folder), folder / "out"
    # the CPU's nested codes are not CUDA's
    nf4conv.quantize(source, out, double_quant=False, moe="portable")
    model_class = getattr(transformers, architecture)
    ours = model_class.from_pretrained(out, dtype=torch.bfloat16)
    method = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=ours.config.quantization_config.llm_int8_skip_modules,
    )
    theirs = model_class.from_pretrained(source, quantization_config=method, dtype=torch.bfloat16)
    original = model_class.from_pretrained(source, dtype=torch.bfloat16)
    return Roundtrip(ours.eval(), theirs.eval(), original.eval())


def packed_weights(
    model: "transformers.PreTrainedModel",
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Module path → packed codes and absmax."""
    return {
        path: (module.weight.data.view(-1), module.weight.quant_state.absmax)
        for path, module in model.named_modules()
        if isinstance(module, bitsandbytes.nn.Linear4bit)
    }


def resemblance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Correlation of two outputs; 1 when there is nothing to correlate."""
    if one.numel() == 1 or not one.float().std():
        return 1.0
    return float(
        torch.corrcoef(torch.stack([one.float().flatten(), other.float().flatten()]))[0, 1]
    )


def compare_modules(architecture: str, source: Path) -> Modules:
    """Hold our selection against what transformers would replace in the same model."""
    opened = open_source(source)
    assert opened.config is not None
    selection = select(opened.tensors, opened.config, QuantizeOptions(moe="portable"))
    skeleton = read_skeleton([tensor.name for tensor in opened.tensors], opened.config)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(tiny_config(architecture))
    own_list = get_keys_to_not_convert(model)
    theirs = frozenset(path for path in skeleton.linear if should_convert_module(path, own_list))
    return Modules(
        _packed_paths(selection, skeleton), theirs, skeleton.linear, _reasons(selection, skeleton)
    )


def other_classes(architecture: str) -> list[str]:
    """Classes that load the checkpoints of a class too: the model without its head, and with one to
    classify.
    """
    model_type = getattr(transformers, architecture).config_class.model_type
    found = [
        names.get(model_type)
        for names in (MODEL_MAPPING_NAMES, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    ]
    return [
        name
        for name in found
        if isinstance(name, str) and name != architecture and hasattr(transformers, name)
    ]


def mistaken_modules(source: Path, other: str) -> list[str]:
    """Linear modules of another class that are packed and skipped, or on disk and neither."""
    opened = open_source(source)
    assert opened.config is not None
    selection = select(opened.tensors, opened.config, QuantizeOptions(moe="portable"))
    skeleton = read_skeleton(
        [tensor.name for tensor in opened.tensors], {**opened.config, "architectures": [other]}
    )
    packed = {
        skeleton.modules[name]
        for name, decision in selection.decisions.items()
        if isinstance(decision, Pack) and name in skeleton.modules
    }
    rules = [
        rule(selection.skip_modules) for rule in (transformers_4, transformers_5, transformers_5_0)
    ]
    on_disk = skeleton.linear & set(skeleton.modules.values())
    return sorted(
        path
        for path in on_disk
        if any(is_skipped(path) == (path in packed) for is_skipped in rules)
    )


def _packed_paths(selection: Selection, skeleton: Skeleton) -> frozenset[str]:
    return frozenset(
        skeleton.modules.get(name, name)
        for name, decision in selection.decisions.items()
        if isinstance(decision, Pack)
    )


def _reasons(selection: Selection, skeleton: Skeleton) -> dict[str, str]:
    return {
        skeleton.modules[name]: decision.reason
        for name, decision in selection.decisions.items()
        if isinstance(decision, Keep) and name in skeleton.modules
    }


def ask_transformers(
    python: Path | str, command: str, folder: Path, *architectures: str
) -> dict[str, str]:
    """Returns what in_another_transformers.py answers: architecture → "ok", UNKNOWN, UNREADABLE, or
    the error.
    """
    script = Path(__file__).with_name("in_another_transformers.py")
    arguments = [python, "-W", "ignore", script, command, folder, *architectures]
    answer = subprocess.run(arguments, check=True, stdout=subprocess.PIPE)
    found: dict[str, str] = json.loads(answer.stdout.splitlines()[-1])  # libraries print too
    return found
