"""Tiny mixtures with packed experts, their twins with decoded experts, and steps of training."""

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapters import INPUT, load, make_model
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nf4conv
from nf4conv.inference.moe.tensor import Experts4bit

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
KINDS = {
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4},
    "GptOssForCausalLM": {"num_local_experts": 4},
}
"""Two orientations: gpt-oss transposes its experts, and mixes the rows of gate and up."""

TARGETS = {
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
# transformers 5.8.1 cannot train in batched_mm, with experts in 16 bits either
CANNOT_BATCH = transformers.__version__ == "5.8.1"
IMPLEMENTATIONS = (
    "eager",
    pytest.param("batched_mm", marks=pytest.mark.skipif(CANNOT_BATCH, reason="transformers 5.8.1")),
    "grouped_mm",
)


def make_mixture(
    kind: str, folder: Path, moe: str = "packed", *, quant_storage: str = "uint8", **changes: Any
) -> Path:
    """Returns a checkpoint with packed experts."""
    sizes = {**SIZES, **KINDS[kind], **changes}
    make_model(folder / "source", kind, torch.bfloat16, **sizes)
    options = {"moe": moe, "quant_storage": quant_storage}
    nf4conv.quantize(folder / "source", folder / "out", **options, device="cpu")
    return folder / "out"


def load_mixture(folder: Path, implementation: str = "grouped_mm", **options: Any) -> Any:
    """Returns the model, whose experts are packed."""
    model = load(
        folder, dtype=torch.bfloat16, experts_implementation=implementation, **options
    ).train()
    assert packed_experts(model)
    return model


def packed_experts(model: torch.nn.Module) -> dict[str, Experts4bit]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if isinstance(parameter, Experts4bit)
    }


def decode_experts(model: torch.nn.Module) -> None:
    """Puts plain weights into the place of packed experts."""
    for name, weight in packed_experts(model).items():
        path, _, leaf = name.rpartition(".")
        decoded = weight.decoded().detach()
        setattr(model.get_submodule(path), leaf, torch.nn.Parameter(decoded, requires_grad=False))


def prepare(model: Any, kbit: bool, checkpointing: bool) -> Any:
    """Prepares it as scripts of QLoRA do."""
    if kbit:
        return prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return model


def adapt(model: Any, **config: Any) -> Any:
    """Adds LoRA to experts and attention. No factor is zero."""
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(
            model,
            LoraConfig(
                **{"r": 4, "lora_alpha": 8, "init_lora_weights": False, **TARGETS, **config}
            ),
        )


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: part for name, part in model.named_parameters() if part.requires_grad}


def train(model: Any, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the losses of some steps, and the gradients of the first."""
    parameters = trained_parameters(model)
    ids = INPUT.to(next(iter(parameters.values())).device)
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.01)
    losses, gradients = [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if not gradients:
            gradients = {name: part.grad.clone() for name, part in parameters.items()}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, until nothing holds them any more.

    Attributes:
        live: bytes now.
        peak: the most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Experts4bit):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@contextmanager
def saved_for_backward() -> Iterator[list[torch.Tensor]]:
    """Collects every tensor that autograd keeps for a backward pass."""
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
