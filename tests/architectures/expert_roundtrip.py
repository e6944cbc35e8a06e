"""Loads a mixture with its experts in 4 bits, and the same mixture with the experts decoded."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tiny import save_tiny, tiny_inputs
from transformers import PreTrainedModel

import nf4conv

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
"""How transformers computes experts."""


@dataclass(frozen=True)
class Mixture:
    """One mixture, read three times by transformers.

    Attributes:
        packed: from our output.
        decoded: what `nf4conv dequantize` makes of our output; in plain transformers.
        original: the source.
    """

    packed: PreTrainedModel
    decoded: PreTrainedModel
    original: PreTrainedModel


def load_mixture(architecture: str, folder: Path) -> Mixture:
    """Makes a tiny mixture, packs its experts, and loads the result."""
    source, out, decoded = save_tiny(architecture, folder), folder / "out", folder / "decoded"
    nf4conv.quantize(source, out, moe="packed")
    nf4conv.dequantize(out, decoded)
    model_class = getattr(transformers, architecture)
    models = [
        model_class.from_pretrained(path, dtype=torch.bfloat16).eval()
        for path in (out, decoded, source)
    ]
    return Mixture(*models)


def expert_weights(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters that hold the weights of experts: those of three dimensions.

    Shared ones are named as often as they are there.
    """
    return {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.dim() == 3 and ".experts." in f".{name}"
    }


def decode_experts(mixture: Mixture) -> None:
    """Puts the decoded experts into the packed model; everything else in it stays packed."""
    for name, weight in expert_weights(mixture.decoded).items():
        path, _, leaf = name.rpartition(".")
        setattr(mixture.packed.get_submodule(path), leaf, weight)


def each_implementation(model: PreTrainedModel) -> Iterator[str]:
    """Sets every implementation of experts that the model knows, one after the other."""
    parts = [
        part
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and part._can_set_experts_implementation()
    ]
    if not parts:
        yield "eager"
        return
    for implementation in IMPLEMENTATIONS:
        for part in parts:
            part.set_experts_implementation(implementation)
        yield implementation


def can_generate(model: PreTrainedModel) -> bool:
    """Returns whether words are all that the model needs to write more of them."""
    return model.can_generate() and model.main_input_name == "input_ids"


def generate(model: PreTrainedModel) -> torch.Tensor:
    """Returns the words and the four that the model finds most likely after them."""
    words = tiny_inputs(model)["input_ids"][:, :8]
    return model.generate(words, max_new_tokens=4, min_new_tokens=4, do_sample=False)
