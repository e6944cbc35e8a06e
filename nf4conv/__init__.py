"""Decodes any released 4- and 8-bit checkpoint to bfloat16; packs any to bitsandbytes NF4 or FP4.

Streams the weights, computes the same bits as the formats' own libraries, and verifies them:

    report = nf4conv.quantize("./Llama-3.1-8B", "./Llama-3.1-8B-nf4", verify=True)
    nf4conv.inspect("./Llama-3.1-8B-nf4").totals          what it holds, by its headers
    nf4conv.verify("./Llama-3.1-8B-nf4").verdict          whether it is sound; with a source, right
    nf4conv.dequantize("./Llama-3.1-8B-nf4", "./again")   back to 16 bits

A checkpoint is a folder, a weight file, or "org/name" on the Hugging Face Hub. Options are
keywords, which `help(nf4conv.quantize)` explains. Results are dataclasses; `nf4conv.to_json` spells
them. Whatever a user can mend is an `nf4conv.Nf4convError`, which knows its `path` and `tensor`.

`plan_quantize` says what `quantize` would do, and does it later. For tensors: `quantize_4bit`,
`dequantize_4bit`, `linear_4bit`. docs/python.md shows them in use. The functions say on the logger
"nf4conv" what they do.
"""

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nf4conv.version import __version__ as __version__

if TYPE_CHECKING:
    # the public names, for type checkers and editors; `_MODULE_OF` is made from these lines
    from nf4conv.check.structure import Finding as Finding
    from nf4conv.codec.ops import dequantize_4bit as dequantize_4bit
    from nf4conv.codec.ops import quantize_4bit as quantize_4bit
    from nf4conv.codec.quant_state import QuantState as QuantState
    from nf4conv.commands.dequantize import dequantize as dequantize
    from nf4conv.commands.environment import environment as environment
    from nf4conv.commands.evaluate import evaluate as evaluate
    from nf4conv.commands.inspect import inspect as inspect
    from nf4conv.commands.quantize import Plan as Plan
    from nf4conv.commands.quantize import plan_quantize as plan_quantize
    from nf4conv.commands.quantize import quantize as quantize
    from nf4conv.commands.verify import verify as verify
    from nf4conv.errors import CodecError as CodecError
    from nf4conv.errors import Nf4convError as Nf4convError
    from nf4conv.errors import OptionError as OptionError
    from nf4conv.errors import OutputError as OutputError
    from nf4conv.errors import PlanError as PlanError
    from nf4conv.errors import SourceError as SourceError
    from nf4conv.errors import VerificationError as VerificationError
    from nf4conv.inference.linear import linear_4bit as linear_4bit
    from nf4conv.inference.patching import patch_linear_4bit as patch_linear_4bit
    from nf4conv.inference.patching import unpatch_linear_4bit as unpatch_linear_4bit
    from nf4conv.plan.rows import PlanTotals as PlanTotals
    from nf4conv.plan.rows import TensorRow as TensorRow
    from nf4conv.report.as_json import to_json as to_json
    from nf4conv.report.page import write_page as write_page
    from nf4conv.report.results import Environment as Environment
    from nf4conv.report.results import Evaluation as Evaluation
    from nf4conv.report.results import Evaluations as Evaluations
    from nf4conv.report.results import Inspection as Inspection
    from nf4conv.report.results import RunReport as RunReport
    from nf4conv.report.results import VerifyReport as VerifyReport


# A public name is imported when it is first used, because `nf4conv --help` and plans must not wait
# for torch, whose import takes seconds.
_MODULE_OF: Final[dict[str, str]] = {}
for _node in ast.walk(ast.parse(Path(__file__).read_text("utf-8"))):
    if isinstance(_node, ast.ImportFrom) and _node.col_offset:  # those above are indented
        for _alias in _node.names:
            _MODULE_OF[str(_alias.asname)] = str(_node.module)

__all__ = sorted(_MODULE_OF)

if not TYPE_CHECKING:  # a type checker would take every misspelled name for one that this answers

    def __getattr__(name: str) -> object:
        """Imports a public name on its first use."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'nf4conv' has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
