"""nf4conv: Hugging Face checkpoints to 4-bit bitsandbytes NF4/FP4 and back, streamed, bit-exact and verified."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # "as" tells type checkers that a name is public
    from nf4conv.codec.ops import dequantize_4bit as dequantize_4bit
    from nf4conv.codec.ops import quantize_4bit as quantize_4bit
    from nf4conv.codec.quant_state import QuantState as QuantState
    from nf4conv.commands.compare import compare_checkpoints as compare_checkpoints
    from nf4conv.commands.compare import execute_comparison as execute_comparison
    from nf4conv.commands.compare import plan_comparison as plan_comparison
    from nf4conv.commands.dequantize import dequantize_checkpoint as dequantize_checkpoint
    from nf4conv.commands.dequantize import execute_dequantization as execute_dequantization
    from nf4conv.commands.dequantize import plan_dequantization as plan_dequantization
    from nf4conv.commands.inspect import inspect_checkpoint as inspect_checkpoint
    from nf4conv.commands.quantize import execute_quantization as execute_quantization
    from nf4conv.commands.quantize import plan_quantization as plan_quantization
    from nf4conv.commands.quantize import quantize_checkpoint as quantize_checkpoint
    from nf4conv.commands.quantize import second_opinion as second_opinion
    from nf4conv.commands.verify import execute_verification as execute_verification
    from nf4conv.commands.verify import plan_verification as plan_verification
    from nf4conv.commands.verify import verify_checkpoint as verify_checkpoint
    from nf4conv.errors import CodecError as CodecError
    from nf4conv.errors import Nf4convError as Nf4convError
    from nf4conv.errors import OutputError as OutputError
    from nf4conv.errors import PlanError as PlanError
    from nf4conv.errors import SourceError as SourceError
    from nf4conv.errors import VerificationError as VerificationError
    from nf4conv.options import CompareOptions as CompareOptions
    from nf4conv.options import DequantizeOptions as DequantizeOptions
    from nf4conv.options import PushOptions as PushOptions
    from nf4conv.options import QuantizeOptions as QuantizeOptions
    from nf4conv.options import RunOptions as RunOptions
    from nf4conv.options import SourceOptions as SourceOptions
    from nf4conv.options import VerifyOptions as VerifyOptions
    from nf4conv.report.page import write_json as write_json
    from nf4conv.report.page import write_page as write_page
    from nf4conv.report.results import ComparisonReport as ComparisonReport
    from nf4conv.report.results import DequantizeReport as DequantizeReport
    from nf4conv.report.results import Inspection as Inspection
    from nf4conv.report.results import QuantizeReport as QuantizeReport
    from nf4conv.report.results import VerifyReport as VerifyReport

__version__ = "0.1.0"

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

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'nf4conv' has no attribute {name!r}")
    return getattr(importlib.import_module(f"nf4conv.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
