"""Small mixtures of experts, built by transformers, and the weights of their single experts."""

import re
from collections.abc import Iterator

import torch
import transformers
from tiny import default_dtype, tiny_config

WITH_EXPERTS: dict[str, dict[str, object]] = {
    "Gemma4ForCausalLM": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 128,
    },
    "Step3p7ForConditionalGeneration": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
}
"""Settings without which a model has no experts."""

Place = tuple[int, int, str]
"""(layer, expert, projection)."""


def build(architecture: str) -> transformers.PreTrainedModel:
    """Returns a random model in bfloat16, the same on every call."""
    config = tiny_config(architecture)
    for name, value in WITH_EXPERTS.get(architecture, {}).items():
        part = getattr(config, name) if isinstance(value, dict) else config
        for key, one in value.items() if isinstance(value, dict) else [(name, value)]:
            setattr(part, key, one)
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    with default_dtype(torch.bfloat16):
        model = model_class(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(std=0.02)
    return model


def single_experts(model: transformers.PreTrainedModel) -> Iterator[tuple[Place, torch.Tensor]]:
    """Yields the weight of each projection of each expert, [out, in], as the model computes."""
    for path, module in model.named_modules():
        layer = re.search(r"(?:layers|blocks)\.(\d+)\.", path)
        if layer is None:
            continue
        if not isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter):
            continue
        for (expert, projection), weight in _of_stacks(module):
            yield (int(layer[1]), expert, projection), weight.detach().contiguous()


Weights = Iterator[tuple[tuple[int, str], torch.Tensor]]
"""(expert, projection) and the weight, [out, in]."""


def _of_stacks(module: torch.nn.Module) -> Weights:
    """As transformers/integrations/moe.py reads the flags of the module."""
    is_transposed = getattr(module, "is_transposed", False)
    if type(module).__name__ == "Llama4TextExperts":
        is_transposed = True
    for expert, down in enumerate(module.down_proj):
        both = module.gate_up_proj[expert]
        if is_transposed:
            both = both.t()
            down = down.t()
        if getattr(module, "is_concatenated", True):
            gate, up = both.chunk(2)
        else:
            gate, up = both[::2], both[1::2]
        yield (expert, "gate_proj"), gate
        yield (expert, "up_proj"), up
        yield (expert, "down_proj"), down


_W: dict[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def place_of(name: str) -> Place | None:
    """Returns which weight of which expert a tensor of a packed checkpoint is, by its name."""
    match = re.search(r"(?:layers|blocks)\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight$", name)
    if match is None:
        return None
    return int(match[1]), int(match[2]), _W.get(match[3], match[3])
