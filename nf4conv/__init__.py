"""nf4conv: Hugging Face checkpoints to 4-bit bitsandbytes NF4/FP4 and back, streamed, bit-exact and verified."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nf4conv.codec.ops import dequantize_4bit, quantize_4bit
    from nf4conv.codec.quant_state import QuantState
    from nf4conv.commands.compare import compare_checkpoints, execute_comparison, plan_comparison
    from nf4conv.commands.dequantize import dequantize_checkpoint, execute_dequantization, plan_dequantization
    from nf4conv.commands.inspect import inspect_checkpoint
    from nf4conv.commands.quantize import execute_quantization, plan_quantization, quantize_checkpoint, second_opinion
    from nf4conv.commands.verify import execute_verification, plan_verification, verify_checkpoint
    from nf4conv.errors import CodecError, Nf4convError, OutputError, PlanError, SourceError, VerificationError
    from nf4conv.options import (
        CompareOptions,
        DequantizeOptions,
        PushOptions,
        QuantizeOptions,
        RunOptions,
        SourceOptions,
        VerifyOptions,
    )
    from nf4conv.report.page import write_json, write_page
    from nf4conv.report.results import ComparisonReport, DequantizeReport, Inspection, QuantizeReport, VerifyReport

__version__ = "0.1.0"

__all__ = [
    "CodecError",
    "CompareOptions",
    "ComparisonReport",
    "DequantizeOptions",
    "DequantizeReport",
    "Inspection",
    "Nf4convError",
    "OutputError",
    "PlanError",
    "PushOptions",
    "QuantState",
    "QuantizeOptions",
    "QuantizeReport",
    "RunOptions",
    "SourceError",
    "SourceOptions",
    "VerificationError",
    "VerifyOptions",
    "VerifyReport",
    "compare_checkpoints",
    "dequantize_4bit",
    "dequantize_checkpoint",
    "execute_comparison",
    "execute_dequantization",
    "execute_quantization",
    "execute_verification",
    "inspect_checkpoint",
    "plan_comparison",
    "plan_dequantization",
    "plan_quantization",
    "plan_verification",
    "quantize_4bit",
    "quantize_checkpoint",
    "second_opinion",
    "verify_checkpoint",
    "write_json",
    "write_page",
]

# Public names, by the module they live in. They are looked up on first use: importing nf4conv must not import torch,
# which takes seconds, for the sake of `nf4conv --help` and of plans.
_HOMES = {
    "codec.ops": "dequantize_4bit quantize_4bit",
    "codec.quant_state": "QuantState",
    "commands.compare": "compare_checkpoints execute_comparison plan_comparison",
    "commands.dequantize": "dequantize_checkpoint execute_dequantization plan_dequantization",
    "commands.inspect": "inspect_checkpoint",
    "commands.quantize": "execute_quantization plan_quantization quantize_checkpoint second_opinion",
    "commands.verify": "execute_verification plan_verification verify_checkpoint",
    "errors": "CodecError Nf4convError OutputError PlanError SourceError VerificationError",
    "options": "CompareOptions DequantizeOptions PushOptions QuantizeOptions RunOptions SourceOptions VerifyOptions",
    "report.page": "write_json write_page",
    "report.results": "ComparisonReport DequantizeReport Inspection QuantizeReport VerifyReport",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'nf4conv' has no attribute {name!r}")
    return getattr(importlib.import_module(f"nf4conv.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
