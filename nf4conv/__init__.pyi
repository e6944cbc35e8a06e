"""For type checkers and editors: the names that __init__.py looks up on first use."""

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
from nf4conv.report.as_json import write_page as write_page
from nf4conv.report.results import ComparisonReport as ComparisonReport
from nf4conv.report.results import DequantizeReport as DequantizeReport
from nf4conv.report.results import Environment as Environment
from nf4conv.report.results import Evaluation as Evaluation
from nf4conv.report.results import FinishReport as FinishReport
from nf4conv.report.results import Inspection as Inspection
from nf4conv.report.results import PlanReport as PlanReport
from nf4conv.report.results import QuantizeReport as QuantizeReport
from nf4conv.report.results import VerifyReport as VerifyReport

__version__: str
__all__: list[str]
