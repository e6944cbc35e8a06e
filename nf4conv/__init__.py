"""Converts Hugging Face checkpoints to 4-bit bitsandbytes NF4/FP4 and back.

Streams the weights, writes the same bytes as bitsandbytes, and verifies them. The names below are
the public API; docs/python.md shows how to use them.
"""

import importlib
from typing import TYPE_CHECKING, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    # type checkers and editors read these imports; tests/test_layering.py holds the table to them
    from nf4conv.codec.linear import linear_4bit as linear_4bit
    from nf4conv.codec.linear import patch_linear_4bit as patch_linear_4bit
    from nf4conv.codec.ops import dequantize_4bit as dequantize_4bit
    from nf4conv.codec.ops import quantize_4bit as quantize_4bit
    from nf4conv.codec.quant_state import QuantState as QuantState
    from nf4conv.commands.compare import compare_checkpoints as compare_checkpoints
    from nf4conv.commands.compare import execute_comparison as execute_comparison
    from nf4conv.commands.compare import plan_comparison as plan_comparison
    from nf4conv.commands.dequantize import dequantize_checkpoint as dequantize_checkpoint
    from nf4conv.commands.dequantize import execute_dequantization as execute_dequantization
    from nf4conv.commands.dequantize import plan_dequantization as plan_dequantization
    from nf4conv.commands.describe import describe_plan as describe_plan
    from nf4conv.commands.environment import environment as environment
    from nf4conv.commands.evaluate import evaluate_checkpoint as evaluate_checkpoint
    from nf4conv.commands.evaluate import evaluate_checkpoints as evaluate_checkpoints
    from nf4conv.commands.finish import finish_checkpoint as finish_checkpoint
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
    from nf4conv.options import EvaluateOptions as EvaluateOptions
    from nf4conv.options import PushOptions as PushOptions
    from nf4conv.options import QuantizeOptions as QuantizeOptions
    from nf4conv.options import RunOptions as RunOptions
    from nf4conv.options import SourceOptions as SourceOptions
    from nf4conv.options import VerifyOptions as VerifyOptions
    from nf4conv.plan.parts import plan_part as plan_part
    from nf4conv.report.as_json import to_json as to_json
    from nf4conv.report.as_json import write_json as write_json
    from nf4conv.report.page import write_page as write_page
    from nf4conv.report.results.checks import ComparisonReport as ComparisonReport
    from nf4conv.report.results.checks import VerifyReport as VerifyReport
    from nf4conv.report.results.contents import Environment as Environment
    from nf4conv.report.results.contents import Evaluation as Evaluation
    from nf4conv.report.results.contents import Evaluations as Evaluations
    from nf4conv.report.results.contents import Inspection as Inspection
    from nf4conv.report.results.runs import DequantizeReport as DequantizeReport
    from nf4conv.report.results.runs import FinishReport as FinishReport
    from nf4conv.report.results.runs import PlanReport as PlanReport
    from nf4conv.report.results.runs import QuantizeReport as QuantizeReport

# The module of each public name. A name is imported when it is first used, because `nf4conv --help`
# and plans must not wait for torch, whose import takes seconds.
_MODULE_OF: Final = {
    "CodecError": "nf4conv.errors",
    "CompareOptions": "nf4conv.options",
    "ComparisonReport": "nf4conv.report.results.checks",
    "DequantizeOptions": "nf4conv.options",
    "DequantizeReport": "nf4conv.report.results.runs",
    "Environment": "nf4conv.report.results.contents",
    "EvaluateOptions": "nf4conv.options",
    "Evaluation": "nf4conv.report.results.contents",
    "Evaluations": "nf4conv.report.results.contents",
    "FinishReport": "nf4conv.report.results.runs",
    "Inspection": "nf4conv.report.results.contents",
    "Nf4convError": "nf4conv.errors",
    "OutputError": "nf4conv.errors",
    "PlanError": "nf4conv.errors",
    "PlanReport": "nf4conv.report.results.runs",
    "PushOptions": "nf4conv.options",
    "QuantState": "nf4conv.codec.quant_state",
    "QuantizeOptions": "nf4conv.options",
    "QuantizeReport": "nf4conv.report.results.runs",
    "RunOptions": "nf4conv.options",
    "SourceError": "nf4conv.errors",
    "SourceOptions": "nf4conv.options",
    "VerificationError": "nf4conv.errors",
    "VerifyOptions": "nf4conv.options",
    "VerifyReport": "nf4conv.report.results.checks",
    "compare_checkpoints": "nf4conv.commands.compare",
    "dequantize_4bit": "nf4conv.codec.ops",
    "dequantize_checkpoint": "nf4conv.commands.dequantize",
    "describe_plan": "nf4conv.commands.describe",
    "environment": "nf4conv.commands.environment",
    "evaluate_checkpoint": "nf4conv.commands.evaluate",
    "evaluate_checkpoints": "nf4conv.commands.evaluate",
    "execute_comparison": "nf4conv.commands.compare",
    "execute_dequantization": "nf4conv.commands.dequantize",
    "execute_quantization": "nf4conv.commands.quantize",
    "execute_verification": "nf4conv.commands.verify",
    "finish_checkpoint": "nf4conv.commands.finish",
    "inspect_checkpoint": "nf4conv.commands.inspect",
    "linear_4bit": "nf4conv.codec.linear",
    "patch_linear_4bit": "nf4conv.codec.linear",
    "plan_comparison": "nf4conv.commands.compare",
    "plan_dequantization": "nf4conv.commands.dequantize",
    "plan_part": "nf4conv.plan.parts",
    "plan_quantization": "nf4conv.commands.quantize",
    "plan_verification": "nf4conv.commands.verify",
    "quantize_4bit": "nf4conv.codec.ops",
    "quantize_checkpoint": "nf4conv.commands.quantize",
    "second_opinion": "nf4conv.commands.quantize",
    "to_json": "nf4conv.report.as_json",
    "verify_checkpoint": "nf4conv.commands.verify",
    "write_json": "nf4conv.report.as_json",
    "write_page": "nf4conv.report.page",
}

__all__ = sorted(_MODULE_OF)

if not TYPE_CHECKING:  # a type checker would take every misspelled name for one that this answers

    def __getattr__(name: str) -> object:
        """Imports a public name on its first use."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'nf4conv' has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
