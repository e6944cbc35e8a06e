"""nf4conv: Hugging Face checkpoints to 4-bit bitsandbytes NF4/FP4 and back, streamed, bit-exact and verified."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nf4conv.codec.ops import dequantize_4bit, quantize_4bit
    from nf4conv.codec.quant_state import QuantState
    from nf4conv.compare import compare_checkpoints, execute_comparison, plan_comparison
    from nf4conv.dequantize import dequantize_checkpoint, execute_dequantization, plan_dequantization
    from nf4conv.errors import Nf4convError
    from nf4conv.options import CompareOptions, DequantizeOptions, QuantizeOptions, RunOptions
    from nf4conv.quantize import execute_plan, plan_quantization, quantize_checkpoint

__version__ = "0.1.0"

__all__ = [
    "CompareOptions",
    "DequantizeOptions",
    "Nf4convError",
    "QuantState",
    "QuantizeOptions",
    "RunOptions",
    "compare_checkpoints",
    "dequantize_4bit",
    "dequantize_checkpoint",
    "execute_comparison",
    "execute_dequantization",
    "execute_plan",
    "plan_comparison",
    "plan_dequantization",
    "plan_quantization",
    "quantize_4bit",
    "quantize_checkpoint",
]

# Where each public name lives. They are looked up on first use: importing nf4conv must not import torch, which takes
# seconds, for the sake of `nf4conv --help` and of plans.
_HOMES = {
    "CompareOptions": "nf4conv.options",
    "DequantizeOptions": "nf4conv.options",
    "Nf4convError": "nf4conv.errors",
    "QuantState": "nf4conv.codec.quant_state",
    "QuantizeOptions": "nf4conv.options",
    "RunOptions": "nf4conv.options",
    "compare_checkpoints": "nf4conv.compare",
    "dequantize_4bit": "nf4conv.codec.ops",
    "dequantize_checkpoint": "nf4conv.dequantize",
    "execute_comparison": "nf4conv.compare",
    "execute_dequantization": "nf4conv.dequantize",
    "execute_plan": "nf4conv.quantize",
    "plan_comparison": "nf4conv.compare",
    "plan_dequantization": "nf4conv.dequantize",
    "plan_quantization": "nf4conv.quantize",
    "quantize_4bit": "nf4conv.codec.ops",
    "quantize_checkpoint": "nf4conv.quantize",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'nf4conv' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
