"""Packs the experts of a 16-bit model while transformers loads it (NF4CONV_MOE=quantize).

transformers' `load_in_4bit=True` packs layers, and leaves experts in 16 bits. With this they get
what `nf4conv quantize --moe packed` writes, byte for byte: gate, up and down of each expert are
packed alone.

Imports transformers, and is imported when it is loading a checkpoint.
"""

from typing import Any, Final

import torch
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.quantizers_utils import should_convert_module

from nf4conv.codec.ops import quantize_4bit
from nf4conv.inference.experts import PackedExperts, stack_experts
from nf4conv.inference.moe.loading.operations import has_transposed_experts
from nf4conv.inference.moe.tensor import Experts4bit
from nf4conv.inference.moe.weight import ALTERNATING, AS_STORED, PackedWeight

BLOCKSIZE: Final = 64  # transformers' only one


class ExpertsQuantize(ConversionOps):
    """Packs stacks of experts, and leaves other weights to transformers.

    Attributes:
        operation: transformers' own operation, which converts all other weights.
        hf_quantizer: transformers' quantizer; `_nf4conv.parameters` names the stacks.
    """

    def __init__(self, operation: Any) -> None:
        self.operation = operation
        self.hf_quantizer = operation.hf_quantizer

    def convert(self, input_dict: dict[str, Any], model: Any = None, **kwargs: Any) -> Any:
        """Returns packed weights by their names.

        Args:
            input_dict: 16-bit weights by the names of parameters, or lists of one.
            model: the model that has these parameters.
            **kwargs: what transformers' own operation wants besides.
        """
        stacks = self.hf_quantizer._nf4conv.parameters
        config = self.hf_quantizer.quantization_config
        result: dict[str, Any] = {}
        others = {}
        for name, value in input_dict.items():
            if name not in stacks:
                others[name] = value
                continue
            stack = value[0] if isinstance(value, list) else value
            path = name.rpartition(".")[0]
            packed = pack_stack(stack, name, model.get_submodule(path), config)
            result[name] = torch.nn.Parameter(packed, requires_grad=False)
        if others:
            result.update(self.operation.convert(others, model=model, **kwargs))
        return result


def pack_stack(stack: torch.Tensor, name: str, module: Any, config: Any) -> Experts4bit:
    """Packs a stack of experts.

    Args:
        stack: [E, rows, columns].
        name: the name of the parameter.
        module: the layer of experts that it belongs to.
        config: transformers' BitsAndBytesConfig.
    """
    is_transposed = has_transposed_experts(module)
    matrices = stack
    if is_transposed:
        matrices = stack.transpose(1, 2)
    shares = [matrices]
    rows = AS_STORED
    if name.endswith("gate_up_proj"):
        if getattr(module, "is_concatenated", True):
            shares = list(matrices.chunk(2, 1))
        else:
            shares = [matrices[:, 0::2], matrices[:, 1::2]]
            rows = ALTERNATING
    parts = tuple(_pack_part(share, config) for share in shares)
    weight = PackedWeight(parts, rows, is_transposed)
    return Experts4bit(weight, stack.dtype)


def _pack_part(matrices: torch.Tensor, config: Any) -> PackedExperts:
    """Packs one projection of all experts, each alone."""
    packed = []
    states = []
    for matrix in matrices:
        codes, state = quantize_4bit(
            matrix.contiguous(),
            quant_type=config.bnb_4bit_quant_type,
            blocksize=BLOCKSIZE,
            double_quant=config.bnb_4bit_use_double_quant,
        )
        packed.append(codes)
        states.append(state)
    return stack_experts(packed, states)


def stacks_to_pack(parameters: list[str], skipped: list[str] | None) -> set[str]:
    """Returns which stacks of experts are packed: those that the skip list does not name."""
    return {name for name in parameters if should_convert_module(name.rpartition(".")[0], skipped)}
